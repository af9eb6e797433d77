"""One trial of the soft-error study: a training resumed from an altered state, and its outcome."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from holdfast.faults.alteration import Alteration
from holdfast.faults.formats import FORMATS
from holdfast_lab.studies.outcomes import outcome_of
from holdfast_lab.studies.soft_errors.group import GroupFailed, TrainingGroup, group_for
from holdfast_lab.studies.soft_errors.setup import BELOW, CRITICAL, SAME, SoftErrorCase, SoftErrorSetup
from holdfast_lab.studies.soft_errors.workers.process import Disturbance

_LAYERS = {"first": 0.0, "middle": 0.5, "last": 1.0}
_KEPT = ("mean", "median", "norm", "changed", "not_finite")
"""Statistics of a layer's relative error that a row keeps."""
_MOST_CHANGES = 10
"""A row lists at most this many flips; the others follow from its seed."""


@dataclass(frozen=True, slots=True)
class SoftErrorWarmStart:
    """The warm group and the settings that a cell's trials start from."""

    group: TrainingGroup
    case: SoftErrorCase


def prepare(settings: Mapping[str, Any]) -> SoftErrorWarmStart:
    """Return the warm group of a cell; cells of one setup share it."""
    case, setup = SoftErrorCase.from_settings(settings)
    return SoftErrorWarmStart(group_for(setup), case)


def trial(warm: SoftErrorWarmStart, seed: int) -> dict[str, Any]:
    """Alter the state of some processes, resume, and return the trial's row.

    If the group fails, it is restarted and the trial repeated. If it fails again, the outcome is a failed training.

    Raises:
        GroupFailed: if the group cannot be restarted.
    """
    ranks, orders = drawn(warm.case, warm.group, seed)
    try:
        found = warm.group.ask(orders)
    except GroupFailed:
        found = warm.group.ask(orders)
    return row_of(warm.group, ranks, found)


def drawn(case: SoftErrorCase, group: TrainingGroup, seed: int) -> tuple[list[int], list[Disturbance | None]]:
    """Draw which processes are altered, and return them with the disturbance of each rank."""
    setup = group.setup
    ranks = sorted(random.Random(seed).sample(range(setup.processes), case.altered))
    at = _paths(case, group)
    orders: list[Disturbance | None] = [None] * setup.processes
    for rank in ranks:
        # Replicas of one stage have the same state, so the same seed flips the same bits.
        own = seed % 2**62 + (0 if case.draws == SAME else rank)
        bits = bits_of(case.bits, case.format or setup.dtype)
        how = Alteration(count=case.flips, bits=bits, burst=case.burst, seed=own)
        orders[rank] = Disturbance(target=case.target, how=how, at=at, format=case.format)
    return ranks, orders


def bits_of(bits: str, format: str) -> str:
    """Return bits of a format in the notation of :class:`~holdfast.faults.alteration.Alteration`."""
    return f"0:{FORMATS[format].range_of(CRITICAL)[0] - 1}" if bits == BELOW else bits


def _paths(case: SoftErrorCase, group: TrainingGroup) -> tuple[str, ...]:
    """Return the paths of the tensors to alter: all, or one layer, counted over all stages."""
    if not case.layer:
        return ()
    layers = [layer for answer in group.undisturbed[: group.setup.stages] for layer in answer["layers"]]
    layer = layers[round(_LAYERS[case.layer] * (len(layers) - 1))]
    # The optimizer stores its tensors under the parameter's name.
    return (f"{case.target}/{layer}",)


def row_of(group: TrainingGroup, ranks: Sequence[int], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a trial.

    The outcome is that of the worst altered process, because a replica that is altered alone differs from then on.
    Separate columns give the outcome by rank 0, and by the mean over all processes.
    """
    calm = group.undisturbed  # by rank, because running statistics of replicas differ even undisturbed
    finite = all(answer["finite"] for answer in found)
    worst = min(ranks, key=lambda rank: found[rank]["accuracy"] - calm[rank]["accuracy"])
    flips = [{"rank": rank, **flip} for rank in ranks for flip in found[rank]["flips"]]
    row: dict[str, Any] = {"finite": finite, "ranks": list(ranks), "worst": worst}
    for name, whose in (("", [worst]), ("_rank0", [0]), ("_mean", range(len(found)))):
        accuracy, undisturbed = (fmean(one[rank]["accuracy"] for rank in whose) for one in (found, calm))
        row |= {f"accuracy{name}": accuracy, f"undisturbed{name}": undisturbed}
        row[f"outcome{name}"] = outcome_of(accuracy, undisturbed, finite=finite)
    row |= {
        "test_loss": found[worst]["test_loss"],
        "epochs_trained": len(found[0]["losses"]),
        "flipped": sum(found[rank]["flipped"] for rank in ranks),
        "changes": flips[:_MOST_CHANGES],
        "errors_first": _errors(group.setup, found, worst, "errors_first"),
        "errors_last": _errors(group.setup, found, worst, "errors_last"),
        "errors_last_rank0": _errors(group.setup, found, 0, "errors_last"),
    }
    alike = {(flip["path"], flip["index"], flip.get("bit")) for flip in flips}  # replicas may flip the same bit
    if len(alike) == 1 and "bit" in flips[0]:
        row |= {"bit": flips[0]["bit"], "in_layer": _layer_of(flips[0]["path"])}
    return row


def _errors(setup: SoftErrorSetup, found: Sequence[Mapping[str, Any]], rank: int, when: str) -> dict[str, Any]:
    """Return the deviation from the undisturbed run of each model layer of a process, or of its stage."""
    first = rank - rank % setup.stages
    layers = {name: error for answer in found[first : first + setup.stages] for name, error in answer[when].items()}
    return {name: {key: error[key] for key in _KEPT} for name, error in layers.items()}


def _layer_of(path: str) -> str:
    """Return the module of a path such as ``model/conv1.0.weight`` or ``optimizer/conv1.0.weight/momentum_buffer``."""
    return path.split("/")[1].rpartition(".")[0]
