"""Iteration cost: how many more iterations a disturbed run takes than the undisturbed one with the same randomness.

Source: Qiao, Aragam, Zhang, Xing, "Fault tolerance in iterative-convergent machine learning", ICML 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from holdfast.errors import ConfigError

Numbers = NDArray[np.float64]

TIMES_NOISE = 4.0
"""A level is used if the loss falls, over a window, by this many times the noise of its mean."""


def trailing_mean(losses: ArrayLike, window: int) -> Numbers:
    """Return, for each iteration, the mean of its loss and the ones before it, ``window`` in all; fewer at the start.

    Bit-identical to ``np.mean`` of the last ``window`` losses, so that a run may be ended by that criterion.

    Args:
        losses: Losses, starting with that of x(0); of shape (iterations + 1,).
        window: ``>= 1``; 1 leaves the losses unchanged.
    """
    values = np.asarray(losses, dtype=np.float64)
    if window < 1:
        raise ConfigError(f"window must be at least 1, got {window}")
    first = [values[:end].mean() for end in range(1, min(window, len(values) + 1))]
    rest = sliding_window_view(values, window).mean(axis=1) if len(values) >= window else []
    return np.array([*first, *rest])


def crossing(values: ArrayLike, level: float) -> Numbers:
    """Return the iteration at which values first are at most ``level``, with linear interpolation between iterations.

    Args:
        values: Values, starting with that of x(0); of shape (iterations + 1, ...), so possibly of many runs.
        level: The level to reach.

    Returns:
        Of shape (...): 0 for a run that begins at or below it, ``inf`` for one that never reaches it (it is censored).
    """
    values = np.asarray(values, dtype=np.float64)
    reached = values <= level  # false for nan: a diverged run has not reached it
    first = reached.argmax(axis=0)
    at = np.take_along_axis(values, first[None], axis=0)[0]
    before = np.take_along_axis(values, np.maximum(first - 1, 0)[None], axis=0)[0]
    steep = np.isfinite(before) & (before > at)
    back = np.divide(level - at, before - at, out=np.zeros_like(at), where=steep)
    return np.where(reached.any(axis=0), np.maximum(first - back, 0.0), np.inf)


def levels(losses: ArrayLike, window: int = 1, count: int = 7, begin: int = 0) -> list[float]:
    """Return levels at which the iterations of a run can be counted reliably, in descending order.

    They are the losses that an undisturbed run first reaches at iterations as far apart as possible, while the loss
    falls, over the window before as well as after, by several times the noise of its mean. At a level where it hardly
    falls, the count would be noise.

    Args:
        losses: Losses of an undisturbed run; of shape (iterations + 1,).
        window: Length of the trailing mean.
        count: Number of levels, ``>= 1``.
        begin: The first iteration whose loss may be a level; earlier ones are not to be measured.

    Returns:
        At most ``count`` levels, descending.

    Raises:
        ConfigError: if there is none.
    """
    means = trailing_mean(losses, window)
    noise = _noise(np.asarray(losses, dtype=np.float64)) / math.sqrt(window)
    lowest = np.minimum.accumulate(means)
    falls = means[:-window] - means[window:] > TIMES_NOISE * noise
    usable = [
        at
        for at in range(max(begin, window), len(means) - window)
        if means[at] < lowest[at - 1] and falls[at - window] and falls[at]
    ]
    if not usable:
        raise ConfigError(
            f"the loss falls nowhere after iteration {begin} by {TIMES_NOISE:g} times its noise over {window} iterations; "
            f"give a wider window or a run that still converges"
        )
    places = np.array(usable)
    wanted = np.linspace(usable[0], usable[-1], count + 1)[1:]
    nearest = sorted({usable[int(np.abs(places - place).argmin())] for place in wanted})
    return [float(means[at]) for at in nearest]


def _noise(losses: Numbers) -> float:
    """Return the standard deviation of a loss about its trend, from fourth differences, which remove the trend."""
    fourth = np.diff(losses, n=4)
    return float(np.median(np.abs(fourth)) / 0.6745 / math.sqrt(70)) if len(fourth) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """The cost of a disturbance.

    Args:
        iterations: Mean over the levels; may be negative, since a disturbance can help. A level that the disturbed run
            never reached counts as reached at its end; the mean is then a lower bound.
        censored: Number of levels that the disturbed run never reached.
    """

    iterations: float
    censored: int


def iteration_cost(disturbed: ArrayLike, undisturbed: ArrayLike, at: Sequence[float], window: int = 1) -> IterationCost:
    """Return how many more iterations a disturbed run takes than the undisturbed one.

    Args:
        disturbed: Its losses, starting with that of x(0).
        undisturbed: The losses of the run with the same randomness.
        at: Levels returned by :func:`levels`.
        window: Length of the trailing mean.

    Raises:
        ConfigError: if there is no level, or the undisturbed run does not reach one.
    """
    means, base_means = trailing_mean(disturbed, window), trailing_mean(undisturbed, window)
    counts = [(float(crossing(means, level)), float(crossing(base_means, level))) for level in at]
    if not counts or not all(math.isfinite(count) for _, count in counts):
        raise ConfigError(
            f"the undisturbed run must reach every level; it ends at {base_means.min():.6g}, the levels are {list(at)}"
        )
    end = len(means) - 1.0
    costs = [min(count, end) - base for count, base in counts]
    return IterationCost(iterations=sum(costs) / len(costs), censored=sum(math.isinf(count) for count, _ in counts))
