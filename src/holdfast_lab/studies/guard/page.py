"""The page of the guard study: detected and healed flips, detection latency in steps, and cost."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.guard.setup import WEIGHTS
from holdfast_lab.studies.sections import Section, intervals, milliseconds, not_run, number, points, table, text
from holdfast_lab.studies.stats import wilson

_READ = (
    "Harmful: without the guard the flip changes the outcome class of the training (accuracy of the worst worker more "
    "than 5 points below the fault-free run, NaN, or failure). Healed: with --guard heal and the same flip, all "
    "workers end with weights and optimizer state bit-identical to the fault-free run. The critical bit is "
    "over-sampled, so counts are not rates; 95 % intervals (Wilson)."
)
_LAW = (
    "Share of harmful flips if every bit of every value is equally likely, in percent: groups of bits are weighted by "
    "their number of bits. Intervals are combined by the method of Zou and Donner (2008)."
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    kinds = [_shown(row) for row in rows if row["part"] == "kind" and row["status"] == MEASURED]
    return [
        _coverage_picture(kinds),
        _coverage(kinds),
        _any_flip(kinds),
        _accuracy(kinds),
        _bits(rows),
        _missed(rows),
        _clean(rows),
        _cost(rows),
        not_run(["part", "training", "target"], rows),
    ]


def _shown(row: Row) -> Row:
    shown = {f"{name}_shown": _share(row, name) for name in ("found", "healed", "differs", "harmful")}
    found = {name: row.get(f"within_{name}") for name in ("half", "most", "all")}
    if found["all"] is not None:
        shown["within"] = " / ".join(str(found[name]) for name in ("half", "most", "all"))
    length = f"{row['epochs']} epoch{'s' if row['epochs'] > 1 else ''}"
    return row | {"length": length} | {name: text for name, text in shown.items() if text}


def _share(row: Row, name: str) -> str:
    if row.get(f"{name}_percent") is None:
        return ""
    share, low, high = (row[f"{name}_{key}"] for key in ("percent", "low", "high"))
    return f"{share:.4g} [{low:.4g}, {high:.4g}]".replace(" ", "\N{NO-BREAK SPACE}")


def _coverage_picture(kinds: Sequence[Row]) -> Section:
    return intervals(
        "coverage-picture",
        "Healed share of harmful bit flips",
        _READ,
        kinds,
        by=["target"],
        series=["training", "length"],
        x=["healed_percent", "healed (bit-identical to the fault-free run), % of harmful flips"],
        interval=["healed_low", "healed_high"],
        limits=[-2, 102],
    )


def _coverage(kinds: Sequence[Row]) -> Section:
    return table(
        "coverage",
        "Coverage",
        "Within: steps until half, 99 % and all of the detected flips were detected; 1: in the step of the flip. By "
        "range: detected by the range check, not by comparing replicas.",
        kinds,
        by=["target", "training", "length"],
        columns=[
            number("trials", "flips"),
            number("harmful"),
            number("found", "detected"),
            text("healed_shown", "healed, %"),
            text("within", "within steps"),
            number("by_range"),
            number("redone_steps", "steps replayed"),
        ],
    )


def _any_flip(kinds: Sequence[Row]) -> Section:
    return table(
        "any-flip",
        "Effect of any bit flip without the guard, and of the guard on harmless flips",
        _LAW,
        kinds,
        by=["target", "training", "length"],
        columns=[
            text("harmful_shown", "harmful, %"),
            text("differs_shown", "final bits differ, % of flips drawn"),
            number("others", "harmless, tried"),
            number("others_found", "detected"),
            number("others_healed", "final bits same"),
        ],
    )


def _accuracy(kinds: Sequence[Row]) -> Section:
    return table(
        "accuracy",
        "Accuracy after a harmful bit flip, without and with the guard",
        "Means over harmful flips, of the worker with the lowest accuracy.",
        [row for row in kinds if row["harmful"]],
        by=["target", "training", "length"],
        columns=[
            number("harmful", "flips"),
            number("accuracy", "without"),
            number("accuracy_guarded", "with"),
            number("undisturbed", "fault-free"),
        ],
    )


def _bits(rows: Sequence[Row]) -> Section:
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        if row["part"] == "bit" and row["target"] == WEIGHTS:
            counts = found.setdefault((row["guard"], row["bit"]), [0, 0])
            counts[0], counts[1] = counts[0] + row["changed"], counts[1] + row["trials"]
    return points(
        "bits",
        "Effect by bit position, in weights",
        "All training runs together; bits are numbered from the least significant one, and 30 is the critical one.",
        [_changed(guard, bit, *counts) for (guard, bit), counts in sorted(found.items(), reverse=True)],
        series=["guard"],
        x=["bit", "bit"],
        y=["changed_percent", "training runs with changed outcome class, %"],
        interval=["changed_low", "changed_high"],
        limits=[-2, 102],
    )


def _changed(guard: str, bit: int, count: int, trials: int) -> Row:
    low, high = wilson(count, trials)
    ends = {"changed_low": 100 * low, "changed_high": 100 * high}
    return {"guard": guard, "bit": bit, "changed_percent": 100 * count / trials, **ends}


def _missed(rows: Sequence[Row]) -> Section:
    names = ["step", "bit", "before", "after", "outcome", "outcome_guarded", "found_by", "within", "error_guarded"]
    return table(
        "missed",
        "Harmful bit flips that were not healed, the first of each kind",
        "",
        [row | {"found_by": row["found_by"] or "nothing"} for row in rows if row["part"] == "missed"],
        by=["target", "training", "path", "rank"],
        columns=[text(name, name.replace("_", " ")) for name in names],
    )


def _clean(rows: Sequence[Row]) -> Section:
    return table(
        "clean",
        "Clean training runs with --guard heal",
        "Each from new weights with its own seed.",
        [row | {"alarms_shown": str(row["alarms"])} for row in rows if row["part"] == "clean"],
        by=["training"],
        columns=[number("runs", "training runs"), number("steps"), text("alarms_shown", "false alarms")],
    )


def _cost(rows: Sequence[Row]) -> Section:
    timed = [row for row in rows if row["part"] == "cost" and row["status"] == MEASURED]
    shown = [
        row
        | {"against": f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"}
        | {"more": f"{1e6 * row['more_s']:,.0f}"}
        for row in timed
    ]
    return table(
        "cost",
        "Cost of a clean step",
        "Two processes; variants take turns, and ratios are taken within each round; 95 % intervals by bootstrap of "
        "the median. Results from a busy machine mean nothing.",
        shown,
        by=["training", "guard"],
        columns=[
            milliseconds("step_s", "step"),
            text("against", "ratio to no guard"),
            text("more", "extra, us"),
            number("blocks", "rounds"),
        ],
    )
