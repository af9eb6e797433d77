"""How the study of the guard shows its rows: what was found and healed, within how many steps, at what cost."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.guard.setup import WEIGHTS
from holdfast_lab.studies.sections import Section, intervals, milliseconds, not_run, number, points, table, text
from holdfast_lab.studies.stats import wilson

_READ = (
    "Harmful: the training's class changed (accuracy more than 5 points below the undisturbed one, at the worker that is worst off; NaN; it failed) where no "
    "guard was. Healed: the same flip, with --guard heal, and all workers ended with the bits of the undisturbed run, weights and optimizer's state. "
    "The critical bit is drawn more often than it would come, so counts are no rates; 95 % intervals (Wilson)."
)
_LAW = (
    "Share of flips that are harmful where every bit of every value is as likely, in percent: parts of the bits are weighted by how many "
    "they are. Intervals put together as Zou and Donner do (2008)."
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
        "Harmful flips that were found and healed",
        _READ,
        kinds,
        by=["target"],
        series=["training", "length"],
        x=["healed_percent", "healed to the bits of the undisturbed run, % of harmful flips"],
        interval=["healed_low", "healed_high"],
        limits=[-2, 102],
    )


def _coverage(kinds: Sequence[Row]) -> Section:
    return table(
        "coverage",
        "Coverage",
        "Within: steps until half of those that were found were, 99 of 100, and all; 1: in the step that it struck in. By range: found by its size, not by comparison.",
        kinds,
        by=["target", "training", "length"],
        columns=[
            number("trials", "flips"),
            number("harmful"),
            number("found"),
            text("healed_shown", "healed, %"),
            text("within", "within steps"),
            number("by_range"),
            number("redone_steps", "steps redone"),
        ],
    )


def _any_flip(kinds: Sequence[Row]) -> Section:
    return table(
        "any-flip",
        "What any flip does without the guard, and what the guard makes of those without harm",
        _LAW,
        kinds,
        by=["target", "training", "length"],
        columns=[
            text("harmful_shown", "harmful, %"),
            text("differs_shown", "bits differ in the end, % of those drawn"),
            number("others", "without harm, tried"),
            number("others_found", "found"),
            number("others_healed", "same bits in the end"),
        ],
    )


def _accuracy(kinds: Sequence[Row]) -> Section:
    return table(
        "accuracy",
        "Accuracy after a harmful flip, without the guard and with it",
        "Means over harmful flips, of the worker that is worst off.",
        [row for row in kinds if row["harmful"]],
        by=["target", "training", "length"],
        columns=[
            number("harmful", "flips"),
            number("accuracy", "without"),
            number("accuracy_guarded", "with"),
            number("undisturbed"),
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
        "Bit by bit, in weights",
        "All trainings together; bits are counted from the least significant one, and 30 is the critical one.",
        [_changed(guard, bit, *counts) for (guard, bit), counts in sorted(found.items(), reverse=True)],
        series=["guard"],
        x=["bit", "bit"],
        y=["changed_percent", "trainings whose class changed, %"],
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
        "Harmful flips that were not healed, the first of each kind",
        "",
        [row | {"found_by": row["found_by"] or "nothing"} for row in rows if row["part"] == "missed"],
        by=["target", "training", "path", "rank"],
        columns=[text(name, name.replace("_", " ")) for name in names],
    )


def _clean(rows: Sequence[Row]) -> Section:
    return table(
        "clean",
        "Trainings that nothing strikes, with --guard heal",
        "From new weights, each with a seed of its own.",
        [row | {"alarms_shown": str(row["alarms"])} for row in rows if row["part"] == "clean"],
        by=["training"],
        columns=[number("runs", "trainings"), number("steps"), text("alarms_shown", "alarms")],
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
        "What a step costs while nothing is wrong",
        "Two processes; variants take turns, and the ratio is taken within each round; 95 % intervals by bootstrap of the median. Busy machines tell nothing.",
        shown,
        by=["training", "guard"],
        columns=[
            milliseconds("step_s", "step"),
            text("against", "times that without"),
            text("more", "more, us"),
            number("blocks", "rounds"),
        ],
    )
