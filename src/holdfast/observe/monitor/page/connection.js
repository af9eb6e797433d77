// The stream of one run: server-sent events by fetch, as EventSource sends no headers; it reconnects by itself.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
/** The server sends something every 5 s at least; after this silence the connection is taken for lost. */
const SILENCE_MS = 12000;
const KEY = "holdfast-token";

/** The token of this tab, or "". */
export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  /** Take the token out of the address, so that it is in no history, picture or link. */
  takeFromAddress() {
    const address = new URL(location.href);
    const given = address.searchParams.get("token");
    if (given === null) return;
    if (given) this.set(given);
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  },
};

/** An answer other than 2xx: `status`, and one line in `message`. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask the server; `path` is relative to the page, so that the page also works below a path of a proxy. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body ? JSON.stringify(body) : undefined,
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (!answer.ok) throw new Refused(answer.status, await oneLine(answer));
  return answer;
}

async function oneLine(answer) {
  const text = await answer.text();
  try {
    return String(JSON.parse(text).error);
  } catch {
    return `the server answered ${answer.status} ${answer.statusText}`.trim();
  }
}

/** Path of a run below the page. */
export const runPath = (id, rest = "") => `api/runs/${encodeURIComponent(id)}${rest}`;

/** Return a function that takes text of a stream in pieces, and calls `take(event, data)` for each whole event. */
export function eventParser(take) {
  let rest = "";
  let event = "";
  let data = [];
  return (text) => {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (data.length) take(event || "message", data.join("\n"));
        [event, data] = ["", []];
      } else if (line.startsWith("event:")) event = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  };
}

/** Wait before attempt number `attempt` (0, 1, …) to connect again, in milliseconds. */
export const waitMs = (attempt) => Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** attempt);

/** Follows one run until `stop`; tells `full(state)`, `change(change)` and `status({phase, lostAt, retryAt, error})`. */
export class Connection {
  constructor(id, { full, change, status }) {
    this.id = id;
    this.take = { full, change };
    this.tell = status;
    this.attempt = 0;
    this.lostAt = null;
    this.stopped = false;
    this.wake = () => {};
  }

  async start() {
    while (!this.stopped) {
      let error;
      try {
        await this.follow();
        error = new Error("the server ended the stream");
      } catch (caught) {
        error = caught;
      }
      if (this.stopped) return;
      this.lostAt ??= new Date();
      const wait = waitMs(this.attempt);
      this.attempt += 1;
      this.tell({ phase: "lost", lostAt: this.lostAt, retryAt: Date.now() + wait, error });
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, wait);
      });
    }
  }

  /** Try again at once. */
  retry() {
    this.attempt = 0;
    this.wake();
  }

  stop() {
    this.stopped = true;
    this.abort?.abort();
    this.wake();
  }

  async follow() {
    this.abort = new AbortController();
    let timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
    try {
      const answer = await ask(runPath(this.id, "/stream"), { signal: this.abort.signal });
      const parse = eventParser((event, data) => this.receive(event, JSON.parse(data)));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        clearTimeout(timer);
        if (done) return;
        timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
        if (!this.stopped) parse(value);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  receive(event, data) {
    if (event === "full") {
      this.attempt = 0;
      this.lostAt = null;
      this.take.full(data);
      this.tell({ phase: "live" });
    } else if (event === "change") this.take.change(data);
  }
}
