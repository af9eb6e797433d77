"""Fits distributions to lifetimes by maximum likelihood, with intervals from the profile of the likelihood.

The likelihood of a lifetime ``t`` that ended in a failure is the density ``h(t) S(t)``, of one that is right-censored the
survival function ``S(t)``. A machine that was already up when the log began has an unknown age; for a process that has
run for long, the rest of its life has the density ``S(t) / mean`` (Cox, Renewal Theory, 1962), and it survives ``t`` with
the probability that ``log_remaining`` gives. So machines that never failed in a log count, without the assumption that
they were new when it began.

An interval contains the values of a parameter for which the likelihood, maximised over the other parameters, is less than
``exp(1.92)`` times below its maximum: the 95 % quantile of chi-squared with one degree of freedom, halved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import check_choice
from holdfast_lab.simulate.distributions import Distribution
from holdfast_lab.simulate.logs.families import FAMILIES, Family
from holdfast_lab.simulate.logs.lifetimes import Lifetimes, Seconds

CHOICES = ("best", *(family.name for family in FAMILIES))
"""Names of a fit; ``best`` is that with the lowest AIC, or a simpler one within :data:`CLOSE`."""
CLOSE = 2.0
"""A difference of AIC below which data do not tell two models apart (Burnham and Anderson, Model Selection, 2002)."""
NEEDED = "fitting lifetimes needs SciPy, which is not installed: pip install 'holdfast[lab]'"
_DEPTH = 3.841458820694124 / 2
_FARTHEST = 7.0
"""An end farther than this from the value, by its logarithm, is not searched."""
_ROUNDS, _CLOSE_ENOUGH, _MET = 12, 0.02, 1e-4
_MANY, _BIN = 1000, 0.005
"""More lifetimes than this are counted in bins of this width of the logarithm, 0.5 %."""
_IMPOSSIBLE = 1e9


@dataclass(frozen=True, slots=True)
class FittedParameter:
    """One parameter: name, value, and the ends of its 95 % interval; an end is None beyond the searched range."""

    name: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class LifetimeFit:
    """A fitted distribution.

    Args:
        family: ``"exponential"``, ``"weibull"`` or ``"bathtub"``.
        parameters: ``mean_s`` first, then shapes.
        log_likelihood: Its maximum, of lifetimes in seconds.
        aic: ``2 parameters - 2 log_likelihood``; lower is better.
        distribution: The same for the simulator.
    """

    family: str
    parameters: tuple[FittedParameter, ...]
    log_likelihood: float
    aic: float
    distribution: Distribution


def fit_lifetimes(
    lifetimes: Lifetimes, choice: str = "best", *, only: bool = False
) -> tuple[LifetimeFit, tuple[LifetimeFit, ...]]:
    """Fit every family for which there are enough failures.

    Args:
        lifetimes: At least one must end in a failure.
        choice: One of :data:`CHOICES`.
        only: Fit no other family than the chosen one.

    Returns:
        The chosen fit, and all fits, from the simplest.

    Raises:
        ConfigError: if there are too few failures for the choice, or SciPy is missing.
    """
    check_choice("fit", choice, CHOICES)
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ConfigError(NEEDED) from None
    if not lifetimes.failures:
        raise ConfigError("no lifetime ends in a failure, so that none can be fitted")
    families: tuple[Family, ...] = FAMILIES if lifetimes.has_shape else FAMILIES[:1]
    if only:
        families = tuple(family for family in families if choice in ("best", family.name))
    fits = tuple(_fit(family, lifetimes) for family in families if lifetimes.failures >= family.fewest)
    if choice != "best":
        for fit in fits:
            if fit.family == choice:
                return fit, fits
        fewest = next(family.fewest for family in FAMILIES if family.name == choice)
        why = (
            f"it needs {fewest} failures, and there are {lifetimes.failures}"
            if lifetimes.has_shape
            else "the log does not say how long each machine lived (for sizes, leaves=oldest or newest assumes it)"
        )
        raise ConfigError(f"{choice} cannot be fitted: {why}")
    lowest = min(fit.aic for fit in fits)
    return next(fit for fit in fits if fit.aic <= lowest + CLOSE), fits


def _fit(family: Family, lifetimes: Lifetimes) -> LifetimeFit:
    unit_s = lifetimes.total_s / lifetimes.failures
    search, of_mean = _Search(family, lifetimes, unit_s), _log_mean(family)
    names = family.parameters
    shapes = [place for place, name in enumerate(names) if not name.endswith("_s")]
    ends: list[tuple[float | None, float | None]] = []
    while not ends:  # begins again if the search for an end finds a higher likelihood
        with contextlib.suppress(_BetterFoundError):
            ends = [search.interval(of) for of in (of_mean, *map(_coordinate, shapes))]
    scales = [unit_s if name.endswith("_s") else 1.0 for name in names]
    values = [scale * math.exp(value) for scale, value in zip(scales, search.best, strict=True)]
    mean_s = unit_s * math.exp(of_mean(search.best))
    parameters = [_parameter("mean_s", mean_s, ends[0], unit_s)]
    parameters += [_parameter(names[at], values[at], end, 1.0) for at, end in zip(shapes, ends[1:], strict=True)]
    log_likelihood = -search.least - lifetimes.failures * math.log(unit_s)
    aic = 2 * len(names) - 2 * log_likelihood
    return LifetimeFit(family.name, tuple(parameters), log_likelihood, aic, family.distribution(values))


def _parameter(name: str, value: float, ends: tuple[float | None, float | None], scale: float) -> FittedParameter:
    low, high = (None if end is None else scale * math.exp(end) for end in ends)
    return FittedParameter(name, value, low, high)


def _coordinate(place: int) -> Callable[[Sequence[float]], float]:
    return lambda logs: float(logs[place])


def _log_mean(family: Family) -> Callable[[Sequence[float]], float]:
    return lambda logs: math.log(family.hazard([math.exp(value) for value in logs]).mean)


class _BetterFoundError(Exception):
    """While an interval was searched, a higher likelihood was found than the maximum so far."""


class _Search:
    """The maximum of one family's likelihood, and the profile around it.

    Parameters are searched by their logarithms; times are in units of the time per failure.
    """

    def __init__(self, family: Family, lifetimes: Lifetimes, unit_s: float) -> None:
        self._cost = _cost(family, lifetimes, unit_s)
        self._bounds = [(math.log(low), math.log(high)) for low, high in family.bounds]
        found = [self._minimum([math.log(value) for value in start]) for start in family.starts]
        self.best, self.least = min(found, key=lambda one: one[1])

    def interval(self, of: Callable[[Sequence[float]], float]) -> tuple[float | None, float | None]:
        """Return both ends of the interval of a function of the parameters; None if an end is beyond their range."""
        return self._end(of, -1), self._end(of, 1)

    def _end(self, of: Callable[[Sequence[float]], float], sign: int) -> float | None:
        """Search outward until the likelihood has fallen, then between the last two values."""
        inside, low, near, step = of(self.best), 0.0, self.best, 0.05
        while True:
            outside = inside + sign * step
            found = self._depth(of, outside, near)
            if found is None or abs(outside - of(self.best)) > _FARTHEST:
                return None
            near, high = found
            if high >= _DEPTH:
                break
            inside, low, step = outside, high, 2 * step
        for _ in range(_ROUNDS):  # the root of the depth is almost linear
            share = (math.sqrt(_DEPTH) - math.sqrt(low)) / (math.sqrt(high) - math.sqrt(low))
            middle = inside + min(max(share, 0.05), 0.95) * (outside - inside)
            found = self._depth(of, middle, near)
            if found is None:
                break
            near, depth = found
            if abs(depth - _DEPTH) < _CLOSE_ENOUGH:
                return middle
            if depth < _DEPTH:
                inside, low = middle, depth
            else:
                outside, high = middle, depth
        return outside

    def _depth(
        self, of: Callable[[Sequence[float]], float], value: float, near: Sequence[float]
    ) -> tuple[list[float], float] | None:
        """Return where the likelihood is highest if ``of`` has a value, and how far below its maximum.

        The result is None if it cannot have that value.

        Raises:
            _BetterFoundError: if it is higher than the maximum so far.
        """
        found = self._minimum(near, of, value)
        if abs(of(found[0]) - value) >= _MET:
            found = self._minimum(self.best, of, value)
        if abs(of(found[0]) - value) >= _MET:
            return None
        if found[1] < self.least - _CLOSE_ENOUGH:
            self.best, self.least = self._minimum(found[0])
            raise _BetterFoundError
        return found[0], max(found[1] - self.least, 0.0)

    def _minimum(
        self, start: Sequence[float], of: Callable[[Sequence[float]], float] | None = None, value: float = 0.0
    ) -> tuple[list[float], float]:
        """Return where the cost is lowest near a start, and how low; where ``of`` has a value, if it is given."""
        from scipy.optimize import minimize

        if of is None:
            found = minimize(self._cost, start, method="L-BFGS-B", bounds=self._bounds)
        else:
            fixed = {"type": "eq", "fun": lambda logs: of(logs) - value}
            found = minimize(self._cost, start, method="SLSQP", bounds=self._bounds, constraints=fixed)
        return [float(one) for one in found.x], float(found.fun)


def _cost(family: Family, lifetimes: Lifetimes, unit_s: float) -> Callable[[Sequence[float]], float]:
    """Return minus the log-likelihood as a function of the logarithms of the parameters, of times in ``unit_s``."""
    times, running, ended = lifetimes.seconds / unit_s, lifetimes.running, lifetimes.ended
    new_ended, new = _counted(times[ended & ~running]), _counted(times[~running])
    old_ended, old_censored = _counted(times[ended & running]), _counted(times[~ended & running])

    def cost(logs: Sequence[float]) -> float:
        hazard = family.hazard([math.exp(value) for value in logs])
        total = hazard.log_hazard(new_ended[0]) @ new_ended[1] - hazard.cumulative(new[0]) @ new[1]
        if len(old_ended[0]):
            total -= hazard.cumulative(old_ended[0]) @ old_ended[1] + old_ended[1].sum() * math.log(hazard.mean)
        if len(old_censored[0]):
            total += hazard.log_remaining(old_censored[0]) @ old_censored[1]
        return -float(total) if np.isfinite(total) else _IMPOSSIBLE

    return cost


def _counted(times: Seconds) -> tuple[Seconds, Seconds]:
    """Return times with their numbers; if there are many, those of a bin are one time, their mean."""
    if len(times) <= _MANY:
        return times, np.ones(len(times))
    _, whose, number = np.unique(np.rint(np.log(times) / _BIN), return_inverse=True, return_counts=True)
    return np.bincount(whose, times) / number, number.astype(np.float64)
