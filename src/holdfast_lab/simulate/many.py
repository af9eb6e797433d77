"""Simulates one or many histories of a scenario, in batches of a few hundred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from holdfast_lab.simulate.checks import check_range
from holdfast_lab.simulate.failures import Failures, Outages
from holdfast_lab.simulate.outcome import PARTS, Outcome, Sweep
from holdfast_lab.simulate.scenario import Scenario
from holdfast_lab.simulate.vectorized import Simulator

_OUTAGES = 6_000_000
"""Outages held in memory per batch: up to 1 GB, including the sort."""
_WORKERS = 25_000_000
"""Worker histories held in memory per batch, if each worker has its own: 200 MB."""


def simulate(scenario: Scenario, *, seed: int = 0, repetition: int = 0) -> Outcome:
    """Return the outcome of one history.

    Args:
        scenario: The scenario.
        seed: Same seed, same outages, whatever the job.
        repetition: Number of the history with this seed, ``>= 0``.
    """
    outages = scenario.failures.draw(scenario.cluster, scenario.horizon_s, (seed, repetition))
    return Simulator(scenario, [outages], nested=_is_nested(scenario)).run().history(0)


def monte_carlo(
    scenario: Scenario, repetitions: int, *, seed: int = 0, tell: Callable[[float], None] = lambda share: None
) -> Sweep:
    """Return the outcomes of many histories.

    That of repetition ``r`` is ``simulate(scenario, seed=seed, repetition=r)``.

    Args:
        scenario: The scenario.
        repetitions: Number of histories, ``>= 1``.
        seed: Same seed, same outages, whatever the job.
        tell: Called now and then with the share that is done, at most 1.
    """
    check_range("repetitions", repetitions, 1)
    nested = _is_nested(scenario)
    at_most = max(1, _WORKERS // scenario.cluster.total) if nested else repetitions
    sweeps: list[Sweep] = []
    waiting: list[Outages] = []
    for number in range(repetitions):
        waiting.append(scenario.failures.draw(scenario.cluster, scenario.horizon_s, (seed, number)))
        is_last = number == repetitions - 1
        if is_last or len(waiting) >= at_most or sum(map(len, waiting)) >= _OUTAGES:
            before, batch = number + 1 - len(waiting), len(waiting)
            simulator = Simulator(scenario, waiting, nested=nested)
            sweeps.append(simulator.run(part_of(tell, before / repetitions, batch / repetitions)))
            waiting = []
    return _joined(sweeps)


def part_of(tell: Callable[[float], None], before: float, share: float) -> Callable[[float], None]:
    """Return the function that a part of some work calls with the share of it that is done."""
    return lambda done: tell(before + share * done)


def _is_nested(scenario: Scenario) -> bool:
    """Return whether a worker may be part of several units that fail."""
    return not (isinstance(scenario.failures, Failures) and len(scenario.failures.sources) <= 1)


def _joined(sweeps: list[Sweep]) -> Sweep:
    """Concatenate the histories, in order."""
    columns = {
        one.name: np.concatenate([getattr(sweep, one.name) for sweep in sweeps])
        for one in fields(Sweep)
        if one.name != "parts_ns"
    }
    parts = {part: np.concatenate([sweep.parts_ns[part] for sweep in sweeps]) for part in PARTS}
    return Sweep(parts_ns=parts, **columns)
