"""A log with the distributions that were fitted to it, as text and as plain data for a page."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast_lab.simulate.distributions import Bathtub, Distribution, Weibull
from holdfast_lab.simulate.logs.families import BathtubHazard, Hazard, WeibullHazard
from holdfast_lab.simulate.logs.fitting import FittedParameter, LifetimeFit, fit_lifetimes
from holdfast_lab.simulate.logs.lifetimes import Lifetimes
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.logs.reading import FailureLog, read_log, shown_time

_POINTS = 200
"""Points of a curve on a page, at most."""


@dataclass(frozen=True, slots=True)
class FittedLog:
    """A log and its fits.

    Args:
        log: The log.
        chosen: The fit that is used.
        fits: All fits, from the simplest.
    """

    log: FailureLog
    chosen: LifetimeFit
    fits: tuple[LifetimeFit, ...]

    @property
    def why(self) -> str:
        """The chosen fit in a few words."""
        return f"{described(self.chosen)}; {self.log.lifetimes.failures:,} failures in {self.log.name}"

    def lines(self) -> list[str]:
        """Return what the log was taken for, and a line for each fit."""
        lines = list(self.log.said)
        for fit in self.fits:
            mark = " (used)" if fit is self.chosen else ""
            lines.append(f"{described(fit)}, AIC {fit.aic:,.1f}{mark}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for ``results.json``: what was read, the survival curve, and the fits with theirs."""
        longest_s = float(self.log.lifetimes.seconds.max())
        at_s = np.linspace(longest_s / _POINTS, longest_s, _POINTS)
        return {
            "said": list(self.log.said),
            "survival": survival_curve(self.log.lifetimes),
            "fits": [
                {
                    "family": fit.family,
                    "described": described(fit),
                    "is_used": fit is self.chosen,
                    "aic": fit.aic,
                    "parameters": [dataclasses.asdict(one) for one in fit.parameters],
                    "t_s": [0.0, *at_s.tolist()],
                    "alive": [1.0, *np.exp(-_hazard(fit.distribution).cumulative(at_s)).tolist()],
                }
                for fit in self.fits
            ],
        }


def fit_log(path: str | Path, options: LogOptions | None = None, choice: str = "best") -> FittedLog:
    """Read a log and fit distributions to its lifetimes.

    Args:
        path: The file.
        options: How to read it.
        choice: One of :data:`~holdfast_lab.simulate.logs.fitting.CHOICES`.

    Raises:
        ConfigError: if it cannot be read or fitted.
    """
    log = read_log(path, options)
    chosen, fits = fit_lifetimes(log.lifetimes, choice)
    return FittedLog(log, chosen, fits)


def described(fit: LifetimeFit) -> str:
    """Return a fit as text: family, parameters, and their 95 % intervals in brackets."""
    return f"{fit.family}, {', '.join(map(_shown, fit.parameters))}"


def _shown(one: FittedParameter) -> str:
    name = one.name.removesuffix("_s").replace("_", " ")
    shown: Callable[[float], str] = shown_time if one.name == "mean_s" else "{:.3g}".format
    low, high = (None if end is None else shown(end) for end in (one.low, one.high))
    between = (
        f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else "open"
    )
    return f"{name} {shown(one.value)} ({between})"


def _hazard(distribution: Distribution) -> Hazard:
    match distribution:
        case Weibull(mean_s=mean_s, shape=shape):
            return WeibullHazard(mean_s, shape)
        case Bathtub():
            parts = distribution.early_s, distribution.wear_s, distribution.early_shape, distribution.wear_shape
            return BathtubHazard(*parts)
        case _:
            return WeibullHazard(distribution.mean_s)


def survival_curve(lifetimes: Lifetimes) -> dict[str, list[float]]:
    """Return the estimate of Kaplan and Meier with its 95 % band, of machines whose begin is in the log.

    It is empty if there is none, or if the log does not say how long each machine lived.
    """
    from scipy.stats import CensoredData, ecdf

    new = ~lifetimes.running
    died = lifetimes.seconds[new & lifetimes.ended]
    if not lifetimes.has_shape or not len(died):
        return {"t_s": [], "alive": [], "low": [], "high": []}
    curve = ecdf(CensoredData(uncensored=died, right=lifetimes.seconds[new & ~lifetimes.ended])).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where none is left, there is no band
        band = curve.confidence_interval(method="log-log")
    at = np.unique(np.linspace(0, len(curve.quantiles) - 1, _POINTS).astype(int))
    columns = {
        "t_s": curve.quantiles,
        "alive": curve.probabilities,
        "low": band.low.probabilities,
        "high": band.high.probabilities,
    }
    firsts = {"t_s": 0.0, "alive": 1.0, "low": 1.0, "high": 1.0}
    kept = {name: [firsts[name], *(float(value) for value in values[at])] for name, values in columns.items()}
    for name in ("low", "high"):
        kept[name] = [
            value if math.isfinite(value) else alive for value, alive in zip(kept[name], kept["alive"], strict=True)
        ]
    return kept
