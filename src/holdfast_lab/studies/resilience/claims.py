"""Claims about rollback, forward and restart, checked against the rows of the resilience study.

Only the abstract of the paper was available, without numbers. The expectations follow from its description of the
strategies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from holdfast_lab.studies.base import MEASURED, Claim, Row, decided_by, statement
from holdfast_lab.studies.resilience.cases import ADDITION, FAILURE, FORWARD, REPLACED, RESTART, ROLLBACK, SPREAD
from holdfast_lab.studies.resilience.jobs import TAKEN_BACK
from holdfast_lab.studies.resilience.updates import EAGER, LAZY
from holdfast_lab.studies.stats import bootstrap

_ABSTRACT = "Nicolae et al. 2022, abstract"
_READING = "Nicolae et al. 2022, our reading"

SMALL = 1.0
"""Percentage points of accuracy: a smaller loss counts as small."""
GOODPUT_PERCENT = 5.0
_RUNS = 3
"""Minimum number of real runs, or of pairs of cases, for an interval."""

BITS = {
    ROLLBACK: "Rollback is bit-identical to the failure-free training if the mini-batch keeps its size",
    RESTART: "Restart is bit-identical to the failure-free training if the mini-batch keeps its size",
    FORWARD: "Forward is bit-identical to the failure-free training if all buckets are averaged at the failure",
}
SMALL_LOSS = "Forward loses less than one point of accuracy, however many workers fail and whenever they fail"
NOT_BETTER = "Forward loses accuracy where rollback and restart lose none"
MORE = (
    "The more buckets are averaged at the failure, the less forward loses: half of the buckets against none, by "
    "distance of the weights"
)
ORDER = "Forward takes no longer than rollback"
RESTART_MORE = "Restart takes longer than rollback, at the best checkpoint interval of restart"
PLANNED = "A planned removal takes less time than a failure"
RESCALE = (
    "Dividing the gradient by the samples in the all-reduce changes the weights less than dividing by the original "
    "mini-batch size"
)
REAL_BITS = "Real processes: rollback and restart end with the sha256 of the failure-free run"
REAL_ORDER = "Real processes: forward takes no longer than rollback"
REAL_RESTART = "Real processes: restart takes longer than rollback"
MODES = "Computing all slices in one batch changes the accuracy no more than another order of the samples does"
UPDATE_SHORTER = (
    "With the overlapped optimizer (eager) a training takes less time than without (lazy), failures and undo included"
)
UPDATE_BITS = (
    "Real processes: undoing updates of the overlapped optimizer is exact: the sha256 is that of the failure-free run "
    "with lazy updates"
)
UPDATE_STEP = "Real processes: a step takes no longer with the overlapped optimizer (eager) than without (lazy)"
PREDICTED = "The simulator's goodput, with measured costs, is within 5 % of that of real processes"


def hold_claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    """Return every claim with its result."""
    cases = [row for row in rows if row["part"] == "case" and row["status"] == MEASURED]
    points = [row for row in rows if row["part"] == "point" and row["status"] == MEASURED]
    usual = [row for row in points if is_usual(row)]
    calm = [row for row in rows if row["part"] == "real" and row["status"] == MEASURED and not row["strategy"]]
    keeps = [row for row in cases if row["batch"] == "global"]
    forward = [row for row in keeps if row["strategy"] == FORWARD and row["averaged"] < 1]
    whole = [row for row in keeps if row["strategy"] == FORWARD and row["averaged"] == 1]
    trained = [
        _bits(ROLLBACK, [row for row in keeps if row["strategy"] == ROLLBACK]),
        _bits(RESTART, [row for row in keeps if row["strategy"] == RESTART]),
        _bits(FORWARD, [row for row in whole if row["rescale"] == "survivors"]),
        _small([row for row in forward if row["rescale"] == "survivors"]),
        _not_better([row for row in rows if row["part"] == "together"]),
        _ratio(MORE, _READING, _pairs(forward, _averaged(0.5), _averaged(0.0), "averaged"), "distance", seed, lambda r: r <= 1,
               by="moment"),
        _ratio(RESCALE, _READING, _pairs(forward, _rescaled("survivors"), _rescaled("original"), "rescale"), "distance", seed,
               lambda r: r <= 1),
        _ratio(ORDER, _ABSTRACT, _pairs(_spread(keeps), _nothing_averaged, _is(ROLLBACK)), "overhead_percent", seed,
               lambda r: r <= 1, all_of_them=True),
        _ratio(RESTART_MORE, _ABSTRACT, _best_restart(_spread(keeps)), "overhead_percent", seed, lambda r: r > 1,
               all_of_them=True),
        _ratio(PLANNED, _ABSTRACT, _pairs(keeps, _what(ADDITION), _what(REPLACED), "what"), "overhead_percent", seed,
               lambda r: r < 1, all_of_them=True),
    ]  # fmt: skip
    real = [
        _real_bits([row for row in points if row["update"] == LAZY]),
        _real_ratio(REAL_ORDER, _overheads(usual, FORWARD), _overheads(usual, ROLLBACK), seed, _no_longer),
        _real_ratio(REAL_RESTART, _overheads(usual, RESTART), _overheads(usual, ROLLBACK), seed,
                    lambda low, high: None if low <= 1 <= high else low > 1),
    ]  # fmt: skip
    overlapped = [
        _update_bits([row for row in points if row["update"] == EAGER and row["strategy"] in TAKEN_BACK]),
        _real_ratio(UPDATE_STEP, _steps(calm, EAGER), _steps(calm, LAZY), seed, _no_longer),
        _predicted(points),
    ]
    return [
        *decided_by(["summed up"], trained),
        *decided_by(["real"], real),
        *decided_by(["updates"], [_update_shorter([row for row in rows if row["part"] == "update"])]),
        *decided_by(["real"], overlapped),
        *decided_by(["modes"], [_modes([row for row in rows if row["part"] == "modes"])]),
    ]


# -- accuracy


def _bits(strategy: str, rows: Sequence[Row]) -> Claim:
    claim, tries = statement(BITS[strategy], _READING, 100), sum(row["seeds"] for row in rows)
    if not tries:
        return claim
    same = sum(row["same"] for row in rows)
    return claim.judged_by_count(same, tries, f"{same:,} of {tries:,} training runs, in {len(rows)} cases")


def _small(rows: Sequence[Row]) -> Claim:
    claim = statement(SMALL_LOSS, _ABSTRACT)
    if not rows:
        return claim
    worst = max(rows, key=lambda row: row["accuracy_loss"])
    holds = None
    if all(row["accuracy_loss_high"] < SMALL for row in rows):
        holds = True
    elif any(row["accuracy_loss_low"] > SMALL for row in rows):
        holds = False
    above = sum(row["accuracy_loss_low"] > 0 for row in rows)
    told = (
        f"the largest mean of {len(rows)} cases: {worst['network']}, {worst['count']} of {worst['workers']} workers "
        f"lost, {worst['moment']}. The interval is above 0 in {above} cases, "
        f"below 0 in {sum(r['accuracy_loss_high'] < 0 for r in rows)}"
    )
    ci = (worst["accuracy_loss_low"], worst["accuracy_loss_high"])
    return claim.judged(worst["accuracy_loss"], holds, told, ci=ci, unit="points")


def is_lossy(row: Row) -> bool:
    """Return whether a case loses samples that rollback and restart would keep, with a mini-batch of constant size."""
    is_forward = row["strategy"] == FORWARD and row["what"] == FAILURE and row["averaged"] < 1
    return bool(is_forward and (row["batch"], row["rescale"]) == ("global", "survivors"))


def _not_better(rows: Sequence[Row]) -> Claim:
    claim = statement(NOT_BETTER, _READING)
    if not rows:
        return claim
    ours, low, high = _mean_of(rows, "accuracy_loss")
    holds = True if low > 0 else False if high < 0 else None
    more, more_low, more_high = _mean_of(rows, "loss_more")
    told = (
        f"mean of {sum(row['cases'] for row in rows):,} cases, {len(rows)} networks. "
        f"The test loss is {more:.2g} [{more_low:.2g}, {more_high:.2g}] higher"
    )
    return claim.judged(ours, holds, told, ci=(low, high), unit="points")


def _mean_of(rows: Sequence[Row], name: str) -> tuple[float, float, float]:
    """Return the mean of a column over the networks, which are independent of each other, and its interval."""
    mean = statistics.fmean(row[name] for row in rows)
    half = math.hypot(*((row[f"{name}_high"] - row[f"{name}_low"]) / 2 for row in rows)) / len(rows)
    return mean, mean - half, mean + half


# -- comparison of two cases

_Chosen = Callable[[Row], bool]
_ALIKE = ("network", "workers", "count", "moment", "rescale", "averaged", "what")


def _is(strategy: str) -> _Chosen:
    return lambda row: row["strategy"] == strategy


def _what(what: str) -> _Chosen:
    return lambda row: row["what"] == what


def _averaged(share: float) -> _Chosen:
    return lambda row: row["averaged"] == share


def _rescaled(rescale: str) -> _Chosen:
    return lambda row: row["rescale"] == rescale


def _nothing_averaged(row: Row) -> bool:
    return bool(row["strategy"] == FORWARD and row["averaged"] == 0)


def _spread(rows: Sequence[Row]) -> list[Row]:
    return [
        row for row in rows if row["moment"] == SPREAD and row["what"] == "failure" and row["rescale"] == "survivors"
    ]


def _pairs(rows: Sequence[Row], one: _Chosen, other: _Chosen, but: str = "") -> list[tuple[Row, Row]]:
    """Return pairs of rows, selected by ``one`` and by ``other``, that agree in all columns except ``but``."""
    first, second = [row for row in rows if one(row)], [row for row in rows if other(row)]
    names = [name for name in _ALIKE if name != but]
    found = {tuple(row[name] for name in names): row for row in second}
    return [(row, match) for row in first if (match := found.get(tuple(row[name] for name in names)))]


def _best_restart(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of restart at the checkpoint interval with the least overhead, and rollback."""
    pairs: dict[tuple[str, int, int], tuple[Row, Row]] = {}
    for restart, rollback in _pairs(rows, _is(RESTART), _is(ROLLBACK)):
        place = (restart["network"], restart["workers"], restart["count"])
        if place not in pairs or restart["overhead_percent"] < pairs[place][0]["overhead_percent"]:
            pairs[place] = restart, rollback
    return list(pairs.values())


