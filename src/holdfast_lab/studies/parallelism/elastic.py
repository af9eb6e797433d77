"""Jobs that shrink, keep their size or grow: the three scenarios of Li and others (2023), on this code.

J. Li, G. Bosilca, A. Bouteiller, B. Nicolae, "Elastic deep learning through resilient collective operations", SC-W
2023, DOI 10.1145/3624062.3626080, put ULFM into the collectives of Horovod: the survivors retry the failed collective.
They compare it with Elastic Horovod, in which all workers roll back to the last commit and rendezvous again. The
paper's text was not available; what this module says of either is our reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.parallelism.jobs import (
    FORWARD,
    REINIT,
    REPLICATED,
    RESTART,
    ROLLBACK,
    ParallelismOutcome,
    ParallelismRun,
    TrainingScale,
)
from holdfast_lab.studies.parallelism.rows import row_of

DOWN, SAME, UP = SCENARIOS = ("down", "same", "up")
"""Down: a worker is killed and not replaced. Same: it is replaced. Up: no worker fails, and their number doubles."""
CALM = "undisturbed"
"""Used in place of a scenario for the run whose bits the others are compared with."""
NOBODY, SPARE, PROCESS = ("nobody", "a spare", "a new process")
"""The kind of worker that joins."""
ULFM, GLOO = ("ulfm", "gloo")

_WAYS = {ULFM: (FORWARD, ROLLBACK, RESTART), GLOO: (FORWARD, ROLLBACK, RESTART, REINIT)}
"""Recovery strategies; ``reinit`` from a checkpoint over Gloo comes nearest to Elastic Horovod."""
_COMES: dict[str, dict[str, tuple[str, ...]]] = {
    DOWN: {NOBODY: (ULFM, GLOO)},
    SAME: {SPARE: (ULFM, GLOO), PROCESS: (GLOO,)},
}
"""Kinds of joining workers by scenario and fabric; Open MPI cannot admit new processes."""
_FEWEST = {NOBODY: 4, SPARE: 4, PROCESS: 2}
"""Smallest number of workers, by kind; fewer leave no survivors for a collective. A new process can join a single
worker."""

_STEPS = 64
_EVENT_STEP = 30
_CHECKPOINT_EVERY = 20
_GIVE = ("SendState", "AdoptState")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticCase:
    """One run of a scenario.

    Args:
        scenario: One of :data:`SCENARIOS`, or :data:`CALM`.
        comes: The kind of worker that joins.
        fabric: The fabric that the workers use.
        strategy: The recovery strategy; without a failure it makes no difference.
        workers: Number of active workers before a kill, or after all have joined.
    """

    scenario: str
    comes: str
    fabric: str
    strategy: str
    workers: int

    @property
    def key(self) -> str:
        """Name of the task of this case."""
        return f"elastic: {self.scenario}, {self.comes} comes, {self.fabric}, {self.strategy}, {self.workers} workers"

    def job(self, network: str, scale: TrainingScale, seed: int) -> ParallelismRun:
        """Return the job to run."""
        options, arguments = ["--fabric", self.fabric], list[str]()
        if self.comes == PROCESS:
            arguments = ["--wanted", str(self.workers), "--since", str(_EVENT_STEP)]
            options += ["--respawn"] if self.scenario == SAME else []
            arguments += ["--ask"] if self.scenario == UP else []
        return ParallelismRun(
            kind=REPLICATED,
            strategy=self.strategy,
            network=network,
            workers=self.workers // 2 if self.scenario == UP else self.workers,
            scale=_shortened(scale),
            kills=((1, _EVENT_STEP),) if self.scenario in (DOWN, SAME) else (),
            spares=int(self.comes == SPARE),
            checkpoints=self.strategy in (RESTART, REINIT),
            seed=seed,
            reinit_from="checkpoint" if self.strategy == REINIT else "",
            options=tuple(options),
            arguments=tuple(arguments),
        )


def cases(counts: Sequence[int]) -> list[ElasticCase]:
    """Return all cases, the undisturbed run first.

    Args:
        counts: Numbers of workers, ascending.
    """
    kept = [
        ElasticCase(scenario=scenario, comes=comes, fabric=fabric, strategy=strategy, workers=count)
        for scenario, coming in _COMES.items()
        for comes, fabrics in coming.items()
        for fabric in fabrics
        for strategy in _WAYS[fabric]
        for count in counts
        if count >= _FEWEST[comes]
    ]
    up = [ElasticCase(scenario=UP, comes=PROCESS, fabric=GLOO, strategy=ROLLBACK, workers=count) for count in counts]
    calm = ElasticCase(scenario=CALM, comes=NOBODY, fabric=GLOO, strategy=ROLLBACK, workers=counts[-1])
    return [calm, *kept, *up]


def _shortened(scale: TrainingScale) -> TrainingScale:
    """Shorten a run to end soon after the event."""
    per_epoch = min(_STEPS, scale.samples // scale.batch)
    return replace(
        scale,
        samples=per_epoch * scale.batch,
        epochs=-(-_STEPS // per_epoch),
        kills=(_EVENT_STEP,),
        checkpoint_every=_CHECKPOINT_EVERY,
    )


def elastic_row(case: ElasticCase, job: ParallelismRun, outcome: ParallelismOutcome, known: Sequence[Row]) -> Row:
    """Return the row of a run; ``known`` are the rows of earlier runs."""
    calm = next((row for row in known if row["part"] == "elastic" and row["scenario"] == CALM), None)
    about: Row = {"part": "elastic", "scenario": case.scenario, "comes": case.comes, "fabric": case.fabric}
    row = {**row_of(job, outcome, calm), **about, "workers": case.workers}
    if row["status"] != MEASURED:
        # Not to end is a finding, except of the run in which nothing happens.
        return row if case.scenario == CALM else {**row, "status": NOT_RUN}
    return {**row, **_divided(outcome), **_joined(outcome)}


def _divided(outcome: ParallelismOutcome) -> Row:
    """Split the time from the kill to the next commit into three parts, the first of which is ``detect_s``."""
    failures = outcome.report["failures"]
    if not failures or failures[0]["detect_s"] is None or failures[0]["recover_s"] is None:
        return {}
    first = failures[0]
    went_on_s = [record["t_s"] for record in outcome.of("Recovered") if first["rank"] in record["lost"]]
    if not went_on_s:  # the job was restarted
        return {}
    until_s = max(went_on_s) - first["t_s"]
    return {"repair_s": until_s - first["detect_s"], "redo_s": first["recover_s"] - until_s}


def _joined(outcome: ParallelismOutcome) -> Row:
    """Return which workers joined, when, and for how long the join kept the others from computing."""
    report = outcome.report
    joined: list[dict[str, Any]] = report["joined"]
    commits = outcome.of("StepCommitted")
    about: Row = {"workers_at_end": commits[-1]["workers"] if commits else None, "joined": len(joined)}
    if not joined:
        return about
    held_s = {
        one["step"]: one["held_s"] for one in joined
    }  # workers that join before the same step are waited for once
    since_s = [one["t_s"] for one in (*report["failures"], *report["changed"])]
    given_s = [
        sum(record["times_s"].get(order, 0.0) for order in _GIVE)
        for record in outcome.of("Recovered")
        if record["joined"] and record["rank"] not in record["joined"]
    ]
    return {
        **about,
        "held_s": sum(held_s.values()),
        "times_held": len(held_s),
        "give_s": max(given_s, default=None),
        "join_s": max(one["t_s"] for one in joined) - min(since_s) if since_s else None,
    }
