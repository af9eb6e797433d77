"""A trial of the study of soft errors: one training that goes on from an altered state, and what became of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from holdfast.faults.alteration import Alteration
from holdfast.faults.formats import FORMATS
from holdfast_lab.studies.outcomes import outcome_of
from holdfast_lab.studies.soft_errors.group import Group, GroupFailed, group_for
from holdfast_lab.studies.soft_errors.setup import BELOW, CRITICAL, SAME, Case, Setup
from holdfast_lab.studies.soft_errors.workers.process import Disturbance

_LAYERS = {"first": 0.0, "middle": 0.5, "last": 1.0}
_KEPT = ("mean", "median", "norm", "changed", "not_finite")
"""What rows have of the relative error of a layer."""
_MOST_CHANGES = 10
"""So many flips stand in a row; the others follow from its seed."""


@dataclass(frozen=True, slots=True)
class Warm:
    """What the trials of a cell start from."""

    group: Group
    case: Case


def prepare(settings: Mapping[str, Any]) -> Warm:
    """Return the warm group of a cell; cells of one setup have the same."""
    case, setup = Case.from_settings(settings)
    return Warm(group_for(setup), case)


def trial(warm: Warm, seed: int) -> dict[str, Any]:
    """Alter the state of some processes, go on, and return a row.

    A group that fails is made anew, and the trial with it; if it fails again, the training did.

    Raises:
        GroupFailed: then.
    """
    ranks, orders = drawn(warm.case, warm.group, seed)
    try:
        found = warm.group.ask(orders)
    except GroupFailed:
        found = warm.group.ask(orders)
    return row_of(warm.group, ranks, found)


def drawn(case: Case, group: Group, seed: int) -> tuple[list[int], list[Disturbance | None]]:
    """Return which processes are altered, and what each is told."""
    setup = group.setup
    ranks = sorted(random.Random(seed).sample(range(setup.processes), case.altered))
    at = _paths(case, group)
    orders: list[Disturbance | None] = [None] * setup.processes
    for rank in ranks:
        # Replicas of one stage have the same state: the same seed alters the same bits.
        own = seed % 2**62 + (0 if case.draws == SAME else rank)
        bits = bits_of(case.bits, case.format or setup.dtype)
        how = Alteration(count=case.flips, bits=bits, burst=case.burst, seed=own)
        orders[rank] = Disturbance(target=case.target, how=how, at=at, format=case.format)
    return ranks, orders


def bits_of(bits: str, format: str) -> str:
    """Return bits of a format as :class:`~holdfast.faults.alteration.Alteration` names them."""
    return f"0:{FORMATS[format].range_of(CRITICAL)[0] - 1}" if bits == BELOW else bits


def _paths(case: Case, group: Group) -> tuple[str, ...]:
    """Return where values are altered: anywhere, or in one layer, counted through all stages."""
    if not case.layer:
        return ()
    layers = [layer for answer in group.undisturbed[: group.setup.stages] for layer in answer["layers"]]
    layer = layers[round(_LAYERS[case.layer] * (len(layers) - 1))]
    # The optimizer keeps its tensors below the parameter's name.
    return (f"{case.target}/{layer}",)


def row_of(group: Group, ranks: Sequence[int], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a trial.

    The class of the outcome is that of the altered process which is worst off: a replica that is altered alone stays
    different for ever. What it were by that of rank 0, and by the mean of all, stands beside it.
    """
    calm = group.undisturbed  # by rank: running statistics of replicas differ, undisturbed, too
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
    alike = {(flip["path"], flip["index"], flip.get("bit")) for flip in flips}  # replicas may alter the same bit
    if len(alike) == 1 and "bit" in flips[0]:
        row |= {"bit": flips[0]["bit"], "in_layer": _layer_of(flips[0]["path"])}
    return row


def _errors(setup: Setup, found: Sequence[Mapping[str, Any]], rank: int, when: str) -> dict[str, Any]:
    """Return how far each layer of the model that a process has, or has a stage of, is from the undisturbed one."""
    first = rank - rank % setup.stages
    layers = {name: error for answer in found[first : first + setup.stages] for name, error in answer[when].items()}
    return {name: {key: error[key] for key in _KEPT} for name, error in layers.items()}


def _layer_of(path: str) -> str:
    """Return the module of a path: ``model/conv1.0.weight`` or ``optimizer/conv1.0.weight/momentum_buffer``."""
    return path.split("/")[1].rpartition(".")[0]