def _ratio(
    words: str,
    source: str,
    pairs: Sequence[tuple[Row, Row]],
    name: str,
    seed: int,
    is_so: Callable[[float], bool],
    *,
    all_of_them: bool = False,
    by: str = "",
) -> Claim:
    """Return a claim about the ratio of a column: its median over pairs of cases, or every pair with ``all_of_them``.

    With ``by``, the result also lists the median of each group of that column.
    """
    pairs = [(one, other) for one, other in pairs if other[name]]
    ratios = [one[name] / other[name] for one, other in pairs]
    claim = statement(words, source)
    if not ratios:
        return claim
    ci = None if len(ratios) < _RUNS else bootstrap([ratios], lambda groups: statistics.median(groups[0]), seed)
    ours, holding = statistics.median(ratios), sum(map(is_so, ratios))
    holds: bool | None = holding == len(ratios)
    if not all_of_them:
        holds = is_so(ours) if ci is not None and is_so(ci[0]) == is_so(ci[1]) else None
    told = f"median of {len(ratios)} pairs of cases, {min(ratios):.3g} to {max(ratios):.3g}; true in {holding} pairs"
    if by:
        groups: dict[str, list[float]] = {}
        for (one, _), ratio in zip(pairs, ratios, strict=True):
            groups.setdefault(one[by], []).append(ratio)
        told += "; " + ", ".join(f"{group} {statistics.median(some):.3g}" for group, some in groups.items())
    return claim.judged(ours, holds, told, ci=ci)


