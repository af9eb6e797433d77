"""Measurements of the resilience study with real processes: a small network, one of four workers is killed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import holdfast_lab.workloads.train as script
from holdfast_lab.simulate import Costs
from holdfast_lab.simulate.measured import read_measured, updates_apart
from holdfast_lab.studies.base import FAILED, MEASURED, NOT_RUN, Row
from holdfast_lab.studies.processes import run_job
from holdfast_lab.studies.resilience.cases import FORWARD, RESTART, ROLLBACK, ResilienceCase
from holdfast_lab.studies.resilience.cost import overhead
from holdfast_lab.studies.resilience.updates import EAGER, LAZY

MODEL = "mlp"
WORKERS, EPOCHS, BATCH, STEPS = 4, 4, 128, 48
KILLED, STEP = 2, 23
EVERY = 5
_BUCKET_BYTES = 20_000
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class RealRun:
    """A run of ``holdfast run``.

    Args:
        strategy: The recovery strategy; "" for a run without a failure.
        averaged: Number of buckets that are averaged when the worker is killed.
        update: When the optimizer runs, :data:`LAZY` or :data:`EAGER` (overlapped).
    """

    strategy: str
    averaged: int = 0
    update: str = LAZY

    @property
    def name(self) -> str:
        """Return a description of the run."""
        told = self.strategy or "nothing"
        if self.averaged or self.strategy == FORWARD:
            told += f", {self.averaged} buckets averaged"
        return f"{told}, eager" if self.update == EAGER else told

    def words(self, folder: Path, seed: int) -> list[str]:
        """Return the command line after ``holdfast run``."""
        words = ["-n", WORKERS, "--slices", WORKERS, "--seed", seed]
        words += ["--strategy", self.strategy or ROLLBACK, *["--overlap-optimizer"] * (self.update == EAGER)]
        if self.strategy:
            where = f",phase=allreduce,bucket={self.averaged - 1}" if self.averaged else ""
            words += ["--inject", f"kill:rank={KILLED},step={STEP}{where}"]
        if self.strategy == RESTART:
            words += ["--checkpoint-dir", folder / "saved", "--checkpoint-every", EVERY]
        words += [script.__file__, "--model", MODEL, "--epochs", EPOCHS, "--batch-size", BATCH]
        return [str(word) for word in [*words, "--bucket-bytes", _BUCKET_BYTES]]


REALS = (RealRun(""), RealRun("", update=EAGER), RealRun(ROLLBACK), RealRun(FORWARD), RealRun(RESTART),
         *(RealRun(strategy, 2, update) for strategy in (ROLLBACK, FORWARD, RESTART) for update in (LAZY, EAGER)))  # fmt: skip
QUICK_REALS = (RealRun(""), RealRun(ROLLBACK), RealRun(FORWARD, 2), RealRun(RESTART), RealRun(ROLLBACK, 2, EAGER))
TAKEN_BACK = (ROLLBACK, RESTART)
"""Strategies that undo the updates made before the failure."""


def measure(real: RealRun, seed: int, repetition: int) -> list[Row]:
    """Run a job to its end and return its row."""
    row: Row = {"part": "real", "happens": real.name, "strategy": real.strategy, "workers": WORKERS}
    row |= {
        "count": int(bool(real.strategy)),
        "averaged": real.averaged,
        "repetition": repetition,
        "update": real.update,
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        folder = Path(name)
        done = run_job(real.words(folder, seed + repetition), folder, _LIMIT_S)
        if done.failed:
            return [row | {"status": FAILED, "why": done.failed}]
        report, events = done.report, done.events
        costs = {f"cost_{key}": one.value for key, one in read_measured(folder / "report").costs.items()}
    if real.update == EAGER:
        undone, copies = ([worker[name] for worker in report["optimizer_overlap"]] for name in ("undone", "copy_bytes"))
        costs |= {"undone": sum(undone), "copy_bytes": max(copies)}
        if real.strategy in TAKEN_BACK and not sum(undone):
            return [
                row | {"status": NOT_RUN, "why": "no bucket was updated before the kill, so there was nothing to undo"}
            ]
    found = {
        "accuracy": 100 * report["metrics"]["accuracy"],
        "sha256": report["replicas"]["sha256"],
        "lost": report["samples"]["lost"],
        "decisions": ", ".join(sorted({record["decision"] for record in done.of("Recovered")})),
        "buckets": done.of("RunStarted")[0]["num_buckets"],
        **costs,
    }
    return [row | {"status": MEASURED} | found | _time(events, disturbed=bool(real.strategy))]


def _time(events: Sequence[Mapping[str, Any]], *, disturbed: bool) -> Row:
    """Return the step time, and the extra time from the step before the kill to the end of the step with the kill.

    The time that checkpoints blocked training is added. Times far from the kill do not count, because they contain
    noise from other work of the machine.
    """
    commits = sorted((e["t_s"], e["step"]) for e in events if e["event"] == "StepCommitted")
    step_s = statistics.median(after - before for (before, _), (after, _) in pairwise(commits))
    if not disturbed:
        return {"step_s": step_s}
    begun = min(at for at, step in commits if step == STEP - 1)
    over = max(at for at, step in commits if step == STEP)
    held = sum(e["seconds"] for e in events if e["event"] == "CheckpointSaved")
    more_s = over - begun - step_s + held
    return {"step_s": step_s, "more_s": more_s, "overhead_percent": 100 * more_s / (STEPS * step_s)}


_TOLD = ("happens", "strategy", "workers", "count", "averaged", "repetition", "update")
_UPDATES = ("update_s", "copy_s", "undo_s", "waited_s", "discard_s")
"""Costs that only runs with the overlapped optimizer have."""


def compare(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the measured points, compared with the failure-free run (same seed, lazy updates) and the simulation.

    The simulator takes its costs from runs with other seeds if there are any.
    """
    known = [row for row in rows if row["part"] == "real" and row["status"] == MEASURED]
    runs: list[Row] = list(known)
    undisturbed = {row["repetition"]: row for row in runs if not row["strategy"] and row["update"] == LAZY}
    points = []
    for row in runs:
        clean = undisturbed.get(row["repetition"])
        if not row["strategy"] or clean is None:
            continue
        others = [other for other in runs if other["repetition"] != row["repetition"]] or runs
        predicted = _predicted(row, others, seed)
        points.append(
            {
                "part": "point",
                "status": MEASURED,
                **{key: row[key] for key in _TOLD},
                "accuracy_loss": clean["accuracy"] - row["accuracy"],
                "same": row["sha256"] == clean["sha256"],
                "overhead_percent": row["overhead_percent"],
                "predicted_percent": predicted,
                "decisions": row["decisions"],
                "undone": row.get("undone", 0),
            }
        )
    return points


def _predicted(row: Row, runs: Sequence[Row], seed: int) -> float:
    """Return the overhead in percent that the simulator predicts from measured costs."""
    runs = [run for run in runs if run["update"] == row["update"]]
    known: Row = {"step_s": statistics.median(run["step_s"] for run in runs)}
    for name in ("detect_s", "regroup_s", "load_s", "save_s", *_UPDATES):
        # Regrouping differs between strategies: take its costs from runs of the same strategy.
        values = [run[f"cost_{name}"] for run in runs if run["strategy"] == row["strategy"] and f"cost_{name}" in run]
        known[name] = statistics.median(values) if values else 0.0
    known = dict(updates_apart(known))
    step_s = known.pop("step_s")
    costs = Costs(slice_s=0.5 * step_s, sum_s=0.5 * step_s, **known)
    every = EVERY if row["strategy"] == RESTART else 0
    averaged = row["averaged"] / row["buckets"] if "buckets" in row else 0.0
    case = ResilienceCase(
        strategy=row["strategy"], workers=WORKERS, count=1, moment="middle", every=every, averaged=averaged
    )
    return float(overhead(case, STEPS, [seed], costs, row["update"])["overhead_percent"])
