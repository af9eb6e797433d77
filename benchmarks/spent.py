"""What a run under kills spends its time on, by its records: steps in their usual pace, and what breaks in them cost.

A break goes from the last commit before somebody was missed to the commit of the :data:`SETTLED` th step after, or of the last one
before the next break. What it cost is what it took, less what these steps usually take; so slow steps after a recovery are a part of
its costs, and so is what no record tells of.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.records.types import JobRestarted, Record, Recovered, StepCommitted

SETTLED = 10
"""After so many steps, training is in its pace again."""

Usual = Mapping[int, float]
"""What a step takes, seconds, by the number of workers."""


class Break(NamedTuple):
    """Training stopped for a while.

    Args:
        restarted: The launcher started workers; otherwise survivors went on.
        workers: Before it, and after.
        continued: The step that was broken off was gone on with; otherwise it was begun again.
        steps: Commits after the first one that are in it.
        took_s: From the last commit before to the last one that is in it.
    """

    restarted: bool
    workers: tuple[int, int]
    continued: bool
    steps: int
    took_s: float

    def cost_s(self, usual: Usual) -> float:
        """Return what it took beyond the steps in it, the one that was broken off included."""
        before, after = (usual[workers] for workers in self.workers)
        return self.took_s - self.steps * after - (before if self.continued else before + after)


class Spent(NamedTuple):
    """What time went into.

    Args:
        steady: Steps in their pace, as ``(step, workers, seconds)``.
        settling: Those in breaks, the first one after a break included: ``(step, workers)``.
        breaks: In the order of time.
    """

    steady: tuple[tuple[int, int, float], ...]
    settling: tuple[tuple[int, int], ...]
    breaks: tuple[Break, ...]

    def usual(self) -> dict[int, float]:
        """Return the mean of steps in their pace, by the number of workers, fewest first."""
        times: dict[int, list[float]] = defaultdict(list)
        for _, workers, seconds in self.steady:
            times[workers].append(seconds)
        return {workers: statistics.fmean(times[workers]) for workers in sorted(times)}

    def phases(self, usual: Usual) -> dict[str, float]:
        """Return seconds: of steps that count, of work that was thrown away, of recoveries, of restarts."""
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
    """Return what went into the time between, commits counted that lie in it.

    Args:
        records: Of all workers and the launcher, in the order of time.
        since_s: On the clock of the records.
        until_s: Likewise.
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
    """Yield each commit, the next one, and recoveries and restarts between."""
    before, between = None, []
    for record in records:
        match record:
            case Recovered() | JobRestarted():
                between.append(record)
            case StepCommitted() if before is None:
                before, between = record, []
            # A new lowest worker writes its last one again.
            case StepCommitted() if between or record.step != before.step:
                if record.step == before.step and not any(isinstance(one, JobRestarted) for one in between):
                    continue
                yield before, record, between
                before, between = record, []
