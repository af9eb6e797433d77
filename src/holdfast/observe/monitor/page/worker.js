// One worker in a drawer: its facts, its last output, and the action that kills it.

import { canKill, confirmKill, report } from "./actions.js";
import { ask, runPath } from "./connection.js";
import { byId, fillFacts, setText } from "./dom.js";
import { moment, number, ranges } from "./format.js";
import { ENDED, MARKS, STATES } from "./words.js";

const LINES = 200;
const EVERY_MS = 2000;
/** Colours and movements for a terminal, which a page shows as noise. */
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;

const view = { id: null, state: null, timer: 0 };

export function startWorker() {
  const drawer = byId("drawer");
  byId("drawer-close").addEventListener("click", () => drawer.close());
  drawer.addEventListener("click", (event) => event.target === drawer && drawer.close()); // beside the drawer
  drawer.addEventListener("close", () => {
    clearTimeout(view.timer);
    view.id = null;
    setText(byId("drawer-log"), "");
  });
  byId("drawer-follow").addEventListener("change", load);
  byId("drawer-kill").addEventListener("click", () => report(byId("drawer-said"), () => confirmKill(view.id)));
}

export function openWorker(state, id) {
  Object.assign(view, { id, state });
  setText(byId("drawer-said"), "");
  setText(byId("drawer-log"), "Loading…");
  drawWorker(state);
  byId("drawer").showModal();
  load();
}

export function drawWorker(state) {
  view.state = state;
  const worker = state?.workers.get(view.id);
  if (!worker) return;
  const last = (state.lanes.get(view.id)?.marks ?? []).at(-1);
  byId("drawer-kill").disabled = !canKill() || ENDED.has(worker.state);
  setText(byId("drawer-title"), `Worker ${worker.id}`);
  fillFacts(byId("drawer-facts"), [
    ["State", `${STATES[worker.state] ?? worker.state} since ${moment(worker.since_s)}`],
    ["Cause", worker.cause],
    ["Step", number(worker.step)],
    ["Slices", worker.slices?.length ? ranges(worker.slices) : "none"],
    ["Node", worker.node >= 0 ? worker.node : ""],
    ["Process", worker.pid],
    ["Joined", worker.joined ? "after the start" : "at the start"],
    ["Last mark", last ? `${MARKS[last[1]] ?? last[1]} at ${moment(last[0])}: ${last[2]}` : ""],
  ]);
}

async function load() {
  clearTimeout(view.timer);
  const id = view.id;
  if (id === null) return;
  try {
    const answer = await ask(runPath(view.state.run.id, `/log?rank=${id}&lines=${LINES}`));
    const { lines } = await answer.json();
    if (view.id === id) showLines(lines);
  } catch (error) {
    if (view.id === id) setText(byId("drawer-log"), `The output cannot be read: ${error.message}`);
  }
  if (view.id === id && byId("drawer-follow").checked) view.timer = setTimeout(load, EVERY_MS);
}

function showLines(lines) {
  const log = byId("drawer-log");
  const text = lines.map((line) => line.replace(ESCAPES, "")).join("\n") || "It has written nothing.";
  if (log.textContent === text) return;
  log.textContent = text;
  if (byId("drawer-follow").checked) log.scrollTop = log.scrollHeight;
}
