"""Checks the papers' claims on soft errors in training against the measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast_lab.studies.base import MEASURED, Claim, Row, decided_by, statement
from holdfast_lab.studies.soft_errors.cells import (
    BIT_BY_BIT,
    CROSSED,
    EXPERIMENTS,
    FORMATS_TRIED,
    NETWORKS,
    PROPAGATION,
    QUICK,
    WIDTHS,
)
from holdfast_lab.studies.soft_errors.setup import ALL, BELOW, CRITICAL, MODEL, OPTIMIZER, PLATFORMS
from holdfast_lab.studies.stats import bootstrap, wilson

CLUSTER = "abstract, CLUSTER 2021"
SBAC = "abstract, SBAC-PAD 2022"
SECOND = "second hand, JPDC 2024"
DERIVED = "derived"
OURS = "ours"

_ABSORBED = 95.0
"""Flips count as absorbed if at least this percentage of trainings ends unchanged (RWC)."""
_CRITICAL_BITS = {"float16": 14, "bfloat16": 14, "float32": 30, "float64": 62}
_DOZENS = (10, 100)
_MANY = (500, 1000)

MORE_SENSITIVE = "The model is more sensitive than the optimizer"
ALL_COLLAPSE = "With 500 or more flips every run ends in NaN"
CRITICAL_BIT = "No bit does as much harm as the critical one"
ONE_DECIDES = "The critical bit decides: 100 flips below it do less harm than one flip of it"

Counted = tuple[int, int]
"""(trials with the property, all trials)."""


def hold_claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    """Return every claim with the finding."""
    cells = [row for row in rows if row["part"] == "cell" and row["status"] == MEASURED]
    ran = [platform for platform in PLATFORMS if any(row["platform"] == platform for row in cells)]
    of_cells = [
        *[claim for trained in _trained(cells) for claim in _absorbed(cells, *trained)],
        *_of_each(MORE_SENSITIVE, SBAC, [_more_sensitive(cells, platform, seed) for platform in ran]),
        *_of_each(ALL_COLLAPSE, SECOND, [_all_collapse(cells, platform) for platform in ran]),
        *_of_each(CRITICAL_BIT, SECOND, [_critical_bit(cells, width) for width in WIDTHS]),
        *_of_each(ONE_DECIDES, SECOND, [_critical_against_below(cells, width) for width in WIDTHS]),
        _propagation(rows),
    ]
    return [
        *decided_by(["cell", QUICK, *EXPERIMENTS], of_cells),
        *[_alone(row) for row in rows if row["part"] == "alone"],
        statement(
            "Horovod is slightly more resilient than DDP",
            SBAC,
            found="not tested: Horovod is not among the platforms here",
        ),
    ]


def _of_each(words: str, source: str, claims: Sequence[Claim | None]) -> list[Claim]:
    """Return the claims that were checked, or one unchecked statement if there are none."""
    checked = [claim for claim in claims if claim is not None]
    return checked or [statement(words, source)]


# -- cells


def counted(cells: Iterable[Row], column: str = "harmed", **wanted: Any) -> Counted:
    """Count trials with ``column`` set, over cells that match ``wanted`` (a tuple matches any of its values)."""
    chosen = [row for row in cells if all(_fits(row[name], value) for name, value in wanted.items())]
    return sum(row[column] for row in chosen), sum(row["trials"] for row in chosen)


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, tuple) else value == wanted


_BASIC: Mapping[str, Any] = {"experiment": (QUICK, CROSSED, NETWORKS), "target": MODEL, "altered": 1}
"""Filter of the cells that claims about one altered process use."""


def _percent(counted: Counted) -> tuple[float, tuple[float, float]]:
    share, ends = counted[0] / counted[1], wilson(*counted)
    return 100 * share, (100 * ends[0], 100 * ends[1])


def _show(counted: Counted) -> str:
    share, (low, high) = _percent(counted)
    return f"{share:.1f} % [{low:.1f}, {high:.1f}] of {counted[1]}"


# -- claims


def _trained(cells: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the (platform, network, dataset) combinations that were run."""
    mine = (row for row in cells if row["experiment"] in _BASIC["experiment"])
    return list(dict.fromkeys((row["platform"], row["network"], row["dataset"]) for row in mine))


def _absorbed(cells: Sequence[Row], platform: str, network: str, dataset: str) -> list[Claim]:
    """Return both halves of the first claim for one combination."""
    wanted = {**_BASIC, "platform": platform, "network": network, "dataset": dataset}
    below = counted(cells, "RWC", bits=BELOW, flips=_DOZENS, **wanted)
    hit = counted(cells, bits=CRITICAL, flips=1, **wanted)
    where = f"{platform}, {network} on {dataset}"
    claims = []
    if below[1]:
        ours, ci = _percent(below)
        claim = statement(f"Dozens of flips are absorbed unless they hit the critical bit: {where}", CLUSTER, _ABSORBED)
        holds = True if ci[0] >= _ABSORBED else False if ci[1] < _ABSORBED else None
        told = f"of trainings unchanged by dozens of flips (10 or 100) below the critical bit in one process's model; the claim needs {_ABSORBED:.0f}"
        claims.append(claim.judged(ours, holds, told, ci=ci, unit="%"))
    if below[1] and hit[1]:
        ours, ci = _percent(hit)
        other = below[1] - below[0], below[1]
        claim = statement(f"One flip of the critical bit does more harm than dozens below it: {where}", CLUSTER)
        told = f"of trainings changed; with flips below it {_show(other)}"
        claims.append(claim.judged(ours, _above(hit, other), told, ci=ci, unit="%"))
    return claims


