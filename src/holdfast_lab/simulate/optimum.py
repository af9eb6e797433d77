"""How many steps should lie between two checkpoints: found by trying, with the same failures for all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from holdfast.errors import ConfigError
from holdfast_lab.simulate.many import monte_carlo
from holdfast_lab.simulate.outcome import Estimate
from holdfast_lab.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best of those that were tried.

    Args:
        save_every: Steps between two checkpoints.
        interval_s: The same in seconds of undisturbed work.
        goodput: Its estimate.
        tried: All that were tried, ascending: steps, and the estimate.
    """

    save_every: int
    interval_s: float
    goodput: Estimate
    tried: tuple[tuple[int, Estimate], ...]


def best_interval(
    scenario: Scenario, repetitions: int = 100, *, seed: int = 0, least: int = 1, most: int | None = None
) -> Optimum:
    """Return the number of steps between two checkpoints with which goodput is highest.

    First powers of two are tried, then what lies around the best of them, ever closer. All meet the same failures, so what
    differs between two of them is known far better than either. Goodput is flat around its optimum: a second seed may find
    another one that is as good.

    Args:
        scenario: Its own ``save_every`` does not matter.
        repetitions: For each number that is tried, ``>= 2``.
        seed: Same seed, same result.
        least: The smallest number to try.
        most: The largest; by default as many steps as fit into the horizon.

    Raises:
        ConfigError: if nothing lies between ``least`` and ``most``.
    """
    if most is None:
        most = max(1, int(scenario.horizon_s / scenario.full_step_s))
    if not 1 <= least <= most:
        raise ConfigError(f"the steps between two checkpoints must be from 1 to {most}, got least {least}")
    tried: dict[int, Estimate] = {}

    def goodput(every: int) -> float:
        if every not in tried:
            one = replace(scenario, job=replace(scenario.job, save_every=every))
            tried[every] = monte_carlo(one, repetitions, seed=seed).estimate("goodput")
        return tried[every].mean

    powers = {2**power for power in range(most.bit_length())}
    best = max(sorted({least, most, *(p for p in powers if least <= p <= most)}), key=goodput)
    factor = math.sqrt(2)
    while factor > 1.02:
        near = {max(least, min(most, round(best * f))) for f in (1 / factor, factor)}
        best = max(sorted({best, *near}), key=goodput)
        factor = math.sqrt(factor)
    return Optimum(
        save_every=best,
        interval_s=best * scenario.full_step_s,
        goodput=tried[best],
        tried=tuple(sorted(tried.items())),
    )