# -- real processes


def _real_bits(points: Sequence[Row]) -> Claim:
    mine = [row for row in points if row["strategy"] in (ROLLBACK, RESTART)]
    if not mine:
        return statement(REAL_BITS, _READING)
    same = sum(row["same"] for row in mine)
    told = f"{same} of {len(mine)} runs, with one of four workers killed in each"
    return statement(REAL_BITS, _READING, 100).judged_by_count(same, len(mine), told)


def is_usual(row: Row) -> bool:
    """Return whether a run belongs to the comparison of strategies, not only to the comparison of optimizer updates."""
    return bool(row["update"] == LAZY and (row["strategy"] == FORWARD or not row["averaged"]))


def _overheads(points: Sequence[Row], strategy: str) -> list[float]:
    return [row["overhead_percent"] for row in points if row["strategy"] == strategy]


def _steps(runs: Sequence[Row], update: str) -> list[float]:
    return [row["step_s"] for row in runs if row.get("update", LAZY) == update]


def _no_longer(low: float, high: float) -> bool | None:
    return None if low <= 1 < high else high <= 1


def _real_ratio(
    words: str, mine: Sequence[float], base: Sequence[float], seed: int, judge: Callable[[float, float], bool | None]
) -> Claim:
    claim = statement(words, _ABSTRACT)
    if not mine or not base:
        return claim
    ours = statistics.median(mine) / statistics.median(base)
    if min(len(mine), len(base)) < _RUNS:
        told = f"ratio of medians; fewer than {_RUNS} runs of each"
        return claim.judged(ours, None, told)
    low, high = bootstrap([mine, base], lambda g: statistics.median(g[0]) / statistics.median(g[1]), seed)
    told = f"ratio of medians of {len(mine)} and {len(base)} runs"
    return claim.judged(ours, judge(low, high), told, ci=(low, high))


