// Each recovery: one line, opened into its parts.

import { byId, fillTable, keyed, make, setText, show } from "./dom.js";
import { count, listing, moment, number, percent, seconds } from "./format.js";
import { drawBar } from "./goodput.js";
import { recoveryCount, rows } from "./state.js";
import { parts, RECOVERY_PARTS, recoveryCost } from "./words.js";

const STEP = 20;
let most = STEP;

export function startRecoveries(redraw) {
  byId("recoveries-more").addEventListener("click", () => {
    most += 5 * STEP;
    redraw();
  });
}

export function drawRecoveries(state) {
  const all = rows(state.recoveries).reverse();
  setText(byId("recoveries-sentence"), sentence(all, state));
  keyed(byId("recoveries-list"), all.slice(0, most), build, fill);
  show(byId("recoveries-more"), all.length > most);
  setText(byId("recoveries-more"), `Show more of ${number(all.length)}`);
}

function sentence(all, state) {
  const { goodput } = state;
  if (!all.length) return "None so far.";
  const known = all.map(({ duration_s: duration }) => duration).filter(Number.isFinite);
  const slowest = known.length ? `; the slowest took ${seconds(Math.max(...known))}` : "";
  const cost = goodput ? ` ${all.length === 1 ? "It" : "They"} cost ${seconds(recoveryCost(goodput.badput_s))}, ${percent(recoveryCost(goodput.badput_s) / goodput.wall_s)} of the time.` : "";
  return `${count(recoveryCount(state), "recovery", "recoveries")}${slowest}.${cost}`;
}

function build() {
  const summary = make("summary", {}, make("span", { class: "when" }), make("span", { class: "what" }), make("b"));
  return make("details", { class: "recovery" }, summary, make("div", { class: "bar thin", role: "img" }), make("table"), make("p", { class: "note" }));
}

function fill(element, recovery) {
  const [summary, bar, table, note] = element.children;
  const [when, what, duration] = summary.children;
  setText(when, moment(recovery.t_s));
  setText(what, lostWords(recovery));
  setText(duration, seconds(recovery.duration_s));
  const found = parts(recovery.parts ?? {}, RECOVERY_PARTS).map(([id, name, value]) => ({ id, name, seconds: value }));
  const whole = found.reduce((sum, part) => sum + part.seconds, 0);
  show(bar, whole > 0);
  show(table, whole > 0);
  drawBar(bar, found, whole || 1);
  fillTable(table, columns(whole), [...found.filter((part) => part.seconds > 0), { id: "whole", name: "Together", seconds: whole }]);
  const after = Number.isFinite(recovery.workers_after) ? `, with ${count(recovery.workers_after, "worker")} after it` : "";
  const open = whole > 0 ? "" : " Its parts are known once training has resumed.";
  setText(note, `At step ${number(recovery.step)}${recovery.decision ? `: ${recovery.decision}` : ""}${after}.${open}`);
}

const columns = (whole) => [
  { name: "Part", text: ({ name }) => name, cause: ({ id }) => id },
  { name: "Time", text: (part) => seconds(part.seconds), right: true },
  { name: "Share", text: (part) => percent(whole ? part.seconds / whole : 0), right: true },
];

function lostWords({ lost = [], decision }) {
  if (!lost.length) return decision || "change of the membership";
  const causes = new Set(lost.map(({ cause }) => cause).filter(Boolean));
  const names = listing(lost.map(({ rank }) => rank), 6);
  return `worker${lost.length > 1 ? "s" : ""} ${names} lost${causes.size ? `: ${listing([...causes], 3)}` : ""}`;
}
