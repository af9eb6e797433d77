"""Aggregates trials: mean costs, and the reduction of each policy compared with traditional recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.scar.policies import PARTIAL, TRADITIONAL
from holdfast_lab.studies.stats import RESAMPLES

Numbers = NDArray[np.float64]
AT_BEST = ", best rate"
"""Suffix of a program that runs at its best learning rate instead of the stated one."""
_ENDS = (0.025, 0.975)
MLR, NETWORKS, ALS, LDA = ("mlr",), ("mlp", "cnn", "gpt"), ("als",), ("lda",)
"""Prefixes of program names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScarCell:
    """The cost of a policy for a program.

    Args:
        trials: Number of trials, each paired with the same trial of the traditional policy.
        cost: Mean cost in iterations.
        cost_ci: Its 95 % interval.
        reduction: 1 - mean cost / mean traditional cost; nan if the traditional cost is not above 0.
        ci: Its 95 % interval, by paired bootstrap over the trials; an end is infinite if too many resamples are
            undefined.
        undefined: Number of the :data:`~holdfast_lab.studies.stats.RESAMPLES` resamples whose traditional cost is not
            above 0.
        censored: Trials in which a level was not reached, so that their cost is a lower bound.
        negative: Trials in which the failure helped.
        bytes: Mean number of bytes written per iteration.
        error: Root mean square distance between lost and restored state.
    """

    trials: int
    cost: float
    cost_ci: tuple[float, float]
    reduction: float
    ci: tuple[float, float]
    undefined: int
    censored: int
    negative: int
    bytes: float
    error: float


