"""Checks the claims of the study of checkpoint cost against the measured rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from holdfast_lab.studies.base import MEASURED, SHARE, Claim, Row, decided_by, statement
from holdfast_lab.studies.stats import bootstrap, median

DERIVED = "derived from the study's subject; its text gives no number for it"
ABSTRACT = "subject of the abstract; the check is derived"
NOT_CHECKED = "not checked: no measurement decides it"
COMPRESSING = "30 times the time (22 to 39) and saved 7.3 % of the bytes"
"""Found with Chainer, the only framework that also saves the same format uncompressed, in November 2026; no longer
run."""

_COMPRESSION = statement(
    "Compressing a network's weights takes many times as long and saves little",
    DERIVED,
    found=f"{NOT_CHECKED}; recorded with Chainer, no longer run: {COMPRESSING}",
)

COPIES = {"none": 1, "momentum": 2, "adam": 3}
"""Values saved per parameter."""
_TOLERANCE = 0.02
_FEWEST = 3
"""With fewer repetitions than this, no ratio of times is judged."""
_SAME_COST = 4 / 3
"""Two costs are equal when the whole interval of their ratio lies within this factor of 1."""


def hold_claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    """Return every claim with the finding."""
    measured = [row for row in rows if row["status"] == MEASURED]
    cost = [row for row in measured if row["part"] == "cost"]
    workers = [row for row in measured if row["part"] == "workers"]
    sizes = [_size_claim(cost, optimizer, copies, seed) for optimizer, copies in COPIES.items()]
    of_workers = [_root_is_constant(workers, seed), _root_share_grows(workers, seed), _rank_bytes_grow(workers, seed)]
    return [
        *decided_by(["cost"], [*sizes, _formats_agree(cost, seed), _COMPRESSION]),
        *decided_by(["workers"], of_workers),
        *decided_by(["determinism"], [_deterministic(measured)]),
        *decided_by(["cost"], [_loads_equal(cost)]),
    ]


def _plain(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of ways that save everything, uncompressed."""
    return [row for row in rows if row["whole"] and not row["packed"]]


