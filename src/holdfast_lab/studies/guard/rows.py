"""Rows of the guard study: for each kind of bit flip, its effect without the guard and with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.campaign_plan import Cell
from holdfast_lab.studies.guard.setup import STRATA, GuardSetup, of_settings
from holdfast_lab.studies.outcomes import RWC
from holdfast_lab.studies.stats import wilson

_MISSES = 20
"""Maximum number of flips that were not healed to list."""
_OF_A_MISS = (
    *("bit", "path", "before", "after", "step", "rank", "outcome", "accuracy"),
    *("found", "found_by", "within", "outcome_guarded", "accuracy_guarded", "error_guarded"),
)


def kind_row(settings: Mapping[str, Any], strata: Mapping[str, Sequence[Row]]) -> Row:
    """Return the row of one target in one training.

    Args:
        settings: Settings of one of its cells.
        strata: Trials by stratum of bits; see :data:`~holdfast_lab.studies.guard.setup.STRATA`.
    """
    trials = [row for rows in strata.values() for row in rows]
    harmful = [row for row in trials if is_harmful(row)]
    others = [row for row in trials if not is_harmful(row) and "tried" in row]
    row: Row = {"part": "kind", "status": MEASURED, **_about(settings), "trials": len(trials)}
    row |= {"harmful": len(harmful), "found": _count(harmful, "found"), "healed": _count(harmful, "healed")}
    row |= _share_of("found", harmful) | _share_of("healed", harmful)
    row |= _share_of("differs", trials)
    if len(strata) == len(STRATA):
        known = {bits: (sum(map(is_harmful, rows)), len(rows)) for bits, rows in strata.items()}
        share, low, high = weighted(known)
        row |= {"harmful_percent": 100 * share, "harmful_low": 100 * low, "harmful_high": 100 * high}
    row |= _within(harmful) | {"by_range": sum(one.get("found_by") == "range" for one in harmful)}
    row |= {"others": len(others), "others_found": _count(others, "found"), "others_healed": _count(others, "healed")}
    if harmful:
        row |= {
            "accuracy": statistics.fmean(one["accuracy"] for one in harmful),
            "accuracy_guarded": statistics.fmean(one["accuracy_guarded"] for one in harmful),
            "redone_steps": statistics.fmean(one["redone_steps"] for one in harmful),
        }
    row["undisturbed"] = next((one["undisturbed"] for one in trials), None)
    return row


def weighted(known: Mapping[str, tuple[int, int]]) -> tuple[float, float, float]:
    """Return a share over flips of any bit, all bits equally likely, and its 95 % interval.

    Args:
        known: For each stratum of bits, the number of hits and of tries.

    Source:
        G. Y. Zou, A. Donner, "Construction of confidence limits about effect measures: a general approach", Statistics
        in Medicine 27, 2008: the distances to the ends of the parts' intervals (Wilson) add up like standard
        deviations.
    """
    share = below = above = 0.0
    for bits, (count, tries) in known.items():
        part, (low, high) = count / tries, wilson(count, tries)
        share += STRATA[bits] * part
        below += (STRATA[bits] * (part - low)) ** 2
        above += (STRATA[bits] * (high - part)) ** 2
    return share, max(0.0, share - math.sqrt(below)), min(1.0, share + math.sqrt(above))


def bit_rows(settings: Mapping[str, Any], trials: Iterable[Row]) -> list[Row]:
    """Return for each flipped bit of weights the number of runs with a changed class, without and with the guard."""
    by_bit: dict[int, list[Row]] = {}
    for one in trials:
        by_bit.setdefault(one["bit"], []).append(one)
    rows: list[Row] = []
    for bit, mine in sorted(by_bit.items()):
        row: Row = {"part": "bit", "status": MEASURED, **_about(settings), "bit": bit, "trials": len(mine)}
        changed = {
            "without": sum(map(is_harmful, mine)),
            "with": sum(one.get("outcome_guarded", RWC) != RWC for one in mine),
        }
        for guard, count in changed.items():
            rows.append(row | {"guard": f"{guard} the guard", "changed": count})
    return rows


def missed_rows(trials: Iterable[Row]) -> list[Row]:
    """Return the first harmful flips whose run did not end bit-identical to the fault-free run."""
    missed = [row for row in trials if is_harmful(row) and not row["healed"]]
    return [
        {"part": "missed", "status": MEASURED, **_about(row), **{name: row.get(name) for name in _OF_A_MISS}}
        for row in missed[:_MISSES]
    ]


def clean_row(cell: Cell, runs: Sequence[Row]) -> Row:
    """Return the number of false alarms in clean training runs."""
    return {
        "part": "clean",
        "status": MEASURED,
        **_about(cell.settings),
        "runs": len(runs),
        "steps": sum(row.get("steps", 0) for row in runs),
        "alarms": sum(row.get("alarms", 0) for row in runs),
        "failed": sum("error" in row for row in runs),
        "found": [finding for row in runs for finding in row.get("found", ())][:_MISSES],
    }


def is_harmful(row: Row) -> bool:
    """Return whether a flip changed the outcome class of the training without the guard."""
    return bool(row["outcome"] != RWC)


def _count(rows: Iterable[Row], name: str) -> int:
    return sum(bool(row[name]) for row in rows)


def _share_of(name: str, rows: Sequence[Row]) -> Row:
    if not rows:
        return {}
    count = _count(rows, name)
    low, high = wilson(count, len(rows))
    share = {"percent": count / len(rows), "low": low, "high": high}
    return {f"{name}_{key}": 100 * value for key, value in share.items()}


def _within(harmful: Iterable[Row]) -> Row:
    """Return the number of steps until half, 99 % and all of the detected flips were detected."""
    steps = sorted(row["within"] for row in harmful if row.get("found"))
    if not steps:
        return {}
    at = {"half": 0.5, "most": 0.99, "all": 1.0}
    return {f"within_{name}": steps[math.ceil(share * len(steps)) - 1] for name, share in at.items()}


def _about(settings: Mapping[str, Any]) -> Row:
    setup: GuardSetup = of_settings(GuardSetup, settings)
    about: Row = {"training": setup.name, "network": setup.network, "optimizer": setup.optimizer}
    about |= {"workers": setup.workers, "size": setup.size, "sums": setup.sums, "epochs": setup.epochs}
    return about | ({"target": settings["target"]} if "target" in settings else {})
