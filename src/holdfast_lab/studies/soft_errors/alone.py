"""Reruns trials in fresh processes that resume from altered checkpoint files.

A warm group must give the same results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast_lab.inject.files import InjectionTarget
from holdfast_lab.inject.inject import inject
from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.campaign_plan import found_by
from holdfast_lab.studies.campaign_table import as_json
from holdfast_lab.studies.soft_errors.cells import Pair
from holdfast_lab.studies.soft_errors.group import TrainingGroup
from holdfast_lab.studies.soft_errors.rows import harmed
from holdfast_lab.studies.soft_errors.setup import CRITICAL, DDP, MODEL, SoftErrorCase, SoftErrorSetup
from holdfast_lab.studies.soft_errors.trial import drawn, row_of
from holdfast_lab.studies.soft_errors.workers.process import Disturbance

_COMPARED = ("outcome", "outcome_rank0", "outcome_mean", "accuracy", "accuracy_mean", "test_loss", "errors_last")


def pair_for(pairs: Sequence[Pair]) -> Pair | None:
    """Return the pair whose trials are rerun: one flip of the critical bit in one replica of two.

    Return None if there is no such pair.
    """
    return next((pair for pair in pairs if _is_plain(*pair)), None)


def _is_plain(case: SoftErrorCase, setup: SoftErrorSetup) -> bool:
    trained = (setup.platform, setup.processes, setup.dtype)
    altered = (case.target, case.bits, case.altered, case.layer, case.format)
    return (trained, altered) == ((DDP, 2, "float32"), (MODEL, CRITICAL, 1, "", ""))


def alone(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train to the restart epoch in new processes, alter some checkpoint files, resume, and return the trial's row.

    Args:
        settings: The settings of the cell.
        seed: The seed of the trial.

    Raises:
        GroupFailed: if a process failed.
    """
    case, setup = SoftErrorCase.from_settings(settings)
    with contextlib.closing(TrainingGroup(setup)) as group:
        group.begin()
        ranks, orders = drawn(case, group, seed)
        for rank in ranks:
            order, file = orders[rank], Path(group.undisturbed[rank]["file"])
            assert order is not None
            assert order.how is not None
            altered = file.with_name(f"altered-{rank}.h5")
            inject(InjectionTarget(file), order.how, at=order.at or [order.target], out=altered)
            orders[rank] = Disturbance(file=str(altered))
        return row_of(group, ranks, group.ask(orders))


def alone_row(settings: Mapping[str, Any], trials: Sequence[Row]) -> Row:
    """Rerun trials of a cell in fresh processes.

    Return how many gave the same result, and both shares of harmed trials.

    Args:
        settings: The settings of the cell.
        trials: The cell's rows from the campaign.
    """
    found = [found_by(alone, settings, trial["seed"]) for trial in trials]
    differences = [_difference(one, trial) for one, trial in zip(found, trials, strict=True)]
    row: Row = {"part": "alone", "status": MEASURED, "cell": trials[0]["cell"], "trials": len(trials)}
    row |= {"equal": differences.count(""), "first_difference": next(filter(None, differences), "")}
    return row | harmed(trials, "outcome", "harmed") | harmed(found, "outcome", "harmed_alone")


def _difference(alone: Mapping[str, Any], warm: Mapping[str, Any]) -> str:
    """Describe the first difference between the two results of a trial; "" if they are equal."""
    for name in ("error", *_COMPARED):
        values = as_json(alone.get(name)), as_json(warm.get(name))
        if values[0] != values[1]:
            return f"{name} of trial {warm['number']}: {values[0]} in fresh processes, {values[1]} in the warm group"
    return ""
