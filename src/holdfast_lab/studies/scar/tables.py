"""The tables of the study of partial recovery that show rows as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.scar.figures import unbroken


def rates_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the sweep of learning rates."""
    found = [row for row in rows if row["part"] == "rate" and row["status"] == MEASURED]
    return {
        "kind": "table",
        "id": "rates",
        "title": "Learning rates",
        "note": "The loss at the end of the pilot, by multiples of the stated rate; the best is that of the least loss. "
        "Under-tuned rates make anything look good that makes steps larger.",
        "where": {},
        "rows": [row | {"times_the_stated_rate": row["times"]} for row in found],
        "by": ["program", "times_the_stated_rate"],
        "columns": [
            ["rate", "rate", "number"],
            ["loss", "loss", "number", "nats a sample"],
            ["best", "best", "truth"],
        ],
    }


def pilot_table(rows: Sequence[Row]) -> dict[str, Any]:
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
    return {
        "kind": "table",
        "id": "pilot",
        "title": "The programs, undisturbed",
        "note": "Levels: losses at which iterations are counted, where the loss falls by several times its noise; how many, and the first and the last of "
        "them; reached after so many iterations. Where they are few, a cost is the mean over few. Mean of: so many losses are averaged, "
        "twice or four times as many as is stated in the settings where the loss is too noisy for that. Iteration: one of it, and its loss. Losses: in nats a sample, of LDA a token; of ALS squared ratings; of a quadratic (x - x*)' H (x - x*) / 2.",
        "where": {},
        "rows": lines,
        "by": ["program"],
        "columns": [
            ["blocks", "state", "number", "blocks"],
            ["block_bytes", "state", "number", "bytes"],
            ["every", "C", "number", "iterations"],
            ["window", "mean of", "number", "iterations"],
            ["count", "levels", "number"],
            ["between", "losses", "text"],
            ["reached", "reached", "text", "iterations"],
            ["skew", "skew", "%"],
            ["iteration_s", "iteration", "ms"],
        ],
    }


def live_table() -> dict[str, Any]:
    """Return the runs with real workers."""
    return {
        "kind": "table",
        "id": "live",
        "title": "Real workers that own blocks, killed by SIGKILL",
        "note": "Runs of holdfast run, with what their reports say.",
        "where": {"part": "live", "status": MEASURED},
        "by": ["program", "policy", "fabric", "workers", "kill_step"],
        "columns": [
            ["restored", "restored", "number", "blocks"],
            ["staleness", "how stale", "text", "steps"],
            ["cost", "cost", "number", "iterations"],
            ["predicted", "predicted", "number", "iterations"],
            ["same_bits", "same bits as predicted", "truth"],
        ],
    }


def not_run_table() -> dict[str, Any]:
    """Return what failed, and why."""
    return {
        "kind": "table",
        "id": "not-run",
        "title": "What could not be run",
        "note": "",
        "where": {"status": NOT_RUN},
        "by": ["part", "program"],
        "columns": [["why", "why", "text"], ["trial", "trials", "count"]],
    }
