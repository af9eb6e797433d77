"""Iteration cost: how many iterations more a disturbed run takes than the undisturbed one with the same randomness.

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
"""A level is used where the loss falls, over a window, by so many times the noise of its mean."""


def trailing_mean(losses: ArrayLike, window: int) -> Numbers:
    """Return, of each iteration, the mean of its loss and those before it, ``window`` in all; of fewer at the beginning.

    To the bit what ``np.mean`` makes of the last ``window`` losses, so that a run may be ended by that.

    Args:
        losses: That of x(0) first; of shape (iterations + 1,).
        window: ``>= 1``; 1 leaves the losses as they are.
    """
    values = np.asarray(losses, dtype=np.float64)
    if window < 1:
        raise ConfigError(f"window must be at least 1, got {window}")
    first = [values[:end].mean() for end in range(1, min(window, len(values) + 1))]
    rest = sliding_window_view(values, window).mean(axis=1) if len(values) >= window else []
    return np.array([*first, *rest])


def crossing(values: ArrayLike, level: float) -> Numbers:
    """Return when values first are at most ``level``, in iterations, between two of them by linear interpolation.

    Args:
        values: Of x(0) first; of shape (iterations + 1, ...): of many runs at once, if that is wanted.
        level: To be reached.

    Returns:
        Of shape (...): 0 for a run that begins there, ``inf`` for one that never gets there (it is censored).
    """
    values = np.asarray(values, dtype=np.float64)
    reached = values <= level  # false for nan: a run that blew up has not arrived
    first = reached.argmax(axis=0)
    at = np.take_along_axis(values, first[None], axis=0)[0]
    before = np.take_along_axis(values, np.maximum(first - 1, 0)[None], axis=0)[0]
    steep = np.isfinite(before) & (before > at)
    back = np.divide(level - at, before - at, out=np.zeros_like(at), where=steep)
    return np.where(reached.any(axis=0), np.maximum(first - back, 0.0), np.inf)


def levels(losses: ArrayLike, window: int = 1, count: int = 7, begin: int = 0) -> list[float]:
    """Return levels at which the iterations of a run can be counted well, the highest first.

    They lie where an undisturbed run first gets at iterations as far apart as possible, as long as the loss falls there,
    over the window before as over the one after, by several times the noise of its mean. A level where it hardly falls any
    more would count chance.

    Args:
        losses: Of an undisturbed run; of shape (iterations + 1,).
        window: Of the trailing mean.
        count: How many, ``>= 1``.
        begin: The first iteration to take a level from: what is not to be measured is before it.

    Returns:
        At most ``count``, falling.

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
            f"what is measured falls nowhere after iteration {begin} by {TIMES_NOISE:g} times its noise over {window} iterations; "
            f"give a wider window or a run that still converges"
        )
    places = np.array(usable)
    wanted = np.linspace(usable[0], usable[-1], count + 1)[1:]
    nearest = sorted({usable[int(np.abs(places - place).argmin())] for place in wanted})
    return [float(means[at]) for at in nearest]


def _noise(losses: Numbers) -> float:
    """Return the standard deviation of a loss about its trend, from its fourth differences, in which no trend is left."""
    fourth = np.diff(losses, n=4)
    return float(np.median(np.abs(fourth)) / 0.6745 / math.sqrt(70)) if len(fourth) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """What a disturbance cost.

    Args:
        iterations: Mean over the levels; may be below 0, since a disturbance can help. A level that the disturbed run
            never reached counts as reached at its end: the mean is a lower bound then.
        censored: How many levels the disturbed run never reached.
    """

    iterations: float
    censored: int


def iteration_cost(disturbed: ArrayLike, undisturbed: ArrayLike, at: Sequence[float], window: int = 1) -> IterationCost:
    """Return how many iterations more a disturbed run takes than the undisturbed one.

    Args:
        disturbed: Its losses, that of x(0) first.
        undisturbed: Those of the run with the same randomness.
        at: Levels, as :func:`levels` returns them.
        window: Of the trailing mean.

    Raises:
        ConfigError: if there is no level, or the undisturbed run does not reach one.
    """
    mine, theirs = trailing_mean(disturbed, window), trailing_mean(undisturbed, window)
    counts = [(float(crossing(mine, level)), float(crossing(theirs, level))) for level in at]
    if not counts or not all(math.isfinite(count) for _, count in counts):
        raise ConfigError(
            f"the undisturbed run must reach every level; it ends at {theirs.min():.6g}, the levels are {list(at)}"
        )
    end = len(mine) - 1.0
    costs = [min(count, end) - base for count, base in counts]
    return IterationCost(iterations=sum(costs) / len(costs), censored=sum(math.isinf(count) for count, _ in counts))
