"""Records of a job of many workers, with failures that the simulator draws; and a source of a dashboard that replays them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.observe.monitor.view import LiveState, RunInfo
from holdfast.records.types import (
    CheckpointSaved,
    FailureSeen,
    Record,
    Recovered,
    RunStarted,
    StepCommitted,
    WorkerEnded,
)
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.failures import Failures

STEP_S, START_S = 0.1, 60.0
PER_NODE = 8
CHECKPOINT_STEPS = 1000
DETECTION_S, AGREEMENT_S = 1.5, 0.4
START = {
    "fabric": "gloo", "strategy": "rollback", "seed": 0, "order": "fold", "split": "slices", "batch": "global",
    "rescale": "survivors", "num_buckets": 1, "parameters": 9, "update": "lazy",
}  # fmt: skip


def records(workers: int, steps: int, failures: int, seed: int = 0) -> Iterator[Record]:
    """Yield the records of a job in the order of their times, without its end.

    Args:
        workers: Workers at the start; a failed one is not replaced.
        steps: Committed steps.
        failures: Mean number of failures; one in eight takes a node with all of its workers.
        seed: Of the simulator's failures.
    """
    horizon_s = START_S + steps * STEP_S
    cluster = Cluster(workers=workers, workers_per_node=PER_NODE)
    nodes, each = max(1, failures // 8), max(1, failures - failures // 8)
    drawn = Failures(
        Failures.of_count(each, span_s=horizon_s, units=workers, level="worker").sources
        + Failures.of_count(nodes, span_s=horizon_s, units=workers // PER_NODE).sources
    ).draw(cluster, horizon_s, (seed, 0))
    plan = START | {"workers": workers, "slices": workers, "steps_planned": 2 * steps, "samples_planned": 64 * steps}
    yield from (RunStarted(t_s=START_S + rank / workers, rank=rank, step=0, **plan) for rank in range(workers))
    yield from _train(workers, steps, zip(drawn.start / 1e9, drawn.first, drawn.width, strict=True))


def _train(workers: int, steps: int, outages: Iterator[tuple[float, int, int]]) -> Iterator[Record]:
    alive, t_s, generation = dict.fromkeys(range(workers)), START_S + 1, 0
    outage = next(outages, None)
    for step in range(steps):
        t_s += STEP_S
        while outage is not None and outage[0] <= t_s:
            dead = [rank for rank in range(outage[1], outage[1] + outage[2]) if rank in alive]
            outage = next(outages, None)
            if dead and len(dead) < len(alive):
                generation += 1
                yield from _recovery(step, t_s, dead, alive, generation)
                t_s += DETECTION_S + AGREEMENT_S + STEP_S
        loss = 2.3 * math.exp(-5 * step / steps) + 0.3 + 0.05 * math.sin(step * 1.7)
        yield StepCommitted(
            t_s=t_s, rank=min(alive), step=step, epoch=0, samples=64, workers=len(alive), metrics={"loss": loss}
        )
        if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            yield CheckpointSaved(
                t_s=t_s, rank=min(alive), step=step + 1, path="ckpt", size_bytes=14_000_000_000, seconds=0.02
            )


def _recovery(step: int, t_s: float, dead: Sequence[int], alive: dict[int, None], generation: int) -> Iterator[Record]:
    for rank in dead:
        del alive[rank]
        yield WorkerEnded(t_s=t_s, rank=rank, step=step, exit_code=-9, pid=4000 + rank)
    survivors = tuple(alive)
    seen_s = t_s + DETECTION_S
    yield from (FailureSeen(t_s=seen_s + rank / 1e5, rank=rank, step=step, phase="allreduce") for rank in survivors)
    how: dict[str, Any] = {"lost": tuple(dead), "survivors": survivors, "decision": "redo", "redone_steps": 1}
    yield from (
        Recovered(
            t_s=seen_s + AGREEMENT_S + rank / 1e5, rank=rank, step=step, generation=generation,
            times_s={"Agree": 0.25, "Shrink": 0.15}, **how,
        )
        for rank in survivors
    )  # fmt: skip


class LargeRun:
    """A run that a dashboard serves, fed from its records: all before a moment at once, the others with :meth:`advance`.

    Args:
        workers: Workers of the job.
        steps: Steps of the job.
        before: Steps that are over when it is first shown.
        failures: Mean number of failures.
    """

    actions: tuple[str, ...] = ()

    def __init__(self, workers: int, steps: int, before: int, failures: int) -> None:
        info = RunInfo(
            id="large", script="pretrain.py", command=f"holdfast run -n {workers} pretrain.py", started=range(workers),
            checkpoint_dir="ckpt", is_live=True, node_of=lambda rank: rank // PER_NODE,
            nodes={node: f"node-{node}.example" for node in range(-(-workers // PER_NODE))},
        )  # fmt: skip
        self.live = LiveState(info)
        self._records = records(workers, steps, failures)
        self._now_s = 0.0
        self.advance(START_S + 1 + before * STEP_S)

    def advance(self, to_s: float) -> None:
        """Take the records until a moment of the run."""
        batch: list[Record] = []
        for record in self._records:
            batch.append(record)
            if record.t_s >= to_s:
                break
        self.live.take(batch)
        self._now_s = max(to_s, batch[-1].t_s if batch else to_s)

    def now_s(self) -> float:
        """Return the time of the run."""
        return self._now_s

    def log(self, rank: int, lines: int) -> list[str]:
        """Return no line."""
        return []

    def act(self, action: str, values: Mapping[str, Any]) -> str:
        """Carry out nothing: it has no actions."""
        raise NotImplementedError
