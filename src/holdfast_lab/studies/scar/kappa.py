"""Number of iterations until a run reaches a loss, or a distance from the optimum."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from holdfast.tools.iteration_cost import Numbers, crossing, trailing_mean


def kappa(losses: ArrayLike, level: float, window: int = 1) -> float:
    """Return the iterations until the trailing mean of the loss is at most ``level``, interpolated; ``inf`` if never.

    Args:
        losses: Loss on a fixed set of samples, that of x(0) first; of shape (iterations + 1,).
        level: Loss to reach.
        window: Window of the trailing mean in iterations, ``>= 1``.
    """
    return float(crossing(trailing_mean(losses, window), level))


def kappa_within(distances: ArrayLike, eps: float) -> Numbers:
    """Return the iterations until the distance to the optimum is at most ``eps``, interpolated; ``inf`` if never.

    Interpolation is in the logarithm, so the result is exact for a run with a constant rate of convergence, and a run
    that is below such a run at every whole iteration reaches ``eps`` no later.

    Args:
        distances: ||x(k) - x*||, that of x(0) first; of shape (iterations + 1, ...).
        eps: Distance to reach, ``> 0``.

    Returns:
        Iterations, of shape (...).
    """
    tiny = np.finfo(np.float64).tiny  # avoids the logarithm of 0 at the optimum itself
    return crossing(np.log(np.maximum(np.asarray(distances, dtype=np.float64), tiny)), math.log(eps))
