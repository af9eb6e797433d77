"""The time cost of a case of the resilience study, simulated with stated or measured costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holdfast_lab.simulate import Cluster, Costs, Outages, Outcome, Scenario, SimulatedJob, simulate
from holdfast_lab.simulate.price_table import step_parts_s
from holdfast_lab.studies.base import Row
from holdfast_lab.studies.resilience.cases import ADDITION, FAILURE, GAP, REMOVAL, REPLACED, SPREAD, ResilienceCase

STATED = Costs(
    slice_s=0.8,
    sum_s=0.15,
    sum_hop_s=0.005,
    detect_s=1.0,
    regroup_s=0.5,
    regroup_hop_s=0.05,
    save_s=0.5,
    load_s=10.0,
    rejoin_s=3.0,
)
"""In seconds. A step with 1,024 workers of one slice each takes 1 s, a failure is detected after 1 s, and a checkpoint
blocks training for 0.5 s."""

_BUCKETS = 6
_NS = 1_000_000_000
_OFF = ("lost", "save", "detect", "regroup", "load", "restart", "rejoin", "wait")
"""Parts of the time without lasting progress."""
_NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class PlannedFailures:
    """Failures at given times.

    Args:
        failures: Time in seconds, first rank, and number of consecutive ranks; each worker fails at most once.
        back_s: Seconds from the last failure until replacements join; None: never.
    """

    failures: tuple[tuple[float, int, int], ...]
    back_s: float | None = None

    def draw(self, cluster: Cluster, horizon_s: float, seed: tuple[int, int]) -> Outages:
        """Return the outages; see :class:`holdfast_lab.simulate.failures.Down`."""
        start, first, width = (np.array([one[i] for one in self.failures]) for i in range(3))
        end = start.max(initial=0.0) + (_NEVER_S if self.back_s is None else self.back_s)
        ticks = np.rint(start * _NS).astype(np.int64)
        return Outages.of(ticks, np.full_like(ticks, round(end * _NS)), first.astype(np.int64), width.astype(np.int64))


def costs_of(costs: Costs) -> dict[str, float]:
    """Return the costs that are not 0, by name."""
    return {name: value for name, value in asdict(costs).items() if isinstance(value, float) and 0 < value < _NEVER_S}


def overhead(
    case: ResilienceCase, steps: int, seeds: Sequence[int], costs: Costs = STATED, update: str = "lazy"
) -> Row:
    """Return the extra time of a training of ``steps`` steps over one without failures, departures and checkpoints.

    ``overhead`` counts only time without lasting progress. ``longer`` also counts that with fewer workers steps are
    slower, or more steps are needed. Both are in percent of the failure-free time, with the ends of their interval if
    the moments of failures are random.
    """
    chosen = seeds if case.moment == SPREAD else seeds[:1]
    found = [_one(case, steps, seed, costs, update) for seed in chosen]
    row: Row = {}
    for name in ("overhead", "longer"):
        values = [one[name] for one in found]
        half = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        mean = statistics.fmean(values)
        row |= {f"{name}_percent": mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return row | {name: statistics.fmean(one[name] for one in found) for name in ("lost_s", "held_s")}


def _one(case: ResilienceCase, steps: int, seed: int, costs: Costs, update: str) -> dict[str, float]:
    if case.what in (REMOVAL, ADDITION):
        return _planned(case, steps, seed, costs)
    outcome = simulated(case, steps, seed, costs, update)
    undisturbed_s = steps * _scenario(case, steps, costs, PlannedFailures(()), update).full_step_s
    return _compared({part: ns / _NS for part, ns in outcome.parts_ns.items()}, outcome.total_ns / _NS, undisturbed_s)


def _planned(case: ResilienceCase, steps: int, seed: int, costs: Costs) -> dict[str, float]:
    """Return the cost of a planned removal: that of failures between two steps, without detection and lost work.

    The simulator knows only failures, so their detection time and lost work are subtracted.
    """
    failed = replace(case, what={REMOVAL: FAILURE, ADDITION: REPLACED}[case.what], strategy="rollback")
    outcome = simulated(failed, steps, seed, costs)
    undisturbed_s = steps * _scenario(case, steps, costs, PlannedFailures(())).full_step_s
    parts = {part: ns / _NS for part, ns in outcome.parts_ns.items()}
    spared_s = parts["lost"] + parts["detect"]
    parts |= {"lost": 0.0, "detect": 0.0}
    return _compared(parts, outcome.total_ns / _NS - spared_s, undisturbed_s)


def _compared(parts: dict[str, float], total_s: float, undisturbed_s: float) -> dict[str, float]:
    off_s = sum(parts[part] for part in _OFF)
    return {
        "overhead": 100 * off_s / undisturbed_s,
        "longer": 100 * (total_s / undisturbed_s - 1),
        "lost_s": parts["lost"],
        "held_s": off_s - parts["lost"],
    }


def _scenario(
    case: ResilienceCase, steps: int, costs: Costs, failures: PlannedFailures, update: str = "lazy"
) -> Scenario:
    job = SimulatedJob(
        strategy=case.strategy,
        steps=steps,
        save_every=case.every,
        split="even",
        batch=case.batch,
        buckets=_BUCKETS,
        overlap_optimizer=update == "eager",
    )
    return Scenario(Cluster(workers=case.workers), job, costs, failures)


def simulated(case: ResilienceCase, steps: int, seed: int, costs: Costs, update: str = "lazy") -> Outcome:
    """Simulate a training of ``steps`` steps."""
    empty = _scenario(case, steps, costs, PlannedFailures(()), update)
    compute_s, sums_s = (float(part[-1]) for part in step_parts_s(empty.cluster, empty.job, costs))
    step_s = empty.full_step_s
    back_s = GAP * steps * step_s if case.what == REPLACED else None
    shares = case.shares(seed)
    if case.moment == SPREAD:
        undisturbed_s = steps * step_s
        moments = [(share * undisturbed_s, rank, 1) for share, rank in zip(shares, case.victims(seed), strict=True)]
    else:  # all in one step, as in the accuracy runs; which ranks fail makes no difference to the time
        step = max(1, int(shares[0] * steps))
        into_s = compute_s + case.averaged * sums_s if case.averaged else compute_s / 2
        saves = step // case.every if case.every else 0
        moments = [(step * step_s + saves * costs.save_s + into_s, 0, case.count)]
    failures: dict[str, Any] = {"failures": tuple(sorted(moments)), "back_s": back_s}
    return simulate(_scenario(case, steps, costs, PlannedFailures(**failures), update))
