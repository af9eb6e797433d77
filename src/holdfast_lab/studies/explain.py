"""Statistics over the rows of a campaign: outcome shares, spreads, and how much a factor explains the outcome."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from holdfast_lab.studies.base import Row
from holdfast_lab.studies.outcomes import OUTCOMES
from holdfast_lab.studies.stats import wilson

_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


class OutcomeShare(NamedTuple):
    """Frequency of an outcome.

    Args:
        trials: Number of trials with this outcome.
        share: Share of all trials, from 0 to 1.
        low: Lower end of the share's 95 % interval (Wilson).
        high: Upper end.
    """

    trials: int
    share: float
    low: float
    high: float


def shares(outcomes: Iterable[str]) -> dict[str, OutcomeShare]:
    """Return the share of each of the four outcomes; ``outcomes`` must not be empty."""
    counts = Counter(outcomes)
    total = counts.total()
    return {name: OutcomeShare(counts[name], counts[name] / total, *wilson(counts[name], total)) for name in OUTCOMES}


@dataclass(frozen=True, slots=True)
class FactorShare:
    """How much of the outcome a factor explains.

    Args:
        factor: Name of the factor.
        share: Explained share of the outcome's entropy, from 0 (no more than chance) to 1 (the level determines it).
        p: Probability of a share at least as large if outcome and factor were independent.
        levels: Number of levels of the factor.
        trials: Number of rows that have the factor.
    """

    factor: str
    share: float
    p: float
    levels: int
    trials: int


def explained(rows: Sequence[Row], factor: str, *, seed: int, permutations: int = 999) -> FactorShare:
    """Return how much of the outcome a factor explains, over the rows that have the factor.

    The measure is Theil's uncertainty coefficient, I(outcome; factor) / H(outcome), corrected for chance. The chance
    level is estimated by permuting the outcomes, which also gives p; it matters for factors of many levels. The measure
    says nothing about causes: of two correlated factors, both explain the outcome.

    Args:
        rows: Independent trials.
        factor: A column of the rows; its distinct values are the levels.
        seed: Seed of the permutations.
        permutations: Number of permutations, ``>= 1``; the smallest p is ``1 / (permutations + 1)``.

    Source:
        H. Theil, "On the estimation of relationships involving qualitative variables", American Journal of Sociology
        76(1), 1970; N. X. Vinh, J. Epps, J. Bailey, "Information theoretic measures for clusterings comparison", JMLR
        11, 2010 (correction for chance); B. Phipson, G. K. Smyth, "Permutation p-values should never be zero", SAGMB
        9(1), 2010.
    """
    having = [row for row in rows if factor in row]
    levels, outcomes = _numbered([row[factor] for row in having]), _numbered([row["outcome"] for row in having])
    num_levels = int(levels.max(initial=-1)) + 1
    entropy = _entropy(np.bincount(outcomes)) if having else 0.0
    if num_levels < 2 or entropy == 0:
        return FactorShare(factor, 0.0, 1.0, num_levels, len(having))
    found = _information(levels, outcomes)
    chance = np.random.default_rng(seed)
    drawn = np.array([_information(levels, chance.permutation(outcomes)) for _ in range(permutations)])
    by_chance = float(drawn.mean())
    room = entropy - by_chance
    share = max(0.0, (found - by_chance) / room) if room > 1e-12 else 0.0  # room is 0 with a level for every trial
    p = (1 + int((drawn >= found - 1e-12).sum())) / (permutations + 1)
    return FactorShare(factor, share, p, num_levels, len(having))


def _numbered(values: Sequence[Any]) -> _Numbers:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def _information(a: _Numbers, b: _Numbers) -> float:
    """Return the mutual information of two sequences of levels, in nats."""
    joint = np.bincount(a * (int(b.max()) + 1) + b)
    return _entropy(np.bincount(a)) + _entropy(np.bincount(b)) - _entropy(joint)


def _entropy(counts: np.ndarray[Any, Any]) -> float:
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


class ValueSpread(NamedTuple):
    """Mean and variation of values.

    Args:
        values: Number of values.
        mean: Their mean.
        std: Sample standard deviation (over ``values - 1``), None for fewer than two values.
        cv: Coefficient of variation, ``std / |mean|``; None if undefined.
    """

    values: int
    mean: float
    std: float | None
    cv: float | None


def spread(values: Iterable[float | None]) -> ValueSpread | None:
    """Return mean, standard deviation and coefficient of variation of the values except None; None without values."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    mean = statistics.fmean(there)
    std = statistics.stdev(there) if len(there) > 1 else None
    return ValueSpread(len(there), mean, std, std / abs(mean) if std is not None and mean else None)
