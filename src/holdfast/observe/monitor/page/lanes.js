// A lane a worker: its phases over time, with deaths, joins and what was slow. Only visible lanes are drawn.

import { colours } from "./colours.js";
import { byId, fitCanvas, keyed, make, setAttribute, setText } from "./dom.js";
import { count, listing, moment, ranges, timeTick, timeTicks } from "./format.js";
import { rows } from "./state.js";
import { MARKS, PHASES, STATES } from "./words.js";

const ROW = 26;
const MOST_VISIBLE = 16;
const RIGHT = 10;
const HINT = "Select a worker for its output.";
const FILTERS = {
  all: () => true,
  training: ({ state }) => state === "training" || state === "recovering",
  troubled: (worker, lane) => ["lost", "left"].includes(worker.state) || Boolean(lane?.marks?.length && worker.cause),
  waiting: ({ state }) => ["spare", "joining", "starting"].includes(state),
};

const view = { state: null, list: [], active: 0, open: () => {} };

export function startLanes(redraw, open) {
  view.open = open;
  const box = byId("lanes");
  box.addEventListener("scroll", redraw);
  box.addEventListener("keydown", onKey);
  box.addEventListener("focus", () => select(view.active));
  box.addEventListener("click", (event) => openRow(event.target.closest("[role=option]")));
  box.addEventListener("pointermove", onPointer);
  box.addEventListener("pointerleave", () => setText(byId("lanes-reading"), HINT));
  for (const id of ["lanes-filter", "lanes-window"]) byId(id).addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(box);
  drawLegend();
}

export function drawLanes(state) {
  view.state = state;
  const keep = FILTERS[byId("lanes-filter").value];
  view.list = rows(state.workers).filter((worker) => keep(worker, state.lanes.get(worker.id)));
  view.active = Math.max(0, Math.min(view.active, view.list.length - 1));
  setText(byId("workers-sentence"), sentence(state));
  const box = byId("lanes");
  const high = Math.max(1, Math.min(view.list.length, MOST_VISIBLE)) * ROW;
  box.style.height = `${high + 2}px`;
  byId("lanes-space").style.height = `${Math.max(1, view.list.length) * ROW}px`;
  drawVisible(high);
}

function drawVisible(high) {
  const box = byId("lanes");
  const width = box.clientWidth;
  if (!width) return;
  const first = Math.floor(box.scrollTop / ROW);
  const visible = view.list.slice(first, first + Math.ceil(high / ROW) + 1);
  const frame = frameOf(view.state, width);
  drawAxis(frame);
  const context = fitCanvas(byId("lanes-canvas"), width, high);
  byId("lanes-canvas").style.height = `${high}px`;
  visible.forEach((worker, i) => drawLane(context, frame, worker, (first + i) * ROW - box.scrollTop));
  keyed(
    byId("lanes-rows"),
    visible.map((worker, i) => ({ id: worker.id, worker, place: first + i })),
    () => make("div", { role: "option" }, make("span", { class: "lane-id" }), make("span", { class: "lane-state" })),
    fillRow,
  );
  const active = view.list[view.active];
  if (active) setAttribute(box, "aria-activedescendant", `lane-${active.id}`);
  else box.removeAttribute("aria-activedescendant");
}

function frameOf(state, width) {
  const left = width < 520 ? 118 : 150;
  const end = Math.max(state.now_s ?? 0, 1e-3);
  const span = Number(byId("lanes-window").value);
  const begin = span && span < end ? end - span : 0;
  const x = (t) => left + ((Math.min(Math.max(t, begin), end) - begin) / (end - begin)) * (width - left - RIGHT);
  return { left, begin, end, x, width };
}

