"""Confidence intervals (bootstrap, and of shares) and medians."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

RESAMPLES = 2000
_Z = statistics.NormalDist().inv_cdf(0.975)


def bootstrap(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[Sequence[float]]], float],
    seed: int,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Return the bootstrap 95 % percentile interval of a statistic over independent groups of repetitions.

    Args:
        groups: Values of each group, not empty; each group is resampled with replacement.
        statistic: Computes the statistic from all groups.
        seed: Seed of the resampling; the same seed gives the same interval.
        resamples: Number of resamples, ``>= 40``.

    Source:
        B. Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1), 1979.
    """
    rng = random.Random(seed)
    found = sorted(statistic([rng.choices(group, k=len(group)) for group in groups]) for _ in range(resamples))
    low = round(0.025 * (resamples - 1))
    return found[low], found[resamples - 1 - low]


def share_interval(successes: int, tries: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a success probability; unlike a bootstrap, also valid if all tries succeed.

    Args:
        successes: Number of successes, from 0 to ``tries``.
        tries: Number of tries, ``>= 1``.

    Source:
        C. J. Clopper, E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the
        binomial", Biometrika 26, 1934.
    """

    def at_least(count: int, p: float) -> float:
        return sum(math.comb(tries, k) * p**k * (1 - p) ** (tries - k) for k in range(count, tries + 1))

    low = _root(lambda p: at_least(successes, p) - 0.025) if successes else 0.0
    high = _root(lambda p: at_least(successes + 1, p) - 0.975) if successes < tries else 1.0
    return low, high


def wilson(successes: int, tries: int) -> tuple[float, float]:
    """Return the 95 % score interval of a success probability.

    It is narrower than :func:`share_interval`, and has its coverage only on average.

    Args:
        successes: Number of successes, from 0 to ``tries``.
        tries: Number of tries, ``>= 1``.

    Source:
        E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22(158), 1927;
        L. D. Brown, T. T. Cai, A. DasGupta, "Interval estimation for a binomial proportion", Statistical Science 16(2),
        2001.
    """
    share, room = successes / tries, _Z**2 / tries
    middle = (share + room / 2) / (1 + room)
    half = _Z * math.sqrt(share * (1 - share) / tries + room / (4 * tries)) / (1 + room)
    return (middle - half if successes else 0.0), (
        middle + half if successes < tries else 1.0
    )  # exactly 0 and 1, which rounding would miss


def _root(rising: Callable[[float], float]) -> float:
    """Return the root in [0, 1] of an increasing function, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))
