"""The tables of the study of partial recovery that show rows as they are."""

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
    """Return the sweep of learning rates."""
    found = [row for row in rows if row["part"] == "rate" and row["status"] == MEASURED]
    return table(
        "rates",
        "Learning rates",
        "The loss at the end of the pilot, by multiples of the stated rate; the best is that of the least loss. "
        "Under-tuned rates make anything look good that makes steps larger.",
        [row | {"times_the_stated_rate": row["times"]} for row in found],
        by=["program", "times_the_stated_rate"],
        columns=[number("rate"), number("loss", "loss", "nats a sample"), truth("best")],
    )


def pilot_table(rows: Sequence[Row]) -> Section:
    """Return what the pilots found."""
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
        "The programs, undisturbed",
        "Levels: losses at which iterations are counted, where the loss falls by several times its noise; how many, and the first and the last of "
        "them; reached after so many iterations. Where they are few, a cost is the mean over few. Mean of: so many losses are averaged, "
        "twice or four times as many as is stated in the settings where the loss is too noisy for that. Iteration: one of it, and its loss. Losses: in nats a sample, of LDA a token; of ALS squared ratings; of a quadratic (x - x*)' H (x - x*) / 2.",
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
    "Runs of holdfast run, with what their reports say.",
    where=measured("live"),
    by=["program", "policy", "fabric", "workers", "kill_step"],
    columns=[
        number("restored", "restored", "blocks"),
        text("staleness", "how stale", "steps"),
        number("cost", "cost", "iterations"),
        number("predicted", "predicted", "iterations"),
        truth("same_bits", "same bits as predicted"),
    ],
)
"""Runs with real workers."""


NOT_RUN_TABLE = not_run(
    ["part", "program"], title="What could not be run", columns=[text("why"), count("trial", "trials")]
)
