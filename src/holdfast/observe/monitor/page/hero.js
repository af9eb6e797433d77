// The state of the run in one sentence, and its key numbers.

import { byId, keyed, make, setAttribute, setText, show } from "./dom.js";
import { count, DASH, number, percent, seconds } from "./format.js";
import { alive, recoveryCount } from "./state.js";
import { LEVELS, recoveryCost } from "./words.js";

export function drawHero(state) {
  const { level = "busy", sentence = "" } = state.state ?? {};
  setAttribute(byId("hero"), "data-level", level);
  setAttribute(byId("hero-icon"), "href", `#icon-${level in LEVELS ? level : "busy"}`);
  setText(byId("hero-word"), LEVELS[level] ?? level);
  setText(byId("sentence"), sentence);
  setText(byId("about"), about(state));
  const { step = 0, planned = 0 } = state.progress ?? {};
  const bar = byId("progress");
  show(bar, planned > 0);
  if (planned > 0) [bar.max, bar.value] = [planned, Math.min(step, planned)];
  keyed(byId("tiles"), tiles(state), build, fill);
}

function about({ run }) {
  if (!run) return "";
  const began = run.started_unix ? `started ${new Date(run.started_unix * 1000).toLocaleString("en-GB")}` : "";
  return [run.script, run.strategy && `strategy ${run.strategy}`, run.fabric && `fabric ${run.fabric}`, began]
    .filter(Boolean)
    .join(" · ");
}

function tiles(state) {
  const progress = state.progress ?? {};
  const { step, planned, steps_per_s: rate, eta_s: left, steps_redone: redone = 0, samples_lost: missing = 0, restarts = 0 } = progress;
  const working = alive(state).filter(({ state: phase }) => phase !== "spare").length;
  const lost = [...state.workers.values()].filter(({ state: phase }) => phase === "lost").length;
  const spares = [...state.workers.values()].filter(({ state: phase }) => phase === "spare").length;
  const cost = recoveryCost(state.goodput?.badput_s);
  const notes = [lost && `${lost} lost`, spares && count(spares, "spare")].filter(Boolean);
  const found = [
    ["step", number(step), planned ? `of ${number(planned)} steps` : "steps", [redone && `${number(redone)} redone`, missing && `${count(missing, "sample")} lost`].filter(Boolean).join(", ")],
    ["rate", number(rate, 3), "steps per second", left ? `${seconds(left)} left` : ""],
    ["workers", number(working), working === 1 ? "worker" : "workers", notes.join(", ")],
    ["goodput", percent(state.goodput?.ratio), "goodput", `of ${seconds(state.now_s ?? state.goodput?.wall_s)}`],
    ["cost", state.goodput ? seconds(cost) : DASH, "cost of failures", [count(recoveryCount(state), "recovery", "recoveries"), restarts && count(restarts, "restart")].filter(Boolean).join(", ")],
  ];
  return found.map(([id, ...words]) => ({ id, words }));
}

function build() {
  return make("div", {}, make("dt"), make("dd", {}, make("span"), make("small")));
}

function fill(element, { words: [value, name, note] }) {
  const [head, body] = element.children;
  setText(head, value);
  setText(body.children[0], name);
  setText(body.children[1], note);
}
