"""Report sections of the soft-error study: outcome shares with intervals, a curve over bit positions, errors by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_lab.pages.rows import row_id
from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.outcomes import OUTCOMES
from holdfast_lab.studies.sections import Section, bars, intervals, not_run, number, points, table, text
from holdfast_lab.studies.soft_errors.cells import (
    BIT_BY_BIT,
    BURSTS,
    COUNTS,
    CROSSED,
    FORMATS_TRIED,
    LAYERS,
    NETWORKS,
    PROPAGATION,
    QUICK,
)

AXIS = "trainings that changed (AccR, NaN or TF), %"
_READ = (
    "Harmed: outcomes other than RWC, judged by the worst altered process; 95 % intervals (Wilson). By rank 0 and by "
    "the mean: the same share judged by rank 0's accuracy, or by the mean accuracy."
)
_PLACE = ("experiment", "platform", "network", "dtype", "processes")
_TITLES = {
    QUICK: "One altered replica of two",
    CROSSED: "Model and optimizer: number of processes, number of flips, bit positions",
    LAYERS: "First, middle and last layer",
    FORMATS_TRIED: "Number formats: trained in the format, or altered in it and converted back to float32",
    COUNTS: "Numbers of processes",
    BURSTS: "Bursts of neighbouring bits",
    PROPAGATION: "A thousand flips in one process, or spread over all",
    NETWORKS: "Networks and datasets: one altered replica of two",
}
_NOTES = {NETWORKS: f"{_READ} The large networks were trained fewer times, so their intervals are wide."}
_OUTCOME_COLUMNS = [
    number("trials"),
    *(text(f"{name}_shown", f"{name}, %") for name in OUTCOMES),
    text("harmed_shown", "harmed, %"),
    text("harmed_rank0_shown", "by rank 0"),
    text("harmed_mean_shown", "by the mean"),
    number("accuracy_mean", "accuracy"),
    number("accuracy_std", "STD"),
    number("accuracy_cv", "CV"),
    number("undisturbed"),
]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    cells = [_shown(row) for row in rows if row["part"] == "cell" and row["status"] == MEASURED]
    pages: list[dict[str, Any]] = []
    for experiment, title in _TITLES.items():
        mine = [row for row in cells if row["experiment"] == experiment]
        for name, words, shown in _figures_of(experiment, title, mine):
            pages += [_intervals(experiment, name, words, shown), _bars(name, words, shown)]
        pages.append(_table(experiment, title, mine))
    return [*pages, _curve(cells), *_error_tables(rows), _explained(rows), _alone(rows), not_run(_PLACE, rows)]


def _shown(row: Row) -> Row:
    """Format a cell's settings and shares for the page."""
    whole = f"{row['flips']} x {row['bits']}" + (f", burst {row['burst']}" if row["burst"] > 1 else "")
    whole += f", {row['layer']} layer" if row["layer"] else ""
    whole += ", drawn for each process" if row["draws"] != "same" else ""
    where = row["platform"] + (f", {row['stages']} stages" if row["stages"] > 1 else "")
    where += f", {row['network']} on {row['dataset']}" if row["experiment"] == NETWORKS else ""
    told = {f"{name}_shown": _share(row, name) for name in (*OUTCOMES, "harmed", "harmed_rank0", "harmed_mean")}
    width = f"altered as {row['format']}" if row["format"] else row["dtype"]
    whose = f"{row['target']}, {row['altered']} of {row['processes']}"
    return row | told | {"what": whole, "where": where, "whose": whose, "width": width}


def _share(row: Row, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[f'{name}_percent']:.1f} [{low:.1f}, {high:.1f}]".replace(" ", "\N{NO-BREAK SPACE}")


