// The page: which run is shown, its connection, and what is drawn when.

import { drawActions, startActions } from "./actions.js";
import { drawCharts, startCharts } from "./charts.js";
import { onColours, startSwitch } from "./colours.js";
import { ask, Connection, token } from "./connection.js";
import { byId, setText, show } from "./dom.js";
import { clock } from "./format.js";
import { drawGoodput } from "./goodput.js";
import { drawHero } from "./hero.js";
import { drawLanes, startLanes } from "./lanes.js";
import { drawRecoveries, startRecoveries } from "./recoveries.js";
import { drawRuns } from "./runs.js";
import { fromFull, merge, SECTIONS } from "./state.js";
import { drawCheckpoints, drawEvents, drawIntegrity, drawNodes, drawResume, startEvents, startResume } from "./tables.js";
import { drawWorker, openWorker, startWorker } from "./worker.js";

/** What is drawn, the most important first, and the sections of the state that each shows. */
const VIEWS = [
  [drawHero, ["state", "progress", "goodput", "workers", "recoveries", "run"]],
  [drawLanes, ["lanes", "workers", "now_s"]],
  [drawGoodput, ["goodput", "causes"]],
  [drawCharts, ["series", "recoveries"]],
  [drawRecoveries, ["recoveries", "goodput"]],
  [(state) => drawActions(state, page.phase === "live"), ["workers", "run"]],
  [drawEvents, ["events", "sinks"]],
  [drawCheckpoints, ["checkpoints", "run"]],
  [drawNodes, ["nodes"]],
  [drawIntegrity, ["integrity"]],
  [drawResume, ["run"]],
  [drawWorker, ["workers", "lanes", "run"]],
];

/** A frame draws views until so much of it is used, and leaves the others to the next frame. */
const FRAME_MS = 10;
const RUNS_EVERY_MS = 1000;

const page = { state: null, connection: null, phase: "connecting", lost: null, dirty: new Set(), frame: 0, timer: 0 };

// --- drawing

function redraw(...sections) {
  for (const [draw, shown] of VIEWS) if (shown.some((name) => sections.includes(name))) page.dirty.add(draw);
  if (!page.frame && page.state) page.frame = requestAnimationFrame(drawFrame);
}

function drawFrame(begin) {
  page.frame = 0;
  for (const [draw] of VIEWS) {
    if (!page.dirty.delete(draw)) continue;
    draw(page.state);
    if (performance.now() - begin > FRAME_MS) break;
  }
  if (page.dirty.size) page.frame = requestAnimationFrame(drawFrame);
}

const redrawAll = () => redraw(...SECTIONS);

// --- one run

function follow(id) {
  page.connection?.stop();
  clearTimeout(page.timer);
  showView("run-view");
  page.connection = new Connection(id, { full: takeFull, change: takeChange, status: takeStatus });
  page.connection.start();
}

function takeFull(full) {
  page.state = fromFull(full);
  const name = full.run?.script || full.run?.id || "";
  setText(byId("run-name"), name);
  document.title = name ? `${name} · Holdfast` : "Holdfast";
  redrawAll();
}

function takeChange(change) {
  if (!page.state) return;
  const newest = Math.max(-1, ...page.state.events.keys());
  const changed = merge(page.state, change);
  redraw(...changed);
  if (changed.has("events")) announce(newest);
}

/** Tell screen readers of deaths and recoveries, not of every step. */
function announce(newest) {
  const told = [...page.state.events.values()].filter(({ id, kind }) => id > newest && ["lost", "recovery", "corruption", "restart", "end"].includes(kind));
  if (told.length) setText(byId("announce"), told.slice(-3).map(({ text }) => text).join(". "));
}

// --- the connection

function takeStatus(status) {
  if (status.error?.status === 401 || status.error?.status === 403) return askForToken();
  if (status.error?.status === 404) return void choose(); // the launcher came back with another run
  if (page.phase === "live" && status.phase === "lost") setText(byId("announce"), "Connection lost; what you see is old."); // once, not at each attempt
  if (page.lost && status.phase === "live") setText(byId("announce"), "Connected again.");
  page.phase = status.phase;
  page.lost = status.phase === "lost" ? status : null;
  drawLink();
  redraw("run");
  return undefined;
}

function drawLink() {
  const over = Boolean(page.lost && page.state?.run?.ended);
  byId("link").dataset.phase = over ? "over" : page.phase;
  const live = page.state?.run?.live && !page.state.run.ended;
  setText(byId("link"), over ? "Ended" : page.phase === "live" ? (live ? "Live" : "Recorded") : page.phase === "lost" ? "Not connected" : "Connecting");
  document.body.toggleAttribute("data-old", Boolean(page.lost && page.state && !over));
  show(byId("banner"), Boolean(page.lost));
  if (page.lost) drawBanner(over);
}

function drawBanner(over) {
  const { lostAt, retryAt, error } = page.lost;
  const wait = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  const old = page.state ? ` What you see is as of ${clock(lostAt)}.` : "";
  const what = error?.status ? `The server refuses: ${error.message}` : `Connection lost at ${clock(lostAt)}`;
  const words = over
    ? "The run has ended, and its launcher with it. This is its last state."
    : `${what}; trying again ${wait ? `in ${wait}\u00a0s` : "now"}.${old}`;
  show(byId("retry"), !over);
  byId("banner").dataset.kind = over ? "over" : "lost";
  setText(byId("banner-text"), words);
  setTimeout(() => page.lost?.retryAt === retryAt && wait > 0 && drawBanner(over), 1000);
}

function askForToken() {
  page.connection?.stop();
  clearTimeout(page.timer);
  show(byId("banner"), false);
  showView("token-view");
  byId("link").dataset.phase = "locked";
  setText(byId("link"), "Locked");
  byId("token-input").focus();
}

// --- which view

function showView(id) {
  for (const view of ["token-view", "runs-view", "run-view"]) show(byId(view), view === id);
}

/** Show the run that the address names, the only one, or all. */
async function choose() {
  page.connection?.stop();
  clearTimeout(page.timer);
  try {
    const runs = await (await ask("api/runs")).json();
    if (!runs.length && page.state) throw new Error("the launcher has no run yet");
    page.lost = null;
    const wanted = new URL(location.href).searchParams;
    const run = runs.find(({ id }) => id === wanted.get("run")) ?? (runs.length === 1 && !wanted.has("runs") ? runs[0] : null);
    show(byId("all-runs"), runs.length > 1);
    if (run) return follow(run.id);
    showRuns(runs);
  } catch (error) {
    if (error.status === 401 || error.status === 403) return askForToken();
    page.phase = "lost";
    page.lost = { lostAt: page.lost?.lostAt ?? new Date(), retryAt: Date.now() + 2000 };
    drawLink();
    page.timer = setTimeout(choose, 2000);
  }
  return undefined;
}

function showRuns(runs) {
  showView("runs-view");
  page.phase = "live";
  setText(byId("run-name"), "");
  document.title = "Runs · Holdfast";
  drawLink();
  setText(byId("link"), "Connected");
  drawRuns(runs);
  page.timer = setTimeout(choose, RUNS_EVERY_MS);
}

token.takeFromAddress();
startSwitch();
onColours(redrawAll);
startActions();
startCharts(() => redraw("series"));
startLanes(() => redraw("lanes"), (id) => openWorker(page.state, id));
startRecoveries(() => redraw("recoveries"));
startEvents(() => redraw("events"));
startResume();
startWorker();
byId("retry").addEventListener("click", () => (page.connection && !page.connection.stopped ? page.connection.retry() : choose()));
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(byId("token-input").value);
  choose();
});
choose();
