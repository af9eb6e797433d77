"""Searches the best number of steps between two checkpoints; all candidates are simulated on the same failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.errors import ConfigError
from holdfast_lab.simulate.many import monte_carlo
from holdfast_lab.simulate.outcome import Estimate
from holdfast_lab.simulate.scenario import Scenario

_CLOSER = 9
"""Candidates around the best power of two that the search usually tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best candidate.

    Args:
        save_every: Steps between two checkpoints.
        interval_s: The same in seconds of undisturbed work.
        goodput: Its estimate.
        tried: All candidates, ascending: steps, and the estimate.
    """

    save_every: int
    interval_s: float
    goodput: Estimate
    tried: tuple[tuple[int, Estimate], ...]


def candidates(least: int, most: int) -> int:
    """Return about how many candidates :func:`best_interval` tries between two bounds."""
    return most.bit_length() - least.bit_length() + _CLOSER


def best_interval(
    scenario: Scenario,
    repetitions: int = 100,
    *,
    seed: int = 0,
    least: int = 1,
    most: int | None = None,
    tell: Callable[[float], None] = lambda share: None,
) -> Optimum:
    """Return the number of steps between two checkpoints with the highest goodput.

    The search tries powers of two first, then ever closer numbers around the best. All candidates are simulated on the
    same failures, so the difference of two is known much better than either. Goodput is flat around its optimum:
    another seed may find another number that is as good.

    Args:
        scenario: The scenario; its own ``save_every`` does not matter.
        repetitions: Histories per candidate, ``>= 2``.
        seed: Same seed, same result.
        least: The smallest candidate.
        most: The largest candidate; by default as many steps as fit into the horizon.
        tell: Called with the estimated share that is done after each candidate.

    Raises:
        ConfigError: if nothing lies between ``least`` and ``most``, or there are fewer than two repetitions.
    """
    if most is None:
        most = max(1, int(scenario.horizon_s / scenario.full_step_s))
    if not 1 <= least <= most:
        raise ConfigError(f"the steps between two checkpoints must be from 1 to {most}, got least {least}")
    if repetitions < 2:
        raise ConfigError(f"repetitions must be at least 2, because one history gives no interval; got {repetitions}")
    tried: dict[int, Estimate] = {}
    expected = candidates(least, most)

    def goodput(every: int) -> float:
        if every not in tried:
            one = replace(scenario, job=replace(scenario.job, save_every=every))
            tried[every] = monte_carlo(one, repetitions, seed=seed).estimate("goodput")
            tell(min(1.0, len(tried) / expected))
        return tried[every].mean

    powers = {2**power for power in range(most.bit_length())}
    best = max(sorted({least, most, *(p for p in powers if least <= p <= most)}), key=goodput)
    factor = math.sqrt(2)
    while factor > 1.02:
        near = {max(least, min(most, round(best * f))) for f in (1 / factor, factor)}
        best = max(sorted({best, *near}), key=goodput)
        factor = math.sqrt(factor)
    return Optimum(
        save_every=best, interval_s=best * scenario.full_step_s, goodput=tried[best], tried=tuple(sorted(tried.items()))
    )