def _above(first: Counted, second: Counted) -> bool | None:
    """Return whether the first share is above the second; None if their intervals overlap."""
    mine, theirs = wilson(*first), wilson(*second)
    return True if mine[0] > theirs[1] else False if mine[1] < theirs[0] else None


def _more_sensitive(cells: Sequence[Row], platform: str, seed: int) -> Claim | None:
    names = ("altered", "flips", "bits")
    of_target: dict[str, dict[tuple[Any, ...], Counted]] = {MODEL: {}, OPTIMIZER: {}}
    for row in cells:
        if row["experiment"] == CROSSED and row["platform"] == platform:
            of_target[row["target"]][tuple(row[name] for name in names)] = (row["harmed"], row["trials"])
    pairs = [
        (of_target[MODEL][key], of_target[OPTIMIZER][key]) for key in of_target[MODEL] if key in of_target[OPTIMIZER]
    ]
    if not pairs:
        return None
    differences = [100 * (m / n - o / k) for (m, n), (o, k) in pairs]
    ci = bootstrap([differences], lambda drawn: sum(drawn[0]) / len(drawn[0]), seed)
    ours = sum(differences) / len(differences)
    return statement(f"{MORE_SENSITIVE}: {platform}", SBAC).judged(
        ours,
        True if ci[0] > 0 else False if ci[1] < 0 else None,
        f"more trainings changed, mean over {len(pairs)} pairs of settings; the interval resamples the pairs",
        ci=ci,
        unit="points",
        runs=len(pairs),
    )


def _all_collapse(cells: Sequence[Row], platform: str) -> Claim | None:
    found = counted(cells, "NaN", platform=platform, bits=ALL, flips=_MANY, experiment=CROSSED, target=MODEL)
    if not found[1]:
        return None
    ours, ci = _percent(found)
    optimizer = counted(cells, "NaN", platform=platform, bits=ALL, flips=_MANY, experiment=CROSSED, target=OPTIMIZER)
    told = "of trainings, with 500 or 1000 flips of any bits in the model of one, half or all processes"
    told += f"; in the optimizer {_show(optimizer)}" if optimizer[1] else ""
    words = f"{ALL_COLLAPSE}: {platform}"
    return statement(words, SECOND, 100.0).judged(ours, found[0] == found[1], told, ci=ci, unit="%")


def _critical_bit(cells: Sequence[Row], width: str) -> Claim | None:
    expected = _CRITICAL_BITS[width]
    curve = {
        int(row["bits"]): (row["harmed"], row["trials"])
        for row in cells
        if row["experiment"] == BIT_BY_BIT and row["dtype"] == width
    }
    if expected not in curve or len(curve) < 2:
        return None
    others = {bit: count for bit, count in curve.items() if bit != expected}
    second = max(others, key=lambda bit: others[bit][0] / others[bit][1])
    worst = max(curve, key=lambda bit: curve[bit][0] / curve[bit][1])
    told = f"the bit whose flip changed the most trainings; bit {expected}: {_show(curve[expected])}; highest of all other bits, bit {second}: {_show(others[second])}"
    return statement(
        f"{CRITICAL_BIT}, bit {expected} of {width}", DERIVED if width == "bfloat16" else SECOND, expected
    ).judged(worst, _above(curve[expected], others[second]), told)


def _critical_against_below(cells: Sequence[Row], width: str) -> Claim | None:
    wanted = {"experiment": FORMATS_TRIED, "dtype": width, "format": ""}
    hit = counted(cells, flips=1, bits=CRITICAL, **wanted)
    below = counted(cells, flips=100, bits=BELOW, **wanted)
    if not (hit[1] and below[1]):
        return None
    ours, ci = _percent(hit)
    told = f"of trainings in {width} changed; with 100 flips below it {_show(below)}"
    words = f"{ONE_DECIDES}: {width}"
    return statement(words, SECOND).judged(ours, _above(hit, below), told, ci=ci, unit="%")


def _propagation(rows: Sequence[Row]) -> Claim:
    words = "Flips in one process spread to the others: after the last epoch rank 0's layers differ, whichever rank was altered"
    found = [
        row["norm"]
        for row in rows
        if row["part"] == "error"
        and (row["experiment"], row["whose"], row["draws"]) == (PROPAGATION, "rank 0", "same")
        and row["norm"] is not None
    ]
    claim = statement(words, f"{SECOND}; in our words")
    if not found:
        return claim
    return claim.judged(
        min(found),
        min(found) > 0,
        f"the smallest of {len(found)} layers: norm of the difference over norm of the undisturbed weights, median "
        "over trials",
    )


def _alone(row: Row) -> Claim:
    alone = f"{row['harmed_alone_percent']:.1f} % [{row['harmed_alone_low']:.1f}, {row['harmed_alone_high']:.1f}]"
    difference = f"; {row['first_difference']}" if row["first_difference"] else ""
    return statement(
        "A training resumed from a warm group and one in fresh processes give bit-identical results", OURS, 100.0
    ).judged(
        100 * row["equal"] / row["trials"],
        row["equal"] == row["trials"],
        f"of {row['trials']} trainings; {row['harmed_percent']:.1f} % changed, in fresh processes {alone}{difference}",
        unit="%",
    )