function drawAxis({ left, begin, end, x, width }) {
  const context = fitCanvas(byId("lanes-axis"), width, 20);
  const { soft, axis } = colours();
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = soft;
  context.textAlign = "left";
  context.fillText("Worker", 8, 8);
  for (const value of timeTicks(begin, end, Math.max(2, Math.floor((width - left) / 70)))) {
    const text = timeTick(value, end - begin);
    const at = Math.min(Math.max(x(value), left), width - RIGHT);
    context.textAlign = at > width - 40 ? "right" : at < left + 20 ? "left" : "center";
    context.fillText(text, at, 8);
    context.fillStyle = axis;
    context.fillRect(Math.round(at), 16, 1, 4);
    context.fillStyle = soft;
  }
}

function drawLane(context, frame, worker, top) {
  const lane = view.state.lanes.get(worker.id);
  for (const [from, to, phase] of lane?.spans ?? []) drawSpan(context, frame, from, to ?? frame.end, phase, top);
  const marks = (lane?.marks ?? []).toReversed(); // a fault is drawn over its detection
  for (const [t, kind] of marks) if (t >= frame.begin) drawMark(context, frame.x(t), top + ROW / 2, kind);
}

function drawSpan(context, { begin, x }, from, to, phase, top) {
  if (to < begin) return;
  const all = colours();
  const [x0, x1] = [x(from), x(to)];
  const wide = Math.max(1, x1 - x0);
  const middle = top + ROW / 2;
  const colour = { start: all.grey, train: all.work, recover: all.amber, "catch-up": all.good, spare: all.axis }[phase];
  context.fillStyle = colour ?? all.axis;
  if (phase === "lost") {
    context.strokeStyle = all.death;
    context.setLineDash([2, 4]);
    context.beginPath();
    context.moveTo(x0, middle);
    context.lineTo(x1, middle);
    context.stroke();
    context.setLineDash([]);
  } else if (phase === "left" || phase === "done") context.fillRect(x0, middle - 1, wide, 2);
  else if (phase === "spare") {
    context.strokeStyle = all.axis;
    context.strokeRect(x0 + 0.5, top + 7.5, Math.max(1, wide - 1), ROW - 15);
  } else context.fillRect(x0, top + 6, wide, ROW - 12);
}

/** Marks differ in shape, not only in colour: a cross, a triangle, a diamond, a dot. */
function drawMark(context, x, y, kind) {
  const all = colours();
  context.fillStyle = context.strokeStyle = { join: all.good, straggler: all.amber, corruption: all.purple }[kind] ?? all.death;
  const shape = new Path2D();
  if (kind === "join") polygon(shape, [x - 5, y + 5], [x + 5, y + 5], [x, y - 6]);
  else if (kind === "straggler") polygon(shape, [x, y - 6], [x + 6, y], [x, y + 6], [x - 6, y]);
  else if (kind === "corruption") shape.arc(x, y, 5, 0, 2 * Math.PI);
  else if (kind === "lost") polygon(shape, [x, y - 7], [x + 1, y - 7], [x + 1, y + 7], [x, y + 7]);
  else {
    polygon(shape, [x - 5, y - 5], [x + 5, y + 5]);
    polygon(shape, [x + 5, y - 5], [x - 5, y + 5]);
  }
  context.lineWidth = 5;
  context.save();
  context.strokeStyle = all.paper; // an edge that keeps a mark visible on its lane
  context.stroke(shape);
  context.restore();
  context.lineWidth = 2.5;
  context.stroke(shape);
  context.fill(shape);
  context.lineWidth = 1;
}

function polygon(path, first, ...others) {
  path.moveTo(...first);
  for (const at of others) path.lineTo(...at);
  path.closePath();
}

function fillRow(element, { worker, place }) {
  element.id = `lane-${worker.id}`;
  element.style.top = `${place * ROW}px`;
  setAttribute(element, "data-state", worker.state);
  setAttribute(element, "aria-selected", place === view.active);
  setAttribute(element, "aria-posinset", place + 1);
  setAttribute(element, "aria-setsize", view.list.length);
  setAttribute(element, "aria-label", describe(worker, view.state.lanes.get(worker.id)));
  setText(element.children[0], String(worker.id));
  setText(element.children[1], STATES[worker.state] ?? worker.state);
}

