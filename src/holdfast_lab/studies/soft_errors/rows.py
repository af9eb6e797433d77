"""Summary rows of the soft-error study, cell by cell."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast_lab.studies.base import FAILED, MEASURED, Row
from holdfast_lab.studies.explain import explained, shares, spread
from holdfast_lab.studies.outcomes import OUTCOMES, RWC
from holdfast_lab.studies.stats import wilson

FACTORS = ("platform", "target", "altered", "flips", "bits", "bit", "in_layer", "worst")
_NOT_KEPT = ("data", "experiment")


def cell_row(settings: Mapping[str, Any], trials: Sequence[Row]) -> Row:
    """Return a cell's row: shares of the outcomes with intervals in percent, and the spread of the accuracy."""
    about = _about(settings)
    known = shares(trial["outcome"] for trial in trials)
    row: Row = {"part": "cell", "status": MEASURED, **about, "trials": len(trials)}
    for name in OUTCOMES:
        share = known[name]
        row |= {
            name: share.trials,
            f"{name}_percent": 100 * share.share,
            f"{name}_low": 100 * share.low,
            f"{name}_high": 100 * share.high,
        }
    row |= harmed(trials, "outcome", "harmed")
    row |= harmed(trials, "outcome_rank0", "harmed_rank0") | harmed(trials, "outcome_mean", "harmed_mean")
    if lies := spread(trial.get("accuracy") for trial in trials):
        row |= {"accuracy_mean": lies.mean, "accuracy_std": lies.std, "accuracy_cv": lies.cv}
    row["undisturbed"] = next((trial["undisturbed"] for trial in trials if "undisturbed" in trial), None)
    row["trial_s"] = statistics.median(trial["seconds"] for trial in trials)
    return row


def harmed(trials: Iterable[Row], outcome: str, name: str) -> Row:
    """Count the trials that one outcome column does not call RWC.

    Return the count and the share in percent with its interval.
    """
    # A failed training has no accuracy of any process, so all outcome columns agree.
    outcomes = [trial.get(outcome, trial["outcome"]) for trial in trials]
    count = sum(one != RWC for one in outcomes)
    low, high = wilson(count, len(outcomes))
    return {
        name: count,
        f"{name}_percent": 100 * count / len(outcomes),
        f"{name}_low": 100 * low,
        f"{name}_high": 100 * high,
    }


def error_rows(settings: Mapping[str, Any], trials: Sequence[Row]) -> list[Row]:
    """Return each layer's median deviation over trials, after the first and last epoch, for altered rank and rank 0."""
    rows: list[Row] = []
    for column, when, whose in (
        ("errors_first", "1", "altered"),
        ("errors_last", str(settings["epochs"]), "altered"),
        ("errors_last_rank0", str(settings["epochs"]), "rank 0"),
    ):
        found = [trial[column] for trial in trials if column in trial]
        for layer in found[0] if found else ():
            row = {"part": "error", "status": MEASURED, **_about(settings), "after": when, "whose": whose}
            medians = {key: _median([one[layer][key] for one in found]) for key in found[0][layer]}
            rows.append(row | {"in_layer": layer, "trials": len(found), **medians})
    return rows


def explained_rows(trials: Sequence[Row], seed: int) -> list[Row]:
    """Return how much of the outcome each factor explains."""
    found = [explained(trials, factor, seed=seed) for factor in FACTORS]
    return [
        {
            "part": "explained",
            "status": MEASURED,
            "factor": one.factor,
            "share": one.share,
            "p": one.p,
            "levels": one.levels,
            "trials": one.trials,
        }
        for one in found
        if one.levels > 1
    ]


def failed_row(settings: Mapping[str, Any], why: str) -> Row:
    """Return the row of a cell that could not be prepared."""
    return {"part": "cell", "status": FAILED, **_about(settings), "why": why}


def _about(settings: Mapping[str, Any]) -> Row:
    return {"experiment": settings["experiment"]} | {k: v for k, v in settings.items() if k not in _NOT_KEPT}


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
