"""Distributions of times to failure and to repair."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.checks import check_choice, check_range

Seconds = npt.NDArray[np.float64]


class Distribution(Protocol):
    """A distribution of times in seconds, ``>= 0``."""

    @property
    def mean_s(self) -> float:
        """The mean, in seconds."""
        ...

    def draw(self, rng: np.random.Generator, size: int, age_s: float = 0.0) -> Seconds:
        """Return the remaining lifetimes of ``size`` units of age ``age_s``; shape ``(size,)``."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant time; a unit older than that ends immediately.

    Args:
        mean_s: ``>= 0``.
    """

    mean_s: float

    def __post_init__(self) -> None:
        check_range("mean_s", self.mean_s, 0)

    def draw(self, rng: np.random.Generator, size: int, age_s: float = 0.0) -> Seconds:
        """Return the remaining time, ``size`` times."""
        return np.full(size, max(self.mean_s - age_s, 0.0))


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless: old units fail as often as new ones.

    Args:
        mean_s: Mean time between failures of *one* unit, ``> 0``.
    """

    mean_s: float

    def __post_init__(self) -> None:
        check_range("mean_s", self.mean_s, 0, above=True)

    def draw(self, rng: np.random.Generator, size: int, age_s: float = 0.0) -> Seconds:
        """Return times that do not depend on the age."""
        return rng.standard_exponential(size) * self.mean_s


