"""Partial recovery with real processes: workers that own shards are killed, and the cost is compared with a prediction.

The prediction is the cost of the same job with virtual workers, which lose the same shard at the same step in one
process. The worker is killed after the commit vote of its step, so that in both runs all standbys are of the same step.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.tools.against import cost_against
from holdfast_lab.studies.base import FAILED, MEASURED, SHARE, Claim, Row, Task, statement
from holdfast_lab.studies.processes import RealJob, run_job
from holdfast_lab.studies.stats import share_interval

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that run in separate processes."""

_LIMIT_S = 300.0
_BATCH = 64
_WINDOWS = (4, 8, 16, 32)
_DEATHS = 3
_RATES = {"adam": 0.003, "momentum": 0.05}
_DERIVED = "derived: the virtual workers compute the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A real run with one failure, and the runs it is compared with.

    Args:
        fabric: Fabric of the real run.
        optimizer: ``adam`` or ``momentum``.
        rate: Its learning rate.
        epochs: Number of epochs of about 1,472 digits, in mini-batches of 64.
        every: C of the priority checkpoint.
        fraction: r of the priority checkpoint.
        workers: Number of workers, each with a shard.
        seed: Seed of the job, and of rank and step of the failure.
    """

    fabric: str
    optimizer: str
    rate: float
    epochs: int = 8
    every: int = 16
    fraction: float = 0.125
    workers: int = 4
    seed: int = 0

    @property
    def policy(self) -> tuple[str, ...]:
        """The options of ``holdfast run`` for saving and restoring parts."""
        return ("--strategy", "partial", "--mirror-every", str(self.every), "--mirror-fraction", str(self.fraction))

    def death(self) -> tuple[int, int]:
        """Return rank and step of the failure: any worker, in the first half of the run, after the first full save."""
        rng = random.Random(f"{self.seed} {self.fabric} {self.optimizer}")
        return rng.randrange(self.workers), rng.randrange(self.every, self.epochs * 10)


def run_live(live: LiveRun) -> Row:
    """Execute the failure-free, the predicted and the real run, and return the row that compares them."""
    rank, step = live.death()
    about: Row = {
        "part": "live",
        "program": f"mlp-{live.optimizer}-digits",
        "policy": f"partial, priority, r = {live.fraction:g}, C = {live.every}",
        "fabric": live.fabric,
        "workers": live.workers,
        "seed": live.seed,
        "kill_rank": rank,
        "kill_step": step,
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        folder = Path(name)
        kill = (*live.policy, "--inject", f"kill:rank={rank},step={step},phase=optimizer")
        runs = {"undisturbed": ("virtual", ()), "predicted": ("virtual", kill), "real": (live.fabric, kill)}
        reports: dict[str, RealJob] = {}
        for run, (fabric, words) in runs.items():
            reports[run] = _run(live, folder / run, fabric, words)
            if reports[run].failed:
                return {**about, "status": FAILED, "why": f"{run}: {reports[run].failed}"}
        return {**about, "status": MEASURED, **_compared(folder, reports["predicted"].report, reports["real"].report)}


def _run(live: LiveRun, folder: Path, fabric: str, policy: Sequence[str]) -> RealJob:
    words = ["-n", live.workers, "--fabric", fabric, "--seed", live.seed, *policy]
    words += [SCRIPTS / "shards.py", "--shards", live.workers, "--epochs", live.epochs, "--batch", _BATCH]
    return run_job([*words, "--optimizer", live.optimizer, "--rate", live.rate], folder, _LIMIT_S)


def _compared(folder: Path, predicted: Row, real: Row) -> Row:
    undisturbed = folder / "undisturbed" / "report"
    costs = {
        run: cost_against(folder / run / "report", undisturbed, "evaluation", _WINDOWS) for run in ("predicted", "real")
    }
    restored = real["restored"]
    stale = restored[0]["stale_steps"] if restored else {"mean": math.nan, "max": 0}
    failure = real["failures"][0]
    return {
        "restored": sum(part["blocks"] for part in restored),
        "staleness": f"{stale['mean']:.2f} on average, {stale['max']} at most",
        "stale_mean": stale["mean"],
        "cost": costs["real"]["iterations"],
        "predicted": costs["predicted"]["iterations"],
        "censored": costs["real"]["censored"],
        "same_bits": real["replicas"]["sha256"] == predicted["replicas"]["sha256"],
        "killed": failure["kind"] == "kill" and failure["injected"],
        "recover_s": failure["recover_s"],
    }


def live_tasks(seed: int) -> list[Task]:
    """Return the real runs of the whole study: each fabric with each optimizer, several failures each."""
    found = []
    for number in range(_DEATHS):
        for fabric in ("gloo", "ulfm"):
            for optimizer, rate in _RATES.items():
                live = LiveRun(fabric=fabric, optimizer=optimizer, rate=rate, seed=seed + number)
                found.append(Task(f"live: {optimizer} over {fabric}, seed {live.seed}", partial(_task, live)))
    return found


def _task(live: LiveRun, _: Sequence[Row]) -> list[Row]:
    return [run_live(live)]


def live_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claim that compares real processes with the prediction."""
    words = "Killing a real worker that owns a shard costs what is predicted: only state that was not saved is lost"
    live = [row for row in rows if row["part"] == "live" and row["status"] == MEASURED]
    if not live:
        return [statement(words, _DERIVED)]
    same = [row["same_bits"] and row["killed"] and row["restored"] > 0 for row in live]
    costs = [row["cost"] for row in live if row["cost"] is not None]
    found = f"of {len(live)} runs end with the predicted bits"
    if costs:
        found += f"; cost {min(costs):.2f} to {max(costs):.2f}, {sum(costs) / len(costs):.2f} iterations on average"
    ci = share_interval(sum(same), len(same))
    return [statement(words, _DERIVED, 1.0).judged(sum(same) / len(same), all(same), found, ci=ci, unit=SHARE)]
