"""The families of lifetime distributions that are fitted, by their hazards.

The bathtub is the additive Weibull model: the first of an early and a wear failure, with the cumulative hazard
``(t / early_s) ^ early_shape + (t / wear_s) ^ wear_shape``, where ``early_shape <= 1 <= wear_shape`` (Xie and Lai,
"Reliability analysis using an additive Weibull model with bathtub-shaped failure rate function", Reliability
Engineering and System Safety 52, 1996).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast_lab.simulate.distributions import Bathtub, Distribution, Exponential, Weibull
from holdfast_lab.simulate.logs.lifetimes import Seconds

_GRID = 400
"""Points at which the survival function of a bathtub is integrated, evenly spaced in the logarithm of time."""


class Hazard(Protocol):
    """One member of a family, at fixed parameters. Times may have any unit, that of the parameters."""

    @property
    def mean(self) -> float:
        """The mean lifetime."""
        ...

    def log_hazard(self, time: Seconds) -> Seconds:
        """Return the logarithm of the hazard."""
        ...

    def cumulative(self, time: Seconds) -> Seconds:
        """Return the cumulative hazard: minus the logarithm of the share that survives ``time``."""
        ...

    def log_remaining(self, time: Seconds) -> Seconds:
        """Return the logarithm of the share of the mean that lies beyond ``time``.

        That is the probability that a machine of unknown age survives another ``time`` (Cox, Renewal Theory, 1962).
        """
        ...


@dataclass(frozen=True, slots=True)
class WeibullHazard:
    """Weibull by mean and shape."""

    mean: float
    shape: float = 1.0

    @property
    def scale(self) -> float:
        """The time that a share of 1/e survives."""
        return self.mean / math.gamma(1 + 1 / self.shape)

    def log_hazard(self, time: Seconds) -> Seconds:
        """See :class:`Hazard`."""
        found: Seconds = math.log(self.shape / self.scale) + (self.shape - 1) * np.log(time / self.scale)
        return found

    def cumulative(self, time: Seconds) -> Seconds:
        """See :class:`Hazard`."""
        found: Seconds = (time / self.scale) ** self.shape
        return found

    def log_remaining(self, time: Seconds) -> Seconds:
        """See :class:`Hazard`."""
        from scipy.special import gammaincc

        found: Seconds = np.log(np.maximum(gammaincc(1 / self.shape, self.cumulative(time)), 1e-300))
        return found


class BathtubHazard:
    """The additive Weibull model, by the scale and the shape of both of its parts."""

    def __init__(self, early: float, wear: float, early_shape: float, wear_shape: float) -> None:
        self.early, self.wear, self.early_shape, self.wear_shape = early, wear, early_shape, wear_shape
        shortest = math.log(min(early, wear))  # hardly any lifetime is far longer than this, or far shorter
        grid = np.linspace(shortest - 30 / max(early_shape, 0.3), shortest + 4 / min(early_shape, 1.0), _GRID)
        pieces = (grid[1] - grid[0]) * np.exp(grid - self._cumulative(grid))
        beyond = np.cumsum(pieces[::-1])[::-1] - pieces / 2
        self.mean = float(beyond[0])
        self._log_at, self._log_beyond = grid, np.log(np.maximum(beyond / beyond[0], 1e-300))

    def _cumulative(self, log_time: Seconds) -> Seconds:
        early = np.minimum(self.early_shape * (log_time - math.log(self.early)), 100.0)
        wear = np.minimum(self.wear_shape * (log_time - math.log(self.wear)), 100.0)
        found: Seconds = np.exp(early) + np.exp(wear)
        return found

    def log_hazard(self, time: Seconds) -> Seconds:
        """See :class:`Hazard`."""
        parts = [
            math.log(shape / scale) + (shape - 1) * np.log(time / scale)
            for shape, scale in ((self.early_shape, self.early), (self.wear_shape, self.wear))
        ]
        found: Seconds = np.logaddexp(*parts)
        return found

    def cumulative(self, time: Seconds) -> Seconds:
        """See :class:`Hazard`."""
        return self._cumulative(np.log(time))

    def log_remaining(self, time: Seconds) -> Seconds:
        """See :class:`Hazard`."""
        found: Seconds = np.interp(np.log(time), self._log_at, self._log_beyond)
        return found


@dataclass(frozen=True, slots=True)
class Family:
    """A family of distributions.

    Args:
        name: ``"exponential"``, ``"weibull"`` or ``"bathtub"``.
        parameters: Names of the parameters; those that end in ``_s`` are times.
        bounds: Range of each; of times, as a multiple of the time per failure.
        starts: Values to begin the search with, likewise.
        fewest: Failures that it needs.
    """

    name: str
    parameters: tuple[str, ...]
    bounds: tuple[tuple[float, float], ...]
    starts: tuple[tuple[float, ...], ...]
    fewest: int

    def hazard(self, values: Sequence[float]) -> Hazard:
        """Return the member with these parameters."""
        return BathtubHazard(*values) if self.name == "bathtub" else WeibullHazard(*values)

    def distribution(self, values: Sequence[float]) -> Distribution:
        """Return the same for the simulator, of times in seconds."""
        if self.name == "bathtub":
            return Bathtub(math.inf, *values)
        return Weibull(*values) if self.name == "weibull" else Exponential(*values)


_SCALE = (1e-4, 1e4)
FAMILIES = (
    Family("exponential", ("mean_s",), (_SCALE,), ((1.0,),), 1),
    Family("weibull", ("mean_s", "shape"), (_SCALE, (0.05, 50.0)), ((1.0, 1.0),), 5),
    Family(
        "bathtub",
        ("early_s", "wear_s", "early_shape", "wear_shape"),
        (_SCALE, _SCALE, (0.05, 1.0), (1.0, 20.0)),
        ((3.0, 1.5, 0.6, 3.0), (3.0, 3.0, 0.9, 8.0), (1.0, 5.0, 0.8, 3.0), (10.0, 1.2, 0.5, 6.0), (1.5, 2.0, 0.9, 1.5)),
        20,
    ),
)
"""From the simplest."""
