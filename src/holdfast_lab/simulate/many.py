"""Simulates one or many histories of a scenario."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast_lab.simulate.checks import check_range, ticks
from holdfast_lab.simulate.compiled import States, run, states_at_start
from holdfast_lab.simulate.history_inputs import calendar, parameters
from holdfast_lab.simulate.outcome import COUNTS, PARTS, Outcome, Sweep
from holdfast_lab.simulate.price_table import price_table
from holdfast_lab.simulate.scenario import Scenario


def simulate(scenario: Scenario, *, seed: int = 0, repetition: int = 0) -> Outcome:
    """Return the outcome of one history.

    Args:
        scenario: The scenario.
        seed: Same seed, same outages, whatever the job.
        repetition: Number of the history with this seed, ``>= 0``.
    """
    return _simulate(scenario, range(repetition, repetition + 1), seed).history(0)


def monte_carlo(
    scenario: Scenario, repetitions: int, *, seed: int = 0, tell: Callable[[float], None] = lambda share: None
) -> Sweep:
    """Return the outcomes of many histories.

    That of repetition ``r`` is ``simulate(scenario, seed=seed, repetition=r)``.

    Args:
        scenario: The scenario.
        repetitions: Number of histories, ``>= 1``.
        seed: Same seed, same outages, whatever the job.
        tell: Called after each history with the share that is done, at most 1.
    """
    check_range("repetitions", repetitions, 1)
    return _simulate(scenario, range(repetitions), seed, tell)


def part_of(tell: Callable[[float], None], before: float, share: float) -> Callable[[float], None]:
    """Return the function that a part of some work calls with the share of it that is done."""
    return lambda done: tell(before + share * done)


def _simulate(
    scenario: Scenario, repetitions: range, seed: int, tell: Callable[[float], None] = lambda share: None
) -> Sweep:
    total, spawn = scenario.cluster.total, ticks(scenario.costs.spawn_s)
    given, states = parameters(scenario), states_at_start(len(repetitions), total)
    for number, repetition in enumerate(repetitions):
        outages = scenario.failures.draw(scenario.cluster, scenario.horizon_s, (seed, repetition))
        run(states, number, given, calendar(outages, spawn, total))
        tell((number + 1) / len(repetitions))
    return _sweep(scenario, states)


def _sweep(scenario: Scenario, states: States) -> Sweep:
    prices, workers = price_table(scenario.cluster, scenario.job, scenario.costs), scenario.cluster.workers
    full = sum(int(one[workers]) for one in (prices.compute, prices.sums, prices.exposed))
    # Intermediate values may exceed 64 bits.
    ideal = [weight * full // workers for weight in states["weight"].tolist()]
    counted = {"steps": states["step"], **{name: states[name] for name in COUNTS if name != "steps"}}
    work = {"useful": states["ran"], "lost": states["lost"], "save": states["in_save"] + states["held"]}
    return Sweep(
        parts_ns={part: work[part] if part in work else states[f"in_{part}"] for part in PARTS},
        total_ns=states["total_ns"],
        ideal_ns=np.array(ideal, dtype=np.int64),
        finished=states["finished"],
        member_ns=states["member_ns"],
        **counted,
    )
