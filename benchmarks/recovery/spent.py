"""How a run under kills spends its time, from its records: steps at their usual pace, and the cost of interruptions.

An interruption lasts from the last commit before a worker was missed to the commit of the :data:`SETTLED` th step after
it, or of the last step before the next interruption. Its cost is its duration, less the usual time of its steps. Slow
steps after a recovery are therefore part of its cost, and so is everything that no record describes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.records.types import JobRestarted, Record, Recovered, StepCommitted

SETTLED = 10
"""After this many steps, training has regained its pace."""

Usual = Mapping[int, float]
"""Usual step time in seconds, by the number of workers."""


class Break(NamedTuple):
    """One interruption of training.

    Args:
        restarted: The launcher started workers; otherwise survivors resumed.
        workers: Number of workers before it, and after.
        continued: The interrupted step was continued; otherwise it was restarted.
        steps: Further commits in it after the first one.
        took_s: From the last commit before it to its last commit.
    """

    restarted: bool
    workers: tuple[int, int]
    continued: bool
    steps: int
    took_s: float

    def cost_s(self, usual: Usual) -> float:
        """Return the time taken beyond the usual time of its steps, including the interrupted one."""
        before, after = (usual[workers] for workers in self.workers)
        return self.took_s - self.steps * after - (before if self.continued else before + after)


class Spent(NamedTuple):
    """How time was spent.

    Args:
        steady: Steps at their usual pace, as ``(step, workers, seconds)``.
        settling: Steps in interruptions, including the first one after: ``(step, workers)``.
        breaks: Interruptions, ordered by time.
    """

    steady: tuple[tuple[int, int, float], ...]
    settling: tuple[tuple[int, int], ...]
    breaks: tuple[Break, ...]

    def usual(self) -> dict[int, float]:
        """Return the mean of the steady steps, by the number of workers, fewest first."""
        times: dict[int, list[float]] = defaultdict(list)
        for _, workers, seconds in self.steady:
            times[workers].append(seconds)
        return {workers: statistics.fmean(times[workers]) for workers in sorted(times)}

    def phases(self, usual: Usual) -> dict[str, float]:
        """Return the seconds spent on steps that count, discarded work, recoveries and restarts."""
        worked = [*self.steady, *((step, workers, usual[workers]) for step, workers in self.settling)]
        newest = {step: number for number, (step, _, _) in enumerate(worked)}
        phases = dict.fromkeys(("useful", "lost", "recover", "restart"), 0.0)
        for number, (step, _, seconds) in enumerate(worked):
            phases["useful" if newest[step] == number else "lost"] += seconds
        for one in self.breaks:
            phases["lost"] += 0.0 if one.continued else usual[one.workers[0]]
            phases["restart" if one.restarted else "recover"] += one.cost_s(usual)
        return phases


def spent(records: Sequence[Record], since_s: float, until_s: float) -> Spent:
    """Return how the time from ``since_s`` to ``until_s`` was spent, by the commits in it.

    Args:
        records: Records of all workers and the launcher, ordered by time.
        since_s: Start, in the time of the records.
        until_s: End, likewise.
    """
    steady: list[tuple[int, int, float]] = []
    settling: list[tuple[int, int]] = []
    breaks: list[Break] = []
    left = 0
    for before, after, between in _commits([one for one in records if since_s <= one.t_s <= until_s]):
        took_s = after.t_s - before.t_s
        if between or (after.step, after.workers) != (before.step + 1, before.workers):
            left = SETTLED
            restarted = any(isinstance(one, JobRestarted) for one in between)
            continued = not restarted and any(isinstance(r, Recovered) and r.decision == "continue" for r in between)
            breaks.append(Break(restarted, (before.workers, after.workers), continued, 0, took_s))
            settling.append((after.step, after.workers))
        elif left:
            left -= 1
            breaks[-1] = breaks[-1]._replace(steps=breaks[-1].steps + 1, took_s=breaks[-1].took_s + took_s)
            settling.append((after.step, after.workers))
        else:
            steady.append((after.step, after.workers, took_s))
    return Spent(tuple(steady), tuple(settling), tuple(breaks))


def _commits(records: Sequence[Record]) -> Iterator[tuple[StepCommitted, StepCommitted, list[Record]]]:
    """Yield each commit, the next one, and recoveries and restarts between them."""
    before, between = None, []
    for record in records:
        match record:
            case Recovered() | JobRestarted():
                between.append(record)
            case StepCommitted() if before is None:
                before, between = record, []
            # A new lead writes its last commit again.
            case StepCommitted() if between or record.step != before.step:
                if record.step == before.step and not any(isinstance(one, JobRestarted) for one in between):
                    continue
                yield before, record, between
                before, between = record, []
