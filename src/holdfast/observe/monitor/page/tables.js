// Checkpoints, guard and certificate, nodes, events, sinks, and the command that resumes the run.

import { byId, fillFacts, fillTable, keyed, make, setText, show } from "./dom.js";
import { count, moment, number, seconds, size } from "./format.js";
import { rows } from "./state.js";

const MOST_ROWS = 200;
const LONG = 160;
const FAILURES = new Set(["fault", "lost", "recovery", "restart", "corruption"]);

const VERIFIED = { true: "yes", false: "workers differ", null: "not yet" };

const CHECKPOINTS = [
  { name: "Step", text: ({ step }) => number(step), right: true },
  { name: "At", text: ({ t_s: t }) => moment(t), right: true },
  { name: "Size", text: ({ size_bytes: bytes }) => size(bytes), right: true },
  { name: "Held", text: ({ held_s: held }) => seconds(held), right: true },
  { name: "Written", of: "write_s", text: ({ write_s: wrote }) => seconds(wrote), right: true },
  {
    name: "Verified",
    text: ({ verified }) => VERIFIED[verified ?? null],
    mark: ({ verified }) => ({ true: "good", false: "bad" })[verified] ?? "open",
  },
];

export function drawCheckpoints(state) {
  const all = rows(state.checkpoints).reverse();
  const held = all.reduce((sum, { held_s: value }) => sum + (value ?? 0), 0);
  const words = all.length
    ? `${count(all.length, "checkpoint")}; training was held for ${seconds(held)} in all.`
    : state.run?.checkpoint_dir
      ? "None yet."
      : "This run has no checkpoint directory, so it writes none.";
  setText(byId("checkpoints-sentence"), words);
  show(byId("checkpoints-table").parentElement, all.length > 0);
  const known = CHECKPOINTS.filter(({ of }) => !of || all.some((row) => row[of] !== null));
  fillTable(byId("checkpoints-table"), known, all.slice(0, MOST_ROWS));
}

export function drawIntegrity({ integrity }) {
  const { guard, checks, findings = [], certificate } = integrity ?? {};
  const off = !guard || guard === "off";
  fillFacts(byId("integrity-facts"), [
    ["Guard", off ? "off" : guard],
    ["Checks", off ? "" : number(checks)],
    ["Wrong bits found", off ? "" : number(findings.length)],
    ["Certificate", certificate || "none"],
  ]);
  keyed(
    byId("integrity-findings"),
    findings.map((row, id) => ({ ...row, id })),
    () => make("li"),
    (element, { t_s: t, text }) => setText(element, `${moment(t)}: ${text}`),
  );
}

const NODES = [
  { name: "Node", text: ({ id }) => String(id) },
  { name: "Host", text: ({ host }) => String(host ?? "") },
  { name: "Workers alive", text: ({ alive, workers }) => `${number(alive)} of ${number(workers)}`, right: true },
  { name: "State", text: ({ state }) => String(state), mark: ({ state }) => (state === "lost" ? "bad" : "good") },
];

export function drawNodes(state) {
  fillTable(byId("nodes-table"), NODES, rows(state.nodes));
}

export function startEvents(redraw) {
  byId("events-filter").addEventListener("change", redraw);
}

export function drawEvents(state) {
  const wanted = byId("events-filter").value;
  const keep = ({ kind }) => !wanted || (wanted === "failures" ? FAILURES.has(kind) : matches(kind, wanted));
  keyed(
    byId("events-list"),
    rows(state.events).reverse().filter(keep),
    ({ kind }) => make("li", { "data-kind": kind }, make("span", { class: "when" }), make("b"), make("span")),
    (element, { t_s: t, kind, text }) => {
      const [when, what, words] = element.children;
      setText(when, moment(t));
      setText(what, kind);
      setText(words, text);
      words.title = text.length > LONG ? text : ""; // the style sheet shows its first lines
    },
  );
  const missed = rows(state.sinks).filter((sink) => sink.missed > 0);
  setText(byId("sinks"), missed.map(({ id, missed: many }) => `${id} missed ${count(many, "record")}.`).join(" "));
}

const matches = (kind, wanted) => kind === wanted || (wanted === "change" && ["join", "left"].includes(kind));

export function startResume() {
  byId("resume-copy").addEventListener("click", async () => {
    const button = byId("resume-copy");
    try {
      await navigator.clipboard.writeText(byId("resume-command").textContent);
      setText(button, "Copied");
    } catch {
      getSelection().selectAllChildren(byId("resume-command")); // without the clipboard, as over plain HTTP
      setText(button, "Selected");
    }
    setTimeout(() => setText(button, "Copy"), 2000);
  });
}

function resumeNote(run) {
  if (!run?.resume) return "Without a checkpoint directory nothing is kept to resume from.";
  if (!run.ended) return "If the job ends early, this continues from its newest checkpoint:";
  return run.exit_code === 0 ? "The run is complete. This would begin from its last checkpoint:" : "This continues the run from its newest checkpoint:";
}

export function drawResume({ run }) {
  const resume = run?.resume ?? "";
  show(byId("resume-box"), Boolean(resume));
  setText(byId("resume-command"), resume);
  setText(byId("resume-note"), resumeNote(run));
  fillFacts(byId("run-facts"), [
    ["Run", run?.id],
    ["Started with", run?.command],
    ["Order of sums", run?.order],
    ["Checkpoints in", run?.checkpoint_dir],
    ["Report", run?.report],
    ["Exit code", run?.exit_code],
  ]);
}