@dataclass(frozen=True, slots=True)
class Weibull:
    """Hazard ``(shape / scale) (t / scale)^(shape - 1)``, which falls with age if the shape is below 1.

    LANL's failures fit shapes of 0.7 to 0.8 (Schroeder and Gibson, DSN 2006).

    Args:
        mean_s: ``> 0``; the scale is ``mean_s / Gamma(1 + 1/shape)``.
        shape: From 0.05 to 50.
    """

    mean_s: float
    shape: float

    def __post_init__(self) -> None:
        check_range("mean_s", self.mean_s, 0, above=True)
        check_range("shape", self.shape, 0.05, most=50)

    @property
    def scale_s(self) -> float:
        """The time that a share of 1/e of new units survives, in seconds."""
        return self.mean_s / math.gamma(1 + 1 / self.shape)

    def draw(self, rng: np.random.Generator, size: int, age_s: float = 0.0) -> Seconds:
        """Return remaining times: the cumulative hazard ``(t / scale)^shape`` grows by an exponential random number."""
        spent = (age_s / self.scale_s) ** self.shape
        grown = rng.standard_exponential(size) + spent
        left: Seconds = self.scale_s * grown ** (1 / self.shape) - age_s
        return np.maximum(left, 0.0)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The logarithm is normal: many short times and some very long ones, as with repairs.

    It is the best fit to LANL's repairs (Schroeder and Gibson, DSN 2006).

    Args:
        mean_s: ``> 0``.
        sigma: Standard deviation of the logarithm, from 0.01 to 10.
    """

    mean_s: float
    sigma: float

    def __post_init__(self) -> None:
        check_range("mean_s", self.mean_s, 0, above=True)
        check_range("sigma", self.sigma, 0.01, most=10)

    def draw(self, rng: np.random.Generator, size: int, age_s: float = 0.0) -> Seconds:
        """Return remaining times; for old units, truncated normal (Robert, Statistics and Computing 5, 1995)."""
        mu = math.log(self.mean_s) - self.sigma**2 / 2
        if age_s <= 0:
            return rng.lognormal(mu, self.sigma, size)
        normal = _normal_above((math.log(age_s) - mu) / self.sigma, rng, size)
        return np.maximum(np.exp(mu + self.sigma * normal) - age_s, 0.0)


@dataclass(frozen=True, slots=True)
class Bathtub:
    """The first of three independent failures: early, chance or wear.

    Args:
        chance_s: Mean time of the chance failures, ``> 0``.
        early_s: Scale of early failures: Weibull of shape ``early_shape``.
        early_shape: Below 1.
        wear_s: Scale of wear: Weibull of shape ``wear_shape``.
        wear_shape: Above 1.
    """

    chance_s: float
    early_s: float
    wear_s: float
    early_shape: float = 0.5
    wear_shape: float = 5.0

    def __post_init__(self) -> None:
        for name in ("chance_s", "early_s", "wear_s"):
            check_range(name, getattr(self, name), 0, above=True)
        check_range("early_shape", self.early_shape, 0.05, most=1)
        check_range("wear_shape", self.wear_shape, 1, most=50)

    @property
    def _parts(self) -> tuple[Distribution, Distribution, Distribution]:
        early = Weibull(self.early_s * math.gamma(1 + 1 / self.early_shape), self.early_shape)
        wear = Weibull(self.wear_s * math.gamma(1 + 1 / self.wear_shape), self.wear_shape)
        return early, Exponential(self.chance_s), wear

    @property
    def mean_s(self) -> float:
        """The mean of new units: the survival function integrated by the trapezoidal rule over 20,000 points."""
        far_s = 40 * min(self.chance_s, self.wear_s)
        at_s = far_s * np.linspace(0, 1, 20_001) ** 4  # dense where early failures happen
        hazard = (at_s / self.early_s) ** self.early_shape + at_s / self.chance_s
        alive = np.exp(-hazard - (at_s / self.wear_s) ** self.wear_shape)
        return float(np.trapezoid(alive, at_s))

    def draw(self, rng: np.random.Generator, size: int, age_s: float = 0.0) -> Seconds:
        """Return the shortest of three independent remaining times."""
        early, chance, wear = (part.draw(rng, size, age_s) for part in self._parts)
        return np.minimum(np.minimum(early, chance), wear)


def stretched(distribution: Distribution, mean_s: float) -> Distribution:
    """Return an exponential, Weibull or bathtub distribution with another mean and the same shape."""
    factor = mean_s / distribution.mean_s
    match distribution:
        case Weibull(shape=shape):
            return Weibull(mean_s, shape)
        case Bathtub(chance_s=chance_s, early_s=early_s, wear_s=wear_s):
            scales = {"chance_s": chance_s * factor, "early_s": early_s * factor, "wear_s": wear_s * factor}
            return replace(distribution, **scales)
    return Exponential(mean_s)


def make_distribution(kind: str, mean_s: float, **shape: Any) -> Distribution:
    """Return the distribution called ``kind``.

    Args:
        kind: ``"constant"``, ``"exponential"``, ``"weibull"`` (``shape``), ``"lognormal"`` (``sigma``) or ``"bathtub"``
            (``early_s``, ``wear_s``, and the shapes), whose ``mean_s`` is that of the chance failures.
        mean_s: Mean, seconds.
        **shape: The kind's other parameters.

    Raises:
        ConfigError: if the kind is unknown, or a number is out of range.
    """
    kinds: dict[str, Any] = {
        "constant": Constant,
        "exponential": Exponential,
        "weibull": Weibull,
        "lognormal": LogNormal,
        "bathtub": Bathtub,
    }
    check_choice("distribution", kind, tuple(kinds))
    made: Distribution = kinds[kind](mean_s, **shape)
    return made


def _normal_above(least: float, rng: np.random.Generator, size: int) -> Seconds:
    """Return standard normal numbers above ``least``, by rejection."""
    kept = np.empty(0)
    steep = (least + math.sqrt(least**2 + 4)) / 2
    while kept.size < size:
        if least <= 0:
            tried = rng.standard_normal(2 * size + 8)
            tried = tried[tried > least]
        else:
            tried = least + rng.standard_exponential(2 * size + 8) / steep
            tried = tried[rng.random(tried.size) < np.exp(-((tried - steep) ** 2) / 2)]
        kept = np.concatenate((kept, tried))
    return kept[:size]
