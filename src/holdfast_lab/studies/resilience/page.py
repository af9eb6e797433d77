"""The page of the resilience study: accuracy against time, and the effect of each policy."""

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
    "Accuracy: training with virtual workers, means of paired differences from the failure-free training with the same "
    "seed, 95 % intervals; positive is worse. Time: simulated with stated costs; it counts only time when training was "
    "blocked and work that was lost or recomputed. In addition steps are slower with fewer workers, equally for all "
    "strategies. Each point is one number of workers and of failures, at random moments."
)
_TRADE_REAL = (
    " Real: four processes, one of them killed, measured on this machine; mean accuracy and median time of all runs."
)


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
        x=["overhead_percent", "time blocked, lost or recomputed, % of the failure-free run"],
        y=["accuracy_loss", "accuracy lost, points"],
        interval=["accuracy_loss_low", "accuracy_loss_high"],
        log=["x"],
    )


def _together(runs: Sequence[Row]) -> Row:
    """Return one point for all runs of a job: their mean accuracy loss and median time."""
    lost = np.array([row["accuracy_loss"] for row in runs])
    low, high = Estimate.of(lost)[1:3] if len(runs) > 1 else (None, None)
    found = {"accuracy_loss": float(lost.mean()), "accuracy_loss_low": low, "accuracy_loss_high": high}
    return runs[0] | found | {"overhead_percent": statistics.median(row["overhead_percent"] for row in runs)}


def _averaged(name: str, cases: Sequence[Row]) -> Section:
    forward = [row for row in cases if row["strategy"] == FORWARD and row["batch"] == "global" and row["averaged"] < 1]
    return points(
        f"lost-share-{name}",
        f"Forward: distance of the final weights from the failure-free ones: {name}",
        "Relative to the distance that the failure-free training moves the weights, by share of lost workers; random "
        "moments.",
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
    text("loss_shown", "increase of test loss"),
    number("distance_percent", "distance, %"),
    text("same_shown", "same bits"),
    number("overhead_percent", "blocked, lost, recomputed, %"),
    number("longer_percent", "total extra time, %"),
]


def _strategies(cases: Sequence[Row]) -> Section:
    return table(
        "strategies",
        "Strategies: failures at random moments, mini-batch of constant size",
        "Total extra time includes slower steps, because fewer workers share the work.",
        [row for row in cases if _is_plain(row) and (row["batch"], row["rescale"]) == ("global", "survivors")],
        by=["network", "workers", "count", "happens"],
        columns=_COLUMNS,
    )


def _policies(cases: Sequence[Row]) -> Section:
    return table(
        "policies",
        "Policies",
        "Local: each worker keeps its number of samples, so the mini-batch shrinks and the same samples take more "
        "steps. Original: the gradient is divided by the original mini-batch size.",
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
        "Planned removal and addition compared with a failure",
        "In the middle of the training, with rollback. Replacements join a fifth of the training later.",
        [row for row in cases if row["what"] != FAILURE],
        by=["network", "workers", "count", "what", "batch"],
        columns=_COLUMNS,
    )


def _points(runs: Sequence[Row]) -> Section:
    return table(
        "real",
        "Real processes",
        "Four processes train the small network on digits, and one is killed by SIGKILL in step 23 of 48. Simulated: "
        "with costs measured in the other runs of the same strategy and optimizer mode, or in the same run if there is "
        "no other.",
        [row | {"same_bits": row["same"]} for row in runs],
        by=["happens"],
        columns=[
            number("overhead_percent", "measured, %"),
            number("predicted_percent", "simulated, %"),
            number("accuracy_loss", "accuracy lost, points"),
            truth("same_bits"),
            text("decisions", "decision"),
            count("repetition", "runs"),
        ],
    )


def _updates(rows: Sequence[Row]) -> Section:
    stated = ", ".join(
        f"{name} {1000 * rows[0][f'cost_{key}']:g} ms"
        for name, key in (("update", "update_s"), ("copy", "copy_s"), ("undo", "undo_s"))
        if rows
    )
    return table(
        "updates",
        "Overlapped optimizer (eager) compared with lazy updates, simulated",
        "Eager: the parameters of a bucket are copied and updated as soon as its all-reduce is complete, overlapped "
        "with the following all-reduces; a discarded step undoes these updates. "
        f"Stated costs of all buckets, for a step of about one second: {stated}. Copies: extra memory of a worker, for "
        "this network with momentum.",
        [
            row
            | {
                "when": "random moments" if row["moment"] == SPREAD else f"{100 * row['averaged']:g} % averaged",
                "happens": row["strategy"] + (f", every {row['every']} steps" if row["every"] else ""),
            }
            for row in rows
        ],
        by=["network", "workers", "count", "happens", "when"],
        columns=[
            seconds("lazy_s", "training, lazy"),
            seconds("eager_s", "training, eager"),
            number("shorter_percent", "shorter, %"),
            milliseconds("undo_s", "undo"),
            megabytes("copy_bytes", "copies"),
        ],
        folded=True,
    )


def _updated(rows: Sequence[Row]) -> Section:
    return table(
        "updated",
        "Overlapped optimizer (eager) compared with lazy updates, real processes",
        "Time of eager updates, over all buckets of a step. Waited: the part of it that was not overlapped with "
        "all-reduces. Blocked by the kill: extra time from the step before the kill to the end of the step with the "
        "kill.",
        [row for row in rows if row.get("update") == EAGER or row["averaged"] or not row["strategy"]],
        by=["happens"],
        columns=[
            milliseconds("step_s", "step"),
            milliseconds("more_s", "blocked by the kill"),
            milliseconds("cost_update_s", "updates"),
            milliseconds("cost_copy_s", "copies"),
            milliseconds("cost_waited_s", "waited"),
            milliseconds("cost_undo_s", "undo"),
            number("undone", "buckets undone"),
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
        "All slices in one batch compared with slice by slice",
        "Eight workers on digits. Slice by slice has the bits of real processes. Largest: over all seeds. Usual: the "
        "difference caused by another order of the samples.",
        shown,
        by=["variant", "happens"],
        columns=[
            text("more", "increase of accuracy, points"),
            number("accuracy_apart", "largest, points"),
            number("accuracy_usual", "usual, points"),
            text("apart", "weights, largest"),
            text("usual", "weights, usual"),
            number("seeds"),
        ],
    )


def _undisturbed(rows: Sequence[Row]) -> Section:
    return table(
        "undisturbed",
        "Failure-free training",
        "Spread: standard deviation over seeds.",
        [row for row in rows if row["part"] == "undisturbed"],
        by=["network", "dataset"],
        columns=[
            number("accuracy", "accuracy, %"),
            number("spread", "spread, points"),
            number("seeds"),
            number("steps"),
            number("batch_size", "samples per step"),
        ],
    )
