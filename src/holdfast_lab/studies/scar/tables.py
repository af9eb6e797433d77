"""Tables of the partial recovery study that show rows without aggregation."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.scar.figures import unbroken
from holdfast_lab.studies.sections import (
    Section,
    count,
    measured,
    milliseconds,
    not_run,
    number,
    percent,
    table,
    text,
    truth,
)


def rates_table(rows: Sequence[Row]) -> Section:
    """Return the table of the learning rate sweep."""
    found = [row for row in rows if row["part"] == "rate" and row["status"] == MEASURED]
    return table(
        "rates",
        "Learning rates",
        "Loss at the end of the pilot run, by multiples of the stated rate; the best rate has the lowest loss. "
        "With a rate that is too low, anything that enlarges steps looks good.",
        [row | {"times_the_stated_rate": row["times"]} for row in found],
        by=["program", "times_the_stated_rate"],
        columns=[number("rate"), number("loss", "loss", "nats per sample"), truth("best")],
    )


def pilot_table(rows: Sequence[Row]) -> Section:
    """Return the table of the pilot runs."""
    found = [row for row in rows if row["part"] == "pilot" and row["status"] == MEASURED]
    lines = [
        row
        | {
            "count": len(row["levels"]),
            "between": unbroken(f"{row['levels'][0]:.3g} to {row['levels'][-1]:.3g}"),
            "reached": unbroken(f"{row['kappas'][0]:.0f} to {row['kappas'][-1]:.0f}"),
        }
        for row in found
    ]
    return table(
        "pilot",
        "The programs without failures",
        "Levels: losses at which iterations are counted, in the range where the loss falls by several times its noise: "
        "their number, the first and last level, and the iterations that reach these. With few levels, a cost is a "
        "mean over few values. Mean of: window of the trailing mean, two or four times that of the settings if the "
        "loss is too noisy. Iteration: time of an iteration and its loss. Losses are in nats per sample, for LDA per "
        "token; for ALS in squared ratings; for a quadratic (x - x*)' H (x - x*) / 2.",
        lines,
        by=["program"],
        columns=[
            number("blocks", "state", "blocks"),
            number("block_bytes", "state", "bytes"),
            number("every", "C", "iterations"),
            number("window", "mean of", "iterations"),
            number("count", "levels"),
            text("between", "losses"),
            text("reached", "reached", "iterations"),
            percent("skew"),
            milliseconds("iteration_s", "iteration"),
        ],
    )


LIVE_TABLE = table(
    "live",
    "Real workers that own blocks, killed by SIGKILL",
    "Jobs of holdfast run, with numbers from their reports.",
    where=measured("live"),
    by=["program", "policy", "fabric", "workers", "kill_step"],
    columns=[
        number("restored", "restored", "blocks"),
        text("staleness", "staleness", "steps"),
        number("cost", "cost", "iterations"),
        number("predicted", "predicted", "iterations"),
        truth("same_bits", "same bits as predicted"),
    ],
)
"""The table of runs with real workers."""


NOT_RUN_TABLE = not_run(["part", "program"], title="Not run", columns=[text("why"), count("trial", "trials")])