def _figures_of(experiment: str, title: str, rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """Return name, title and rows of an experiment's figures: one figure per platform if all platforms were run."""
    if experiment != CROSSED:
        return [(experiment, title, list(rows))]
    platforms = dict.fromkeys(row["where"] for row in rows)
    return [
        (f"{experiment}-{row_id('', (where,))}", f"{title}: {where}", [row for row in rows if row["where"] == where])
        for where in platforms
    ]


def _intervals(experiment: str, name: str, title: str, rows: Sequence[Row]) -> Section:
    return intervals(
        f"{name}-harmed",
        title,
        _NOTES.get(experiment, _READ),
        rows,
        by=["what"],
        series=["where", "whose", *(["width"] if experiment == FORMATS_TRIED else [])],
        x=["harmed_percent", AXIS],
        interval=["harmed_low", "harmed_high"],
        limits=[-2, 102],
    )


def _bars(name: str, title: str, rows: Sequence[Row]) -> Section:
    return bars(
        f"{name}-outcomes",
        f"{title}: outcomes",
        "RWC: restart without change. AccR: accuracy lower by more than 5 points. NaN: a loss or a weight is not "
        "finite. TF: the training failed.",
        rows,
        by=["where", "whose", "what", "width"],
        values=[[f"{outcome}_percent", outcome] for outcome in OUTCOMES],
        unit="% of trainings",
        whole=100,
    )


def _table(experiment: str, title: str, rows: Sequence[Row]) -> Section:
    by = ["where", "network", "whose", "what", "width"]
    note = _NOTES.get(experiment, _READ)
    return table(f"{experiment}-table", f"{title}: numbers", note, rows, by=by, columns=_OUTCOME_COLUMNS)


def _curve(cells: Sequence[Row]) -> Section:
    rows = [row | {"bit": int(row["bits"])} for row in cells if row["experiment"] == BIT_BY_BIT]
    return points(
        BIT_BY_BIT,
        "Every bit position in turn",
        f"One flip in the model of one replica of two. Bits are counted from the least significant one. {_READ}",
        rows,
        series=["width"],
        x=["bit", "bit"],
        y=["harmed_percent", AXIS],
        interval=["harmed_low", "harmed_high"],
        limits=[-2, 102],
    )


def _error_tables(rows: Sequence[Row]) -> list[Section]:
    note = (
        "Medians over trials. Off: norm of the difference over norm of the undisturbed weights. Relative error: |A2 "
        "- A1| / |A1|, mean over the finite values of a layer. In some of the trials rank 0 is itself altered."
    )
    found: list[dict[str, Any]] = []
    for experiment in (QUICK, PROPAGATION, LAYERS):
        mine = [_error_shown(row) for row in rows if row["part"] == "error" and row["experiment"] == experiment]
        found.append(
            table(
                f"{experiment}-errors",
                f"{_TITLES[experiment]}: deviation of each layer",
                note,
                mine,
                by=["where", "whose_altered", "what", "in_layer"],
                columns=[
                    text(f"{key}_{when}", f"{heading}, {words}")
                    for key, heading in (("norm", "off"), ("mean", "relative error"))
                    for when, words in (
                        ("first", "altered, 1 epoch"),
                        ("last", "altered, end"),
                        ("rank0", "rank 0, end"),
                    )
                ],
            )
        )
    return found


def _error_shown(row: Row) -> Row:
    about = {"where": row["platform"], "whose_altered": f"{row['altered']} of {row['processes']}"}
    about["what"] = f"{row['flips']} x {row['bits']}" + (f", {row['layer']} layer" if row["layer"] else "")
    when = "rank0" if row["whose"] == "rank 0" else "first" if row["after"] == "1" else "last"
    sizes = {f"{key}_{when}": None if row[key] is None else f"{row[key]:.2g}" for key in ("norm", "mean")}
    return {**about, "in_layer": row["in_layer"], **sizes}


def _explained(rows: Sequence[Row]) -> Section:
    return table("explained", "Factors that explain the outcome", "Share of the outcome's entropy that a factor explains, minus what chance explains (Theil's U); p by permutation. Correlated "
                                                           "factors both explain it.", [row for row in rows if row["part"] == "explained"], by=["factor"], columns=[number("share", "explains"), number("p"), number("levels"), number("trials")])  # fmt: skip


def _alone(rows: Sequence[Row]) -> Section:
    mine = [
        row | {f"{name}_shown": _share(row, name) for name in ("harmed", "harmed_alone")}
        for row in rows
        if row["part"] == "alone"
    ]
    return table(
        "alone",
        "The same trainings in fresh processes",
        "Each trains to the restart epoch and resumes from an altered file. A training from the warm group must give "
        "the same result.",
        mine,
        by=["cell"],
        columns=[
            number("trials"),
            number("equal"),
            text("first_difference"),
            text("harmed_shown", "harmed, %"),
            text("harmed_alone_shown", "in fresh processes"),
        ],
    )