def _update_shorter(rows: Sequence[Row]) -> Claim:
    claim = statement(UPDATE_SHORTER, _ABSTRACT)
    if not rows:
        return claim
    ratios = [row["eager_s"] / row["lazy_s"] for row in rows]
    told = (
        f"simulated: median of {len(rows)} cases, {min(ratios):.4g} to {max(ratios):.4g}; "
        f"undo takes at most {1000 * max(row['undo_s'] for row in rows):.3g} ms of a training"
    )
    return claim.judged(statistics.median(ratios), max(ratios) < 1, told)


def _update_bits(points: Sequence[Row]) -> Claim:
    if not points:
        return statement(UPDATE_BITS, _READING)
    same = sum(row["same"] for row in points)
    told = f"{same} of {len(points)} runs, with the updates of {sum(row['undone'] for row in points)} buckets undone"
    holds = all(row["same"] and row["undone"] for row in points)
    return statement(UPDATE_BITS, _READING, 100).judged_by_count(same, len(points), told, holds)


def _predicted(points: Sequence[Row]) -> Claim:
    by_name: dict[str, list[Row]] = {}
    for row in points:
        by_name.setdefault(row["happens"], []).append(row)
    claim = statement(PREDICTED, "docs/explanation/simulation.md", GOODPUT_PERCENT)
    if not by_name:
        return claim
    off = {}
    for name, rows in by_name.items():
        measured, said = (statistics.median(r[key] for r in rows) for key in ("overhead_percent", "predicted_percent"))
        off[name] = 100 * abs((100 + measured) / (100 + said) - 1)
    worst = max(off, key=off.__getitem__)
    told = f"the largest error of {len(off)} points: {worst}"
    if enough := min(map(len, by_name.values())) >= _RUNS:
        told += f"; medians of {len(points) // len(off)} runs, with costs measured in the other runs"
    holds = off[worst] <= GOODPUT_PERCENT if enough else None
    return claim.judged(off[worst], holds, told, unit="%")


def _modes(rows: Sequence[Row]) -> Claim:
    claim = statement(MODES, "docs/papers/resilience.md")
    if not rows:
        return claim
    worst = max(rows, key=lambda row: row["accuracy_apart"])
    ci = (worst["accuracy_more_low"], worst["accuracy_more_high"])
    told = (
        f"the largest difference of {worst['seeds']} seeds, {worst['variant']}; another order: "
        f"{worst['accuracy_usual']:.3g}. The mean difference is {worst['accuracy_more']:.3g} [{ci[0]:.3g}, {ci[1]:.3g}]"
    )
    holds = all(row["accuracy_apart"] <= row["accuracy_usual"] for row in rows)
    ours = worst["accuracy_apart"]
    return claim.judged(ours, holds, told, unit="points")
