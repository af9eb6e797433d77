// Metrics over steps or time, one small chart each, with the recoveries as vertical lines.

import { colours } from "./colours.js";
import { byId, fitCanvas, keyed, make, setAttribute, setText, show } from "./dom.js";
import { count, moment, number, seconds, tick, ticks, timeTick, timeTicks } from "./format.js";
import { rows } from "./state.js";

const HEIGHT = 190;
const ROOM = { left: 52, right: 14, top: 10, bottom: 34 };
const FONT = "12px system-ui, sans-serif";
const MOST_LINES = 30;
const NAMES = { loss: "Loss", rate: "Steps per second" };
const FIRST = ["loss", "rate"];

export function startCharts(redraw) {
  byId("chart-x").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(byId("charts"));
}

export function drawCharts(state) {
  const list = rows(state.series).filter(({ points }) => points.length);
  list.sort((a, b) => order(a.id) - order(b.id));
  const recoveries = [...state.recoveries.values()];
  keyed(byId("charts"), list, build, (element, series) => (element.series = series));
  for (const element of byId("charts").children) drawChart(element, recoveries);
  show(byId("charts-none"), !list.length);
}

const order = (id) => (FIRST.includes(id) ? FIRST.indexOf(id) : FIRST.length);

function build({ id }) {
  const head = make("figcaption", {}, make("b", { text: NAMES[id] ?? id }), make("output", { class: "reading" }));
  const canvas = make("canvas", { role: "img", tabindex: "0" });
  const figure = make("figure", { class: "chart" }, head, canvas);
  canvas.addEventListener("pointermove", (event) => point(figure, nearest(figure, event.offsetX)));
  canvas.addEventListener("pointerleave", () => point(figure, null));
  canvas.addEventListener("blur", () => point(figure, null));
  canvas.addEventListener("keydown", (event) => step(figure, event));
  return figure;
}

function point(figure, at) {
  figure.at = at;
  drawChart(figure, figure.recoveries ?? []);
}

function step(figure, event) {
  const last = figure.series.points.length - 1;
  const at = figure.at ?? last + 1;
  const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at - 20, PageDown: at + 20 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  point(figure, Math.max(0, Math.min(last, next)));
}

function nearest(figure, x) {
  const xs = figure.xs ?? [];
  let best = null;
  xs.forEach((value, i) => {
    if (best === null || Math.abs(value - x) < Math.abs(xs[best] - x)) best = i;
  });
  return best;
}

function drawChart(figure, recoveries) {
  const [head, canvas] = figure.children;
  const { id, points } = figure.series;
  figure.recoveries = recoveries;
  const width = figure.clientWidth;
  if (!width) return;
  const byTime = byId("chart-x").value === "time";
  const frame = frameOf(points, byTime, width);
  const context = fitCanvas(canvas, width, HEIGHT);
  context.font = FONT;
  drawAxes(context, frame, byTime);
  drawRecoveries(context, frame, recoveries, byTime);
  drawLine(context, frame, points, byTime);
  figure.xs = points.map((p) => frame.x(p[byTime ? 1 : 0]));
  const shown = points[figure.at ?? -1];
  if (shown) drawCursor(context, frame, shown, byTime);
  setText(head.lastChild, reading(shown ?? points.at(-1), Boolean(shown)));
  setAttribute(canvas, "aria-label", summary(NAMES[id] ?? id, points));
}

/** The scales of a chart: value to pixel, and the range of both axes. */
function frameOf(points, byTime, width) {
  const xs = points.map((p) => p[byTime ? 1 : 0]);
  const ys = points.map((p) => p[2]).filter(Number.isFinite);
  const [x0, x1] = range(xs, 1);
  let [y0, y1] = range(ys, Math.abs(ys[0]) || 1);
  if (y0 > 0 && y0 < 0.5 * y1) y0 = 0;
  const room = (y1 - y0) * 0.06;
  [y0, y1] = [y0 === 0 ? 0 : y0 - room, y1 + room];
  const [wide, high] = [width - ROOM.left - ROOM.right, HEIGHT - ROOM.top - ROOM.bottom];
  const x = (value) => ROOM.left + ((value - x0) / (x1 - x0)) * wide;
  const y = (value) => ROOM.top + high - ((value - y0) / (y1 - y0)) * high;
  return { x, y, x0, x1, y0, y1, width };
}

