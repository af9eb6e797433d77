"""Iterations until a run gets somewhere: to a loss, or near the optimum."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from holdfast.report.iteration_cost import Numbers, crossing, trailing_mean


def kappa(losses: ArrayLike, level: float, window: int = 1) -> float:
    """Return the iterations until the trailing mean of the loss is at most ``level``, interpolated; ``inf`` if never.

    Args:
        losses: On a fixed set of samples; that of x(0) first; of shape (iterations + 1,).
        level: To be reached.
        window: Of the trailing mean, ``>= 1``.
    """
    return float(crossing(trailing_mean(losses, window), level))


def kappa_within(distances: ArrayLike, eps: float) -> Numbers:
    """Return the iterations until the distance to the optimum is at most ``eps``, interpolated; ``inf`` if never.

    Interpolated in the logarithm: of a run that converges at a rate the result is exact, and what lies below such a run
    at every whole iteration gets there no later.

    Args:
        distances: ||x(k) - x*||, that of x(0) first; of shape (iterations + 1, ...).
        eps: To be reached, ``> 0``.

    Returns:
        Of shape (...).
    """
    tiny = np.finfo(np.float64).tiny  # the logarithm of what is at the optimum itself
    return crossing(np.log(np.maximum(np.asarray(distances, dtype=np.float64), tiny)), math.log(eps))