class TrialRows:
    """Queries over the rows of trials.

    Args:
        rows: Rows of the whole study; only those of trials are used.
        seed: Seed of the resampling.
    """

    def __init__(self, rows: Sequence[Row], seed: int = 0) -> None:
        self._seed = seed
        self._rows: dict[tuple[str, str, str], dict[int, Row]] = {}
        for row in rows:
            if row["part"] in ("trial", "several") and row["status"] == MEASURED:
                kind = f"{row['kind']} {row['failures']}" if row["part"] == "several" else row["kind"]
                self._rows.setdefault((row["program"], kind, row["policy"]), {})[row["trial"]] = row

    def programs(self, kind: str = "main") -> list[str]:
        """Return the programs with trials of this kind, in order of appearance."""
        return list(dict.fromkeys(program for program, kind_of, _ in self._rows if kind_of == kind))

    def policies(self, program: str, kind: str = "main") -> list[str]:
        """Return the policies of a program, in order of appearance."""
        return [policy for name, kind_of, policy in self._rows if (name, kind_of) == (program, kind)]

    def stated(self, *families: tuple[str, ...]) -> list[str]:
        """Return the programs of the given families (default: all) at their stated learning rates."""
        return [program for program in self.programs() if not program.endswith(AT_BEST) and _is_of(program, families)]

    def at_best(self, *families: tuple[str, ...]) -> list[str]:
        """Return the programs of the given families (default: all) at their best learning rates."""
        return [program for program in self.programs() if program.endswith(AT_BEST) and _is_of(program, families)]

    def chosen(self, program: str) -> str | None:
        """Return the policy with the lowest cost in the rehearsal next to a failure-free run."""
        costs = {
            policy: float(np.mean([row["cost"] for row in self._rows[program, "rehearsal", policy].values()]))
            for policy in self.policies(program, "rehearsal")
            if policy not in (TRADITIONAL, PARTIAL)
        }
        return min(costs, key=lambda policy: costs[policy]) if costs else None

    def cell(self, program: str, policy: str, kind: str = "main", *, late: bool = True) -> ScarCell | None:
        """Return the cost of a policy; None for fewer than two trials.

        Args:
            program: Name of the program.
            policy: Name of the policy.
            kind: Kind of the trials.
            late: Use only failures after the first full save (T >= C), including additional late trials; else all
                failures.
        """
        pairs = self._pairs(program, policy, TRADITIONAL, kind, late=late)
        if len(pairs) < 2:
            return None
        costs, base = (np.array([row["cost"] for row in side]) for side in zip(*pairs, strict=True))
        weights = _weights(len(pairs), self._seed)
        drawn, drawn_base = weights @ costs, weights @ base
        reductions = _less(drawn, drawn_base)
        mine = [mine for mine, _ in pairs]
        return ScarCell(
            trials=len(pairs),
            cost=float(costs.mean()),
            cost_ci=_interval(drawn),
            reduction=float(_less(costs.mean(), base.mean())),
            ci=_interval(reductions),
            undefined=int(np.isnan(reductions).sum()),
            censored=sum(row["censored"] > 0 for row in mine),
            negative=sum(row["cost"] < 0 for row in mine),
            bytes=float(np.mean([row.get("bytes", 0.0) for row in mine])),
            error=float(np.sqrt(np.mean([row.get("error", 0.0) ** 2 for row in mine]))),
        )

    def gap(
        self, program: str, policy: str, other: str, kind: str = "main", *, late: bool = True
    ) -> tuple[float, tuple[float, float]] | None:
        """Return the reduction of a policy minus that of another, with its interval; None for fewer than two trials."""
        mine = self._pairs(program, policy, TRADITIONAL, kind, late=late)
        theirs = self._pairs(program, other, TRADITIONAL, kind, late=late)
        known = {(row["kind"], row["trial"]): row["cost"] for row, _ in theirs}
        trios = [
            (row["cost"], known[row["kind"], row["trial"]], base["cost"])
            for row, base in mine
            if (row["kind"], row["trial"]) in known
        ]
        if len(trios) < 2:
            return None
        a, b, base = (np.array(side) for side in zip(*trios, strict=True))
        weights = _weights(len(trios), self._seed)
        drawn = _less(weights @ a, weights @ base) - _less(weights @ b, weights @ base)
        return float(_less(a.mean(), base.mean()) - _less(b.mean(), base.mean())), _interval(drawn)

    def share_of_error(self, policy: str, programs: Sequence[str]) -> tuple[float, tuple[float, float], Numbers] | None:
        """Return E(||d'||^2 / ||d||^2) of a policy, its interval, and all shares; ||d|| is that of full rollback."""
        pairs = [pair for program in programs for pair in self.pairs(program, policy, TRADITIONAL)]
        shares = np.array([(mine["error"] / base["error"]) ** 2 for mine, base in pairs if base["error"] > 0])
        if len(shares) < 2:
            return None
        return float(shares.mean()), _interval(_weights(len(shares), self._seed) @ shares), shares

    def pairs(self, program: str, policy: str, other: str) -> list[tuple[Row, Row]]:
        """Return pairs of rows of two policies in the same main trials, over all failures."""
        return self._pairs(program, policy, other, "main", late=False)

    def _pairs(self, program: str, policy: str, other: str, kind: str, *, late: bool) -> list[tuple[Row, Row]]:
        mine, theirs = (self._of(program, kind, name, late=late) for name in (policy, other))
        return [(row, theirs[trial]) for trial, row in mine.items() if trial in theirs]

    def _of(self, program: str, kind: str, policy: str, *, late: bool) -> dict[tuple[str, int], Row]:
        """Return the rows of a policy by trial; late failures come from the main and the additional late trials."""
        kinds = (kind, "late") if late and kind == "main" else (kind,)
        return {
            (name, trial): row
            for name in kinds
            for trial, row in self._rows.get((program, name, policy), {}).items()
            if row["late"] or not late
        }


def _is_of(program: str, families: Sequence[tuple[str, ...]]) -> bool:
    return not families or any(program.startswith(family) for family in families)


def _less(cost: NDArray[np.float64] | float, base: NDArray[np.float64] | float) -> Numbers:
    base = np.asarray(base, dtype=np.float64)
    return 1 - np.divide(cost, base, out=np.full_like(base, np.nan), where=base > 0)


def _interval(drawn: Numbers) -> tuple[float, float]:
    """Return the 95 % percentile interval over resamples; an undefined resample counts as beyond both ends."""
    silent = np.isnan(drawn)
    if not silent.any():
        low, high = np.quantile(drawn, _ENDS)
        return float(low), float(high)
    low = np.quantile(np.where(silent, -np.inf, drawn), _ENDS[0], method="lower")  # no interpolation between infinities
    high = np.quantile(np.where(silent, np.inf, drawn), _ENDS[1], method="higher")
    return float(low), float(high)


@lru_cache(maxsize=64)
def _weights(count: int, seed: int) -> Numbers:
    """Return the share of each trial in each resample; the same for all policies, so that they are paired."""
    drawn = np.random.default_rng([seed, count]).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn / count
