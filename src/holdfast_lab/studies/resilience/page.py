"""How the study of resilience shows its rows: accuracy against time, and what each policy makes of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from holdfast_lab.simulate import Estimate
from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.resilience.cases import FAILURE, FORWARD, RESTART, SPREAD
from holdfast_lab.studies.resilience.claims import is_usual
from holdfast_lab.studies.resilience.jobs import MODEL
from holdfast_lab.studies.resilience.updates import EAGER
from holdfast_lab.studies.sections import (
    Section,
    count,
    megabytes,
    milliseconds,
    not_run,
    number,
    points,
    seconds,
    table,
    text,
    truth,
)

_TRADE = (
    "Accuracy: trainings by logical workers, means of paired differences from the undisturbed training with the same seed, 95 % intervals; positive is worse. "
    "Time: simulated with stated costs, and only what is held, lost or done again; with fewer workers steps are slower besides, the same for all strategies. "
    "Each point is a number of workers and of failures at drawn moments."
)
_TRADE_REAL = " What is called real are four processes, one of them killed, measured on this machine: mean and median of all runs."


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    cases = [_shown(row) for row in rows if row["part"] == "case" and row["status"] == MEASURED]
    runs = [_real(row) for row in rows if row["part"] == "point" and row["status"] == MEASURED]
    networks = list(dict.fromkeys(row["network"] for row in cases))
    usual = [row for row in runs if is_usual(row)]
    return [
        *[
            _trade(name, [row for row in cases if row["network"] == name], usual if name == MODEL else [])
            for name in networks
        ],
        *([] if networks else [_trade("real processes", [], usual)]),
        *[_averaged(name, [row for row in cases if row["network"] == name]) for name in networks],
        _strategies(cases),
        _policies(cases),
        _moments(cases),
        _planned(cases),
        _points(runs),
        _updates([row for row in rows if row["part"] == "update"]),
        _updated([row for row in rows if row["part"] == "real" and row["status"] == MEASURED]),
        _modes(rows),
        _undisturbed(rows),
        not_run(["part", "happens", "repetition"], rows),
    ]


def _shown(row: Row) -> Row:
    averaged = f", {100 * row['averaged']:g} % averaged" if row["strategy"] == FORWARD else ""
    every = f", every {row['every']} steps" if row["strategy"] == RESTART else ""
    texts = {
        name: f"{row[key]:.2g} [{row[f'{key}_low']:.2g}, {row[f'{key}_high']:.2g}]".replace(" ", "\N{NO-BREAK SPACE}")
        for name, key in (("accuracy_shown", "accuracy_loss"), ("loss_shown", "loss_more"))
    }
    percent = {"distance_percent": 100 * row["distance"], "lost_percent": 100 * row["lost_share"]}
    same = {"same_shown": f"{row['same']} of {row['seeds']}"}
    policy = f"{row['batch']}, {row['rescale']}"
    return row | texts | percent | same | {"happens": row["strategy"] + averaged + every, "policy": policy}


def _real(row: Row) -> Row:
    return row | {"happens": f"real: {row['happens']}", "label": ""}


def _is_plain(row: Row) -> bool:
    return bool(row["what"] == FAILURE and row["moment"] == SPREAD)


def _trade(name: str, cases: Sequence[Row], measured: Sequence[Row]) -> Section:
    plain = [row for row in cases if _is_plain(row) and (row["batch"], row["rescale"]) == ("global", "survivors")]
    chosen = [row | {"status": "simulated"} for row in plain if row["averaged"] < 1]
    happens = itemgetter("happens")
    real = [_together(list(runs)) for _, runs in groupby(sorted(measured, key=happens), happens)]
    return points(
        f"trade-off-{name}",
        f"Accuracy against time: {name}",
        _TRADE + (_TRADE_REAL if real else ""),
        [*chosen, *real],
        series=["happens"],
        x=["overhead_percent", "time held, lost or done again, % of the undisturbed run"],
        y=["accuracy_loss", "accuracy lost, points"],
        interval=["accuracy_loss_low", "accuracy_loss_high"],
        log=["x"],
    )


def _together(runs: Sequence[Row]) -> Row:
    """Return a point for runs of one job: the mean of what they lost, and the median of their time."""
    lost = np.array([row["accuracy_loss"] for row in runs])
    low, high = Estimate.of(lost)[1:3] if len(runs) > 1 else (None, None)
    found = {"accuracy_loss": float(lost.mean()), "accuracy_loss_low": low, "accuracy_loss_high": high}
    return runs[0] | found | {"overhead_percent": statistics.median(row["overhead_percent"] for row in runs)}


def _averaged(name: str, cases: Sequence[Row]) -> Section:
    forward = [row for row in cases if row["strategy"] == FORWARD and row["batch"] == "global" and row["averaged"] < 1]
    return points(
        f"lost-share-{name}",
        f"Forward: how far the weights end from the undisturbed ones: {name}",
        "Distance over how far the undisturbed training moved the weights, by the share of the workers that is lost; drawn moments.",
        [
            row | {"divided": f"{100 * row['averaged']:g} % averaged, {row['rescale']}"}
            for row in forward
            if _is_plain(row)
        ],
        series=["divided"],
        x=["lost_percent", "workers lost, %"],
        y=["distance_percent", "distance of the weights, %"],
        log=["x"],
    )


_COLUMNS = [
    text("accuracy_shown", "accuracy lost, points"),
    text("loss_shown", "test loss, more"),
    number("distance_percent", "distance, %"),
    text("same_shown", "same bits"),
    number("overhead_percent", "held, lost, redone, %"),
    number("longer_percent", "longer in all, %"),
]


def _strategies(cases: Sequence[Row]) -> Section:
    return table(
        "strategies",
        "Strategies: failures at drawn moments, the mini-batch keeps its size",
        "Longer in all: with steps that are slower because fewer workers share them.",
        [row for row in cases if _is_plain(row) and (row["batch"], row["rescale"]) == ("global", "survivors")],
        by=["network", "workers", "count", "happens"],
        columns=_COLUMNS,
    )


def _policies(cases: Sequence[Row]) -> Section:
    return table(
        "policies",
        "Policies",
        "Local: each worker keeps its samples, the mini-batch shrinks, and the same samples take more steps. Original: divided by the size that the mini-batch had at first.",
        [row for row in cases if _is_plain(row) and (row["batch"], row["rescale"]) != ("global", "survivors")],
        by=["network", "workers", "count", "happens", "policy"],
        columns=_COLUMNS,
        folded=True,
    )


def _moments(cases: Sequence[Row]) -> Section:
    return table(
        "moments",
        "Forward: all failures in one step, early, in the middle, late",
        "",
        [row for row in cases if row["what"] == FAILURE and row["moment"] != SPREAD],
        by=["network", "workers", "count", "moment", "happens", "policy"],
        columns=_COLUMNS,
        folded=True,
    )


def _planned(cases: Sequence[Row]) -> Section:
    return table(
        "planned",
        "A planned removal and an addition beside a failure",
        "In the middle of the training, rollback. Newcomers take the places of those who are gone a fifth of the training later.",
        [row for row in cases if row["what"] != FAILURE],
        by=["network", "workers", "count", "what", "batch"],
        columns=_COLUMNS,
    )


def _points(runs: Sequence[Row]) -> Section:
    return table(
        "real",
        "Real processes",
        "Four processes train the small network on digits, one is killed by SIGKILL in step 23 of 48. Simulated: with costs measured in the other runs of the same strategy and update, "
        "or in the same one if there is no other.",
        [row | {"same_bits": row["same"]} for row in runs],
        by=["happens"],
        columns=[
            number("overhead_percent", "measured, %"),
            number("predicted_percent", "simulated, %"),
            number("accuracy_loss", "accuracy lost, points"),
            truth("same_bits"),
            text("decisions", "decided"),
            count("repetition", "runs"),
        ],
    )


def _updates(rows: Sequence[Row]) -> Section:
    stated = ", ".join(
        f"{name} {1000 * rows[0][f'cost_{key}']:g} ms"
        for name, key in (("updating", "update_s"), ("copying", "copy_s"), ("taking back", "undo_s"))
        if rows
    )
    return table(
        "updates",
        "Eager updates beside lazy ones, simulated",
        "A bucket is updated as soon as its sum is in, beside the sums that follow, after a copy; a step that is discarded takes these updates back. "
        f"Stated for all buckets of a step of about a second: {stated}. Copies: what a worker holds besides, of this network with momentum.",
        [
            row
            | {
                "when": "drawn moments" if row["moment"] == SPREAD else f"{100 * row['averaged']:g} % averaged",
                "happens": row["strategy"] + (f", every {row['every']} steps" if row["every"] else ""),
            }
            for row in rows
        ],
        by=["network", "workers", "count", "happens", "when"],
        columns=[
            seconds("lazy_s", "training, lazy"),
            seconds("eager_s", "training, eager"),
            number("shorter_percent", "shorter, %"),
            milliseconds("undo_s", "taking back"),
            megabytes("copy_bytes", "copies"),
        ],
        folded=True,
    )


def _updated(rows: Sequence[Row]) -> Section:
    return table(
        "updated",
        "Eager updates beside lazy ones, real processes",
        "All that eager updates took, of all buckets of a step; waited: what of it did not lie beside sums. Held by the kill: from the step before to the end of the one that it struck.",
        [row for row in rows if row.get("update") == EAGER or row["averaged"] or not row["strategy"]],
        by=["happens"],
        columns=[
            milliseconds("step_s", "step"),
            milliseconds("more_s", "held by the kill"),
            milliseconds("cost_update_s", "updates"),
            milliseconds("cost_copy_s", "copies"),
            milliseconds("cost_waited_s", "waited"),
            milliseconds("cost_undo_s", "taking back"),
            number("undone", "buckets taken back"),
            megabytes("copy_bytes", "copies"),
            count("repetition", "runs"),
        ],
    )


def _modes(rows: Sequence[Row]) -> Section:
    modes = [row for row in rows if row["part"] == "modes"]
    shown = [
        row
        | {"more": f"{row['accuracy_more']:.3g} [{row['accuracy_more_low']:.3g}, {row['accuracy_more_high']:.3g}]"}
        | {name: f"{row[name]:.2g}" for name in ("apart", "usual")}
        for row in modes
    ]
    return table(
        "modes",
        "All slices at once against slice by slice",
        "Eight workers on digits. Slice by slice has the bits of real processes. Furthest: of all seeds. Usual: what another order of the samples makes of it.",
        shown,
        by=["variant", "happens"],
        columns=[
            text("more", "accuracy more, points"),
            number("accuracy_apart", "furthest, points"),
            number("accuracy_usual", "usual, points"),
            text("apart", "weights, furthest"),
            text("usual", "weights, usual"),
            number("seeds"),
        ],
    )


def _undisturbed(rows: Sequence[Row]) -> Section:
    return table(
        "undisturbed",
        "Undisturbed trainings",
        "Spread: standard deviation over seeds.",
        [row for row in rows if row["part"] == "undisturbed"],
        by=["network", "dataset"],
        columns=[
            number("accuracy", "accuracy, %"),
            number("spread", "spread, points"),
            number("seeds"),
            number("steps"),
            number("batch_size", "samples of a step"),
        ],
    )
