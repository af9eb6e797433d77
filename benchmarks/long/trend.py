"""How much a quantity changed over a run: a robust slope, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 500
_BLOCK = 4
"""Consecutive samples that the bootstrap draws together: memory of one moment depends on that of the moment before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The change of a quantity from the first sample to the last, on the fitted line.

    Args:
        begin: Value of the line at the first sample.
        percent: Change to the last sample, in percent of ``begin``.
        low: Lower end of the 95 % interval of ``percent``.
        high: Upper end.
    """

    begin: float
    percent: float
    low: float
    high: float

    def verdict(self, limit_percent: float) -> str:
        """Return ``flat`` or ``changes`` if the whole interval says so, else ``unclear``."""
        if max(abs(self.low), abs(self.high)) <= limit_percent:
            return "flat"
        return "changes" if self.low > limit_percent or self.high < -limit_percent else "unclear"


def trend(at: Sequence[float], values: Sequence[float], seed: int = 0) -> Trend | None:
    """Return the trend of ``values`` at these steps, None for fewer than three.

    The slope is the median of the slopes between all pairs of samples (Theil and Sen). The interval is a bootstrap over
    blocks of four consecutive samples.
    """
    if len(at) < 3:
        return None
    x, y = np.asarray(at, dtype=float), np.asarray(values, dtype=float)
    slope = _slope(x, y)
    begin = float(np.median(y - slope * (x - x[0])))
    rng, block = np.random.default_rng(seed), min(_BLOCK, len(x))
    slopes = []
    for _ in range(_DRAWS):
        starts = rng.integers(0, len(x) - block + 1, size=-(-len(x) // block))
        chosen = (starts[:, None] + np.arange(block)).reshape(-1)
        slopes.append(_slope(x[chosen], y[chosen]))
    scale = 100 * (x[-1] - x[0]) / (abs(begin) or 1.0)
    low, high = (float(scale * end) for end in np.quantile(slopes, [0.025, 0.975]))
    return Trend(begin=begin, percent=float(scale * slope), low=low, high=high)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the median slope between pairs of different x; 0 if there is none."""
    first, second = np.triu_indices(len(x), 1)
    run = x[second] - x[first]
    some = run != 0
    return float(np.median((y[second] - y[first])[some] / run[some])) if some.any() else 0.0