/** A lane in words, for screen readers. */
export function describe(worker, lane) {
  const words = [`Worker ${worker.id}`, STATES[worker.state] ?? worker.state];
  if (worker.cause) words.push(worker.cause);
  if (worker.step) words.push(`step ${worker.step}`);
  if (worker.slices?.length) words.push(`slices ${ranges(worker.slices)}`);
  if (worker.joined) words.push("joined later");
  if (worker.node >= 0) words.push(`node ${worker.node}`);
  const marks = (lane?.marks ?? []).slice(-5).map(([t, kind, text]) => `${MARKS[kind] ?? kind} at ${moment(t)}: ${text}`);
  return [...words, ...marks].join(", ");
}

function sentence(state) {
  const counts = new Map();
  for (const { state: phase } of state.workers.values()) counts.set(phase, (counts.get(phase) ?? 0) + 1);
  const words = Object.keys(STATES).filter((phase) => counts.has(phase)).map((phase) => `${counts.get(phase)} ${STATES[phase]}`);
  if (!words.length) return "No worker has started yet.";
  return `${count(state.workers.size, "worker")}: ${listing(words)}.`;
}

// --- keyboard and pointer

function onKey(event) {
  const page = MOST_VISIBLE - 1;
  const last = view.list.length - 1;
  const moves = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -last, End: last };
  if (event.key in moves) select(Math.max(0, Math.min(last, view.active + moves[event.key])));
  else if (event.key === "Enter" || event.key === " ") openRow(byId(`lane-${view.list[view.active]?.id}`));
  else return;
  event.preventDefault();
}

function select(place) {
  const box = byId("lanes");
  view.active = place;
  const high = box.clientHeight;
  if (place * ROW < box.scrollTop) box.scrollTop = place * ROW;
  else if ((place + 1) * ROW > box.scrollTop + high) box.scrollTop = (place + 1) * ROW - high;
  if (view.state) drawVisible(high);
}

function openRow(row) {
  if (!row) return;
  view.active = Number(row.getAttribute("aria-posinset")) - 1;
  view.open(view.list[view.active].id);
}

function onPointer(event) {
  const worker = view.list[Math.floor((event.clientY - byId("lanes-space").getBoundingClientRect().top) / ROW)];
  if (!worker || !view.state) return;
  const frame = frameOf(view.state, byId("lanes").clientWidth);
  const at = event.clientX - byId("lanes-space").getBoundingClientRect().left;
  setText(byId("lanes-reading"), readingAt(worker, frame, at));
}

function readingAt(worker, { x, end }, at) {
  const lane = view.state.lanes.get(worker.id);
  const mark = (lane?.marks ?? []).find(([t]) => Math.abs(x(t) - at) < 7);
  const span = (lane?.spans ?? []).findLast(([from, to]) => x(from) <= at && at <= x(to ?? end));
  if (mark) return `Worker ${worker.id}: ${MARKS[mark[1]] ?? mark[1]} at ${moment(mark[0])}, ${mark[2]}`;
  if (!span) return describe(worker);
  const until = span[1] === null ? "until now" : `to ${moment(span[1])}`;
  return `Worker ${worker.id}: ${PHASES[span[2]] ?? span[2]} from ${moment(span[0])} ${until}`;
}

function drawLegend() {
  const phases = Object.entries(PHASES).map(([id, text]) => ({ id: `phase-${id}`, text }));
  const marks = Object.entries(MARKS).map(([id, text]) => ({ id: `mark-${id}`, text }));
  keyed(
    byId("lanes-legend"),
    [...phases, ...marks],
    ({ id, text }) => make("li", {}, make("i", { class: "swatch", "data-lane": id }), make("span", { text })),
    () => {},
  );
}
