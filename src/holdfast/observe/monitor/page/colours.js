// Colours of the style sheet for canvases, which cannot use its variables; and the switch between light and dark.

import { byId } from "./dom.js";

const KEY = "holdfast-scheme";
const NAMES = ["paper", "ink", "soft", "axis", "line", "wash", "work", "work-light", "death", "good", "amber", "purple", "grey"];
const listeners = [];
let known = null;

/** The colours in use, by the names of the variables in app.css. */
export function colours() {
  if (known) return known;
  const probe = document.body.appendChild(document.createElement("span"));
  known = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    known[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return known;
}

/** Call `redraw` when the colours change. */
export function onColours(redraw) {
  listeners.push(redraw);
}

export function startSwitch() {
  const select = byId("scheme");
  select.value = localStorage.getItem(KEY) ?? "";
  const apply = () => {
    if (select.value) document.documentElement.dataset.scheme = select.value;
    else delete document.documentElement.dataset.scheme;
    known = null;
    for (const redraw of listeners) redraw();
  };
  select.addEventListener("change", () => {
    localStorage.setItem(KEY, select.value);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