def _by(rows: Sequence[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def _size_claim(cost: Sequence[Row], optimizer: str, copies: int, seed: int) -> Claim:
    with_what = {"none": "without an optimizer", "momentum": "with momentum", "adam": "with Adam"}[optimizer]
    words = f"An FP32 checkpoint {with_what} has {4 * copies} bytes per parameter"
    ratios = {
        key: group[0]["bytes"] / (4 * group[0]["parameters"])
        for key, group in _by(
            [row for row in _plain(cost) if row["optimizer"] == optimizer], "framework", "way", "model"
        ).items()
    }
    claim = statement(words, DERIVED, float(copies), found=NOT_CHECKED)
    if not ratios:
        return claim
    worst = max(ratios, key=lambda key: abs(ratios[key] / copies - 1))
    off = abs(ratios[worst] / copies - 1)
    ci = bootstrap([list(ratios.values())], lambda groups: sum(groups[0]) / len(groups[0]), seed)
    return claim.judged(
        sum(ratios.values()) / len(ratios),
        off <= _TOLERANCE,
        f"mean of {len(ratios)}; farthest off: {' '.join(worst)}, by {off:.2%}",
        ci=ci,
        unit="times 4 bytes per parameter",
    )


def _formats_agree(cost: Sequence[Row], seed: int) -> Claim:
    words = "Formats without compression agree within 2 % in size"
    # Values, not parameters: frameworks disagree on which values of a norm are parameters, but not on bytes per value.
    groups = [
        group for group in _by(_plain(cost), "model", "optimizer").values() if len(_by(group, "framework", "way")) > 1
    ]
    claim = statement(words, DERIVED, _TOLERANCE, found=NOT_CHECKED)
    if not groups:
        return claim
    spreads = [max(row["bytes"] for row in group) / min(row["bytes"] for row in group) - 1 for group in groups]
    widest = groups[spreads.index(max(spreads))]
    low, high = (choose(widest, key=lambda row: row["bytes"]) for choose in (min, max))
    found = (
        f"largest spread of {len(groups)} states: {widest[0]['model']}, optimizer {widest[0]['optimizer']}: "
        f"{_name(low)} {low['bytes'] / 1e6:.2f} MB, {_name(high)} {high['bytes'] / 1e6:.2f} MB"
    )
    return claim.judged(
        max(spreads),
        max(spreads) <= _TOLERANCE,
        found,
        ci=bootstrap([spreads], lambda drawn: max(drawn[0]), seed),
        unit=SHARE,
    )


def _root_is_constant(workers: Sequence[Row], seed: int) -> Claim:
    words = "Saving at the root alone takes the same time with any number of workers"
    return _ratio_claim(
        _first_and_last(workers, "root"),
        words,
        "save_s",
        seed,
        paper=1.0,
        holds=_is_about_one,
        unit="times one worker's time",
    )


def _is_about_one(low: float, high: float) -> bool | None:
    """Return whether an interval lies around 1; None where it is too wide to decide."""
    if low >= 1 / _SAME_COST and high <= _SAME_COST:
        return True
    return False if low > 1 or high < 1 else None


def _root_share_grows(workers: Sequence[Row], seed: int) -> Claim:
    """Check the claim up to two workers, the most on two cores whose step may be shorter than one worker's."""
    pairs = [
        (one, two)
        for one, two in _first_and_last([row for row in workers if row["workers"] <= 2], "root")
        if two[0]["step_s"] < one[0]["step_s"]
    ]
    words = "The share of training time spent saving at the root grows as the step gets shorter"
    return _ratio_claim(
        pairs,
        words,
        "share_10",
        seed,
        paper=None,
        holds=lambda low, high: True if low > 1 else False if high < 1 else None,
        unit="times the share",
    )


def _rank_bytes_grow(workers: Sequence[Row], seed: int) -> Claim:
    words = "Saving at every rank multiplies the bytes by the number of workers"
    pairs = _first_and_last(workers, "rank")
    normed = [
        (one, [{**row, "bytes": row["bytes"] * one[0]["workers"] / row["workers"]} for row in many])
        for one, many in pairs
    ]
    return _ratio_claim(
        normed,
        words,
        "bytes",
        seed,
        paper=1.0,
        holds=lambda low, high: abs(low - 1) <= _TOLERANCE and abs(high - 1) <= _TOLERANCE,
        unit="times one worker's bytes times the workers",
    )


def _first_and_last(workers: Sequence[Row], scheme: str) -> list[tuple[list[Row], list[Row]]]:
    """Return, by framework, the rows of the smallest and of the largest measured number of workers."""
    pairs = []
    for group in _by([row for row in workers if row["scheme"] == scheme], "framework").values():
        counts = _by(group, "workers")
        if len(counts) > 1:
            pairs.append((counts[min(counts)], counts[max(counts)]))
    return pairs


def _ratio_claim(
    pairs: Sequence[tuple[list[Row], list[Row]]],
    words: str,
    key: str,
    seed: int,
    *,
    paper: float | None,
    holds: Callable[[float, float], bool | None],
    unit: str,
) -> Claim:
    """Judge a ratio of medians, averaged over frameworks, by a test of its interval."""
    claim = statement(words, DERIVED, paper, found=NOT_CHECKED)
    if not pairs:
        return claim
    groups = [[row[key] for row in side] for pair in pairs for side in pair]

    def ratio(drawn: Sequence[Sequence[float]]) -> float:
        ratios = [median(many) / median(one) for one, many in zip(drawn[::2], drawn[1::2], strict=True)]
        return sum(ratios) / len(ratios)

    ci = bootstrap(groups, ratio, seed)
    each = "; ".join(
        f"{one[0]['framework']} {one[0]['workers']} to {many[0]['workers']} workers: "
        f"{_median_of(many, key) / _median_of(one, key):.2f}"
        for one, many in pairs
    )
    few = key != "bytes" and min(map(len, groups)) < _FEWEST
    each += f"; fewer than {_FEWEST} repetitions are too few to decide" if few else ""
    verdict = None if few else holds(*ci)
    return claim.judged(ratio(groups), verdict, each, ci=ci, unit=unit)


def _deterministic(measured: Sequence[Row]) -> Claim:
    words = (
        "A resumed run gives the bits of an uninterrupted run if, and only if, model, optimizer, schedule, random "
        "numbers and data position are all restored"
    )
    runs = [row for row in measured if row["part"] == "determinism"]
    if not runs:
        return statement(words, ABSTRACT, found=NOT_CHECKED)
    wrong = [row for row in runs if row["same_bits"] != (row["left_out"] == "nothing")]
    whole = sum(row["left_out"] == "nothing" for row in runs)
    found = f"{whole} runs with everything restored, {len(runs) - whole} with a piece left out"
    found += "; against the claim: " + ", ".join(f"{row['framework']} {row['run']}" for row in wrong) if wrong else ""
    ours = 1 - len(wrong) / len(runs)
    return statement(words, ABSTRACT, 1.0).judged(ours, not wrong, found, unit=SHARE)


def _loads_equal(cost: Sequence[Row]) -> Claim:
    words = "Every format loads exactly what was saved"
    if not cost:
        return statement(words, DERIVED, found=NOT_CHECKED)
    wrong = sorted({_name(row) for row in cost if not row["loads_equal"]})
    states = len(_by(cost, "framework", "way", "model", "optimizer"))
    found = f"{states} states compared byte by byte" + (f"; different: {', '.join(wrong)}" if wrong else "")
    share = sum(row["loads_equal"] for row in cost) / len(cost)
    return statement(words, DERIVED, 1.0).judged(share, not wrong, found, unit=SHARE)


def _median_of(rows: Sequence[Row], key: str) -> float:
    return median([row[key] for row in rows])


def _name(row: Row) -> str:
    return f"{row['framework']} {row['way']}"
