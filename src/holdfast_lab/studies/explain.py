"""What the rows of a campaign say: shares of outcomes, spreads, and which factor explains the outcome."""

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


class Share(NamedTuple):
    """How often an outcome came.

    Args:
        trials: So many had it.
        share: Of all, from 0 to 1.
        low: Lower end of its 95 % interval (Wilson).
        high: Upper end.
    """

    trials: int
    share: float
    low: float
    high: float


def shares(outcomes: Iterable[str]) -> dict[str, Share]:
    """Return the share of each of the four outcomes; there must be at least one."""
    counts = Counter(outcomes)
    total = counts.total()
    return {name: Share(counts[name], counts[name] / total, *wilson(counts[name], total)) for name in OUTCOMES}


def by_level(rows: Iterable[Row], factor: str) -> dict[Any, dict[str, Share]]:
    """Return the shares of outcomes among rows of each level of a factor, levels in order; rows without it are left out."""
    outcomes: dict[Any, list[str]] = {}
    for row in rows:
        if factor in row:
            outcomes.setdefault(row[factor], []).append(row["outcome"])
    levels = sorted(outcomes, key=lambda level: (type(level).__name__, level if level is not None else 0))
    return {level: shares(outcomes[level]) for level in levels}


@dataclass(frozen=True, slots=True)
class Explained:
    """How much of the outcome a factor explains.

    Args:
        factor: Which.
        share: Of the entropy of the outcome, from 0 (as much as chance would) to 1 (the level decides the outcome).
        p: The probability of as large a share, or a larger one, if the factor had nothing to do with it.
        levels: How many it has.
        trials: How many rows have it.
    """

    factor: str
    share: float
    p: float
    levels: int
    trials: int


def explained(rows: Sequence[Row], factor: str, *, seed: int, permutations: int = 999) -> Explained:
    """Return how much a factor explains of the outcome, over those rows that have it.

    It is Theil's uncertainty coefficient, I(outcome; factor) / H(outcome), less what levels without a meaning would get:
    that is estimated by permuting the outcomes, which also gives p, and matters for factors of many levels. It says
    nothing about causes: where two factors go together, both explain.

    Args:
        rows: Independent trials.
        factor: A name in rows; its values are levels, whatever they are.
        seed: Of the permutations.
        permutations: How many, ``>= 1``; the smallest p is ``1 / (permutations + 1)``.

    Source:
        H. Theil, "On the estimation of relationships involving qualitative variables", American Journal of Sociology 76(1),
        1970; N. X. Vinh, J. Epps, J. Bailey, "Information theoretic measures for clusterings comparison", JMLR 11, 2010
        (less chance); B. Phipson, G. K. Smyth, "Permutation p-values should never be zero", SAGMB 9(1), 2010.
    """
    having = [row for row in rows if factor in row]
    levels, outcomes = _numbered([row[factor] for row in having]), _numbered([row["outcome"] for row in having])
    num_levels = int(levels.max(initial=-1)) + 1
    entropy = _entropy(np.bincount(outcomes)) if having else 0.0
    if num_levels < 2 or entropy == 0:
        return Explained(factor, 0.0, 1.0, num_levels, len(having))
    found = _information(levels, outcomes)
    chance = np.random.default_rng(seed)
    drawn = np.array([_information(levels, chance.permutation(outcomes)) for _ in range(permutations)])
    by_chance = float(drawn.mean())
    room = entropy - by_chance
    share = max(0.0, (found - by_chance) / room) if room > 1e-12 else 0.0  # no room: a level for every trial
    p = (1 + int((drawn >= found - 1e-12).sum())) / (permutations + 1)
    return Explained(factor, share, p, num_levels, len(having))


def _numbered(values: Sequence[Any]) -> _Numbers:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def _information(a: _Numbers, b: _Numbers) -> float:
    """Return the mutual information of two lists of levels, in nats."""
    joint = np.bincount(a * (int(b.max()) + 1) + b)
    return _entropy(np.bincount(a)) + _entropy(np.bincount(b)) - _entropy(joint)


def _entropy(counts: np.ndarray[Any, Any]) -> float:
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


class Spread(NamedTuple):
    """How values lie.

    Args:
        values: How many.
        mean: Of them.
        std: Standard deviation of the population they are drawn from (over ``values - 1``), None of fewer than two.
        cv: Coefficient of variation, ``std / |mean|``; None where there is none.
    """

    values: int
    mean: float
    std: float | None
    cv: float | None


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean, deviation and coefficient of variation of the values that are there, None if none is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    mean = statistics.fmean(there)
    std = statistics.stdev(there) if len(there) > 1 else None
    return Spread(len(there), mean, std, std / abs(mean) if std is not None and mean else None)