function range(values, least) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  return high > low ? [low, high] : [low - least / 2, high + least / 2];
}

function drawAxes(context, { x, y, x0, x1, y0, y1, width }, byTime) {
  const { line, soft, axis } = colours();
  context.lineWidth = 1;
  context.fillStyle = soft;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of ticks(y0, y1, 4)) {
    const at = Math.round(y(value)) + 0.5;
    stroke(context, line, [ROOM.left, at], [width - ROOM.right, at]);
    context.fillText(tick(value), ROOM.left - 8, at);
  }
  const bottom = HEIGHT - ROOM.bottom;
  stroke(context, axis, [ROOM.left, bottom + 0.5], [width - ROOM.right, bottom + 0.5]);
  context.textAlign = "center";
  const most = Math.max(2, Math.floor((width - ROOM.left) / 60));
  const places = byTime ? timeTicks(x0, x1, most) : ticks(x0, x1, most).filter(Number.isInteger);
  for (const value of places) {
    stroke(context, axis, [Math.round(x(value)) + 0.5, bottom], [Math.round(x(value)) + 0.5, bottom + 4]);
    context.fillText(byTime ? timeTick(value, x1 - x0) : tick(value), x(value), bottom + 14);
  }
  context.textAlign = "right";
  context.fillText(byTime ? "time" : "step", width - ROOM.right, bottom + 27);
}

/** A dashed line a recovery; many of them are short lines on the axis, as they would hide the curve. */
function drawRecoveries(context, { x, x0, x1 }, recoveries, byTime) {
  const bottom = HEIGHT - ROOM.bottom;
  const top = recoveries.length > MOST_LINES ? bottom - 7 : ROOM.top;
  context.setLineDash(recoveries.length > MOST_LINES ? [] : [3, 3]);
  const drawn = new Set();
  for (const recovery of recoveries) {
    const value = byTime ? recovery.t_s : recovery.step;
    const at = Math.round(x(value)) + 0.5;
    if (value < x0 || value > x1 || drawn.has(at)) continue;
    drawn.add(at);
    stroke(context, colours().death, [at, top], [at, bottom]);
  }
  context.setLineDash([]);
}

function drawLine(context, { x, y }, points, byTime) {
  context.beginPath();
  let open = false;
  for (const p of points) {
    if (!Number.isFinite(p[2])) open = false; // a gap where a value is not a number
    else if (open) context.lineTo(x(p[byTime ? 1 : 0]), y(p[2]));
    else context.moveTo(x(p[byTime ? 1 : 0]), y(p[2]));
    open = Number.isFinite(p[2]);
  }
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.strokeStyle = colours().work;
  context.stroke();
}

function drawCursor(context, { x, y }, p, byTime) {
  const at = x(p[byTime ? 1 : 0]);
  stroke(context, colours().soft, [at, ROOM.top], [at, HEIGHT - ROOM.bottom]);
  if (!Number.isFinite(p[2])) return;
  context.beginPath();
  context.arc(at, y(p[2]), 4, 0, 2 * Math.PI);
  context.fillStyle = colours().work;
  context.fill();
}

function stroke(context, colour, from, to) {
  context.beginPath();
  context.strokeStyle = colour;
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

function reading(p, pointed) {
  if (!p) return "";
  const value = p[2] === null ? "not a number" : number(p[2]);
  return pointed ? `${value} at step ${number(p[0])}, ${moment(p[1])}` : value;
}

function summary(name, points) {
  const values = points.map((p) => p[2]).filter(Number.isFinite);
  if (!values.length) return `${name}: no numbers yet`;
  const [low, high] = range(values, 0);
  const span = `${count(points.length, "point")} to step ${number(points.at(-1)[0])}, ${seconds(points.at(-1)[1])}`;
  return `${name}: now ${number(values.at(-1))}, lowest ${number(low)}, highest ${number(high)}; ${span}. Arrow keys read it point by point.`;
}
