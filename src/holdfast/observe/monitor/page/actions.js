// What can be done to a running job: each action needs the token; what cannot be undone asks first.

import { ask, runPath, token } from "./connection.js";
import { byId, make, setText, show } from "./dom.js";
import { count, ranges } from "./format.js";
import { alive } from "./state.js";

/** What can be set while a job runs: name in the request, name on the page, and whether it is a number. */
const SETTINGS = [
  ["lr", "learning rate", true],
  ["batch_size", "batch size", true],
  ["strategy", "strategy", false],
  ["checkpoint_every", "steps between checkpoints", true],
];

const ACTIONS = ["kill", "scale", "set", "save", "stop"];

const view = { state: null, connected: false };

export function startActions() {
  byId("act-set").elements.setting.append(...SETTINGS.map(([value, text]) => make("option", { value, text })));
  handle("act-kill", (form) => confirmKill(Number(form.rank.value)));
  handle("act-scale", (form) => act({ action: "scale", workers: Number(form.workers.value) }));
  handle("act-set", (form) => act({ action: "set", ...setting(form.setting.value, form.value.value.trim()) }));
  handle("act-save", () => act({ action: "save" }));
  handle("act-stop", confirmStop);
  handle("act-token", (form) => {
    takeToken(form.token.value);
    form.token.value = "";
    return Promise.resolve("The token is kept in this tab.");
  });
}

function whyNot(ended, live, connected) {
  if (ended) return "The run has ended.";
  if (!connected) return "Not connected.";
  if (!live) return "This page reads the run's records; its own launcher serves the actions.";
  return token.get() ? "" : "Actions need the token of the job: the launcher printed it in the address of this page.";
}

/** Whether a worker can be killed now. */
export function canKill() {
  return !byId("act-all").disabled && !byId("act-kill").hidden;
}

/** Show what can be done now; without a connection, or after the end of the run, nothing. */
export function drawActions(state, connected) {
  Object.assign(view, { state, connected });
  const { ended, live, actions } = state?.run ?? {};
  const reason = whyNot(ended, live, connected);
  show(byId("act-token"), Boolean(live && !ended && !token.get()));
  for (const name of ACTIONS) show(byId(`act-${name}`), actions?.includes(name) ?? true);
  byId("act-all").disabled = Boolean(reason);
  const ids = state ? alive(state).map(({ id }) => id) : [];
  setText(byId("actions-note"), reason || `Alive: ${named(ids)}.`);
  const form = byId("act-kill").elements;
  if (form.rank.value === "" && ids.length > 1 && document.activeElement !== form.rank) form.rank.value = ids.at(-1);
}

/** Ask, then kill a worker; returns what the launcher said, or "" if it was not confirmed. */
export async function confirmKill(rank) {
  const ids = alive(view.state).map(({ id }) => id);
  if (!ids.includes(rank)) throw new Error(`Worker ${rank} is not alive; these are: ${named(ids)}.`);
  const others = ids.length - 1;
  const after = others > 0 ? `Training should continue with the others.` : "It is the last one: the job will end or restart.";
  const yes = await confirm(`Kill worker ${rank}?`, `It receives SIGKILL, as in a real failure. ${after}`, "Kill it");
  return yes ? act({ action: "kill", rank }) : "";
}

/** Workers by number, or how many they are if that is too long to read. */
function named(ids) {
  const text = ranges(ids);
  if (!ids.length) return "no worker";
  return text.length <= 60 ? `worker${ids.length > 1 ? "s" : ""} ${text}` : count(ids.length, "worker");
}

async function confirmStop() {
  const kept = view.state?.run?.checkpoint_dir ? "A checkpoint is written first." : "Nothing is saved: the run has no checkpoint directory.";
  const yes = await confirm("Stop the job?", `All workers end. ${kept}`, "Stop the job");
  return yes ? act({ action: "stop" }) : "";
}

/** Show a question; true if it was answered with yes. */
function confirm(title, text, yes) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function act(body) {
  try {
    const answer = await ask(runPath(view.state.run.id, "/actions"), { body });
    return String((await answer.json()).said);
  } catch (error) {
    if (error.status === 401) takeToken(""); // another launcher has another token
    throw error;
  }
}

function takeToken(value) {
  token.set(value);
  drawActions(view.state, view.connected);
}

function setting(name, text) {
  const [, , numeric] = SETTINGS.find(([known]) => known === name);
  return { [name]: numeric && text !== "" && Number.isFinite(Number(text)) ? Number(text) : text };
}

function handle(id, perform) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    report(byId("act-said"), () => perform(byId(id).elements));
  });
}

/** Show what an action said, or why it was refused, in `place`. */
export async function report(place, perform) {
  place.dataset.kind = "";
  setText(place, "");
  try {
    setText(place, await perform());
  } catch (error) {
    place.dataset.kind = "error";
    setText(place, error.status === 401 || error.status === 403 ? `Not allowed: ${error.message}` : error.message);
  }
}
