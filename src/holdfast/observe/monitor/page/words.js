// The words and the order of what the server names in short: causes of badput, states of workers, levels of a run.

/** Causes of badput, in the order in which bars and legends show them. */
export const CAUSES = {
  start_up: "Start-up",
  step_redone: "Steps redone",
  stall: "Stall",
  detection: "Detection",
  agreement: "Agreement",
  rebuild: "Rebuild",
  state_transfer: "State transfer",
  restart: "Restart",
  checkpoint_held: "Checkpoint held",
  straggler_wait: "Straggler wait",
  idle: "Idle",
};

/** Causes that belong to a failure, or to a change of the membership. */
export const RECOVERY_PARTS = ["step_redone", "stall", "detection", "agreement", "rebuild", "state_transfer", "restart"];

export const LEVELS = { good: "All well", busy: "Busy", warning: "Take a look", bad: "In trouble", done: "Finished" };

/** States of a worker. */
export const STATES = {
  starting: "starting",
  training: "training",
  recovering: "recovering",
  joining: "joining",
  spare: "spare",
  lost: "lost",
  left: "left",
  done: "finished",
};

/** States of a worker whose process has ended. */
export const ENDED = new Set(["lost", "left", "done"]);

/** Phases of a lane, in the order of the legend. */
export const PHASES = {
  train: "training",
  start: "starting",
  recover: "recovering",
  "catch-up": "catching up",
  spare: "spare",
  lost: "lost",
  left: "left",
  done: "finished",
};

/** Marks of a lane. */
export const MARKS = { fault: "fault", lost: "death detected", join: "joined", straggler: "slow", corruption: "wrong bits" };

/** Seconds that failures and changes of the membership have cost. */
export function recoveryCost(badput) {
  return RECOVERY_PARTS.reduce((sum, cause) => sum + (badput?.[cause] ?? 0), 0);
}

/** The parts of a bar: [[key, name, seconds], …] in the usual order, unknown keys last. */
export function parts(seconds, keys = Object.keys(CAUSES)) {
  const others = Object.keys(seconds).filter((key) => !keys.includes(key));
  return [...keys, ...others].map((key) => [key, CAUSES[key] ?? key.replaceAll("_", " "), seconds[key] ?? 0]);
}
