// Several runs side by side: a card each, and one table that compares them.

import { byId, fillTable, keyed, make, setAttribute, setText, show } from "./dom.js";
import { DASH, number, percent, seconds } from "./format.js";
import { drawBar, segments } from "./goodput.js";
import { CAUSES, LEVELS } from "./words.js";

/** Draw the runs that `GET /api/runs` gave. */
export function drawRuns(given) {
  const runs = given.map((run) => ({ ...run, name: nameOf(run, given) }));
  setText(byId("runs-title"), runs.length ? `${number(runs.length)} runs, ${number(runs.filter(({ live }) => live).length)} live` : "No runs yet");
  keyed(byId("runs-cards"), runs, build, fill);
  drawComparison(byId("compare"), runs);
}

/** The name of a run; runs that share a name also show their id. */
function nameOf({ id, name }, runs) {
  const shared = runs.some((other) => other.name === name && other.id !== id);
  return shared && name !== id ? `${name} (${id})` : name;
}

function build({ id }) {
  const name = make("h2", {}, make("a", { href: `?run=${encodeURIComponent(id)}` }));
  return make(
    "article",
    { class: "card run-card" },
    make("p", { class: "word" }),
    name,
    make("p", { class: "lead" }),
    make("progress", { max: 1, "aria-label": "Steps done" }),
    make("div", { class: "bar", role: "img" }),
    make("p", { class: "note" }),
  );
}

function fill(element, { name, live, state, progress, goodput }) {
  const [word, title, sentence, bar, time, note] = element.children;
  setAttribute(element, "data-level", state?.level ?? "busy");
  setText(word, `${LEVELS[state?.level] ?? "Unknown"} · ${live ? "live" : "recorded"}`);
  setText(title.firstChild, name);

  setText(sentence, state?.sentence ?? "");
  show(bar, progress?.planned > 0);
  if (progress?.planned > 0) [bar.max, bar.value] = [progress.planned, Math.min(progress.step, progress.planned)];
  show(time, Boolean(goodput));
  if (goodput) drawBar(time, segments(goodput), goodput.wall_s || 1);
  const pace = progress?.steps_per_s ? `${number(progress.steps_per_s, 3)} steps per second` : "";
  const useful = goodput ? `goodput ${percent(goodput.ratio)} of ${seconds(goodput.wall_s)}` : "goodput not known";
  setText(note, [pace, useful].filter(Boolean).join(" · "));
}

function drawComparison(table, runs) {
  const columns = [
    { name: "", text: ({ id }) => id },
    ...runs.map((run, i) => ({ name: run.name, text: ({ values }) => values[i], right: true })),
  ];
  const lines = [
    ["State", ({ state }) => LEVELS[state?.level] ?? DASH],
    ["Step", ({ progress: p }) => (p?.planned ? `${number(p.step)} of ${number(p.planned)}` : number(p?.step))],
    ["Steps per second", ({ progress: p }) => number(p?.steps_per_s, 3)],
    ["Time", ({ goodput }) => seconds(goodput?.wall_s)],
    ["Goodput", ({ goodput }) => percent(goodput?.ratio)],
    ...Object.entries(CAUSES).map(([cause, name]) => [name, ({ goodput }) => seconds(goodput?.badput_s?.[cause])]),
  ];
  fillTable(table, columns, lines.map(([id, value]) => ({ id, values: runs.map(value) })));
}
