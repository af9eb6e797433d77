// What the page knows of a run, and how a change from the server is merged into it.

import { ENDED } from "./words.js";

/** Sections that are lists of rows with an id, and how many of the newest rows are kept. */
const LISTS = {
  series: 100,
  workers: Infinity,
  lanes: Infinity,
  recoveries: 5000,
  checkpoints: 5000,
  nodes: Infinity,
  events: 300,
  sinks: 100,
};

/** Every section, named as the server names it. */
export const SECTIONS = ["run", "now_s", "state", "progress", "goodput", "causes", "integrity", ...Object.keys(LISTS)];

/** Take a whole state from the server: lists become maps from id to row. */
export function fromFull(full) {
  const state = { version: full.version ?? 0 };
  for (const name of SECTIONS) {
    if (name in LISTS) state[name] = bounded(new Map((full[name] ?? []).map((row) => [row.id, row])), LISTS[name]);
    else state[name] = full[name] ?? null;
  }
  return state;
}

/**
 * Merge a change into a state; a change that is older than the state is left out.
 * @returns {Set<string>} the names of the sections that changed
 */
export function merge(state, change) {
  const changed = new Set();
  if (change.version < state.version) return changed;
  for (const [name, value] of Object.entries(change)) {
    if (name === "version") state.version = value;
    else if (name === "dropped") drop(state, value, changed);
    else if (name in LISTS) {
      for (const row of value) state[name].set(row.id, row);
      bounded(state[name], LISTS[name]);
      changed.add(name);
    } else if (SECTIONS.includes(name)) {
      state[name] = value;
      changed.add(name);
    }
  }
  return changed;
}

/** The rows of a list by ascending id. */
export function rows(map) {
  return [...map.values()].sort((a, b) => (a.id < b.id ? -1 : a.id > b.id ? 1 : 0));
}

/** Recoveries so far: the server keeps the last ones only, and counts all. */
export function recoveryCount(state) {
  return Math.max(0, ...state.recoveries.keys());
}

/** Workers that take part in the job now. */
export function alive(state) {
  return rows(state.workers).filter(({ state: phase }) => !ENDED.has(phase));
}

/** Forget workers that were lost or left long ago. */
function drop(state, ids, changed) {
  for (const id of ids) {
    for (const name of ["workers", "lanes"]) if (state[name].delete(id)) changed.add(name);
  }
}

function bounded(map, most) {
  if (map.size <= most) return map;
  const surplus = rows(map).slice(0, map.size - most);
  for (const { id } of surplus) map.delete(id);
  return map;
}
