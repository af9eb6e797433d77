// Where the time went: one bar of all the time, and its legend in words.

import { byId, fillFacts, keyed, make, setAttribute, setText, show } from "./dom.js";
import { listing, percent, seconds } from "./format.js";
import { parts } from "./words.js";

/** Share of a bar below which a part is not drawn, but still listed. */
const THINNEST = 0.0005;

export function drawGoodput(state) {
  const goodput = state.goodput;
  show(byId("time-bar"), Boolean(goodput));
  show(byId("time-meanings"), Boolean(goodput && state.causes));
  if (!goodput) {
    setText(byId("time-sentence"), "Not known: Holdfast does not see the steps of this script.");
    keyed(byId("time-legend"), [], null, null);
    setText(byId("time-none"), "");
    return;
  }
  const all = segments(goodput);
  const wall = goodput.wall_s || 1;
  setText(byId("time-sentence"), sentence(goodput, all));
  drawBar(byId("time-bar"), all, wall);
  drawLegend(byId("time-legend"), all, wall, state.causes ?? {});
  const none = all.filter(({ id, seconds: value }) => id !== "useful" && !value).map(({ name }) => name.toLowerCase());
  setText(byId("time-none"), none.length ? `No time went to ${listing(none, 12)}.` : "");
  fillFacts(byId("time-words"), meanings(state.causes ?? {}));
}

/** Useful work, each cause of badput, and what has no cause yet, as [{id, name, seconds}, …]. */
export function segments(goodput) {
  const badput = parts(goodput.badput_s ?? {}).map(([id, name, value]) => ({ id, name, seconds: value }));
  const known = badput.reduce((sum, { seconds: value }) => sum + value, goodput.useful_s);
  const open = goodput.wall_s - known;
  const found = [{ id: "useful", name: "Useful work", seconds: goodput.useful_s }, ...badput];
  if (open > 1e-3 * Math.max(1, goodput.wall_s)) found.push({ id: "open", name: "Recovery in progress", seconds: open });
  return found;
}

/** Fill a bar with segments that share `whole`; its accessible name lists them. */
export function drawBar(bar, all, whole) {
  const drawn = all.filter(({ seconds: value }) => value > whole * THINNEST);
  keyed(
    bar,
    drawn,
    ({ id }) => make("span", { class: "segment", "data-cause": id }),
    (element, { name, seconds: value }) => {
      element.style.flexGrow = String(value / whole);
      setAttribute(element, "title", `${name}: ${seconds(value)}, ${percent(value / whole)}`);
    },
  );
  const words = drawn.map(({ name, seconds: value }) => `${name} ${percent(value / whole)}`);
  setAttribute(bar, "aria-label", words.length ? words.join(", ") : "No time yet");
}

function drawLegend(list, all, wall, causes) {
  const listed = all.filter(({ seconds: value }) => value > 0);
  keyed(list, listed, buildEntry, (element, { id, name, seconds: value }) => {
    const [, words, time, share] = element.children;
    setText(words, name);
    setText(time, seconds(value));
    setText(share, percent(value / wall));
    setAttribute(element, "title", causes[id] ?? "");
  });
}

function buildEntry({ id }) {
  const item = make("li", {}, make("i", { class: "swatch", "data-cause": id }), make("span"), make("b"), make("span", { class: "share" }));
  item.addEventListener("pointerenter", () => light(id));
  item.addEventListener("pointerleave", () => light(null));
  return item;
}

/** Dim every segment of the bar but one; null ends it. */
function light(id) {
  for (const segment of byId("time-bar").children) segment.toggleAttribute("data-dim", id !== null && segment.dataset.cause !== id);
}

function sentence(goodput, all) {
  const lost = all.filter(({ id, seconds: value }) => id !== "useful" && value > 0).sort((a, b) => b.seconds - a.seconds);
  const most = lost[0] ? ` Most of the rest: ${lost[0].name.toLowerCase()}, ${seconds(lost[0].seconds)}.` : "";
  return `${percent(goodput.ratio)} of ${seconds(goodput.wall_s)} was useful work.${most}`;
}

function meanings(causes) {
  return parts(causes).map(([key, name]) => [name, causes[key] ?? ""]);
}
