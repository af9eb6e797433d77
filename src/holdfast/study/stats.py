"""Confidence intervals by bootstrap, and medians."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

RESAMPLES = 2000


def bootstrap(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[Sequence[float]]], float],
    seed: int,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of independent groups of repetitions.

    Args:
        groups: Each is drawn from anew, with replacement; none is empty.
        statistic: Of all groups together.
        seed: Same seed, same interval.
        resamples: How often to draw, ``>= 40``.

    Source:
        B. Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1), 1979.
    """
    rng = random.Random(seed)
    found = sorted(statistic([rng.choices(group, k=len(group)) for group in groups]) for _ in range(resamples))
    low = round(0.025 * (resamples - 1))
    return found[low], found[resamples - 1 - low]


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))
