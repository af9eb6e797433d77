"""What a process of a warm group does: load the restart state, alter it, resume training, and report the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Alteration, ValueChange, apply, draw
from holdfast.faults.names import chosen
from holdfast.faults.tensors import Tensors, listed
from holdfast_lab.studies.outcomes import are_finite, digest, layer_errors
from holdfast_lab.studies.soft_errors.setup import SoftErrorSetup
from holdfast_lab.studies.soft_errors.workers.platforms import ModelPlatform, make_platform
from holdfast_lab.studies.soft_errors.workers.state import read_state, tensors_of, write_state
from holdfast_lab.studies.warm import HeldTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """The alteration of a process's state before it resumes.

    Args:
        target: ``model`` or ``optimizer``.
        how: The alteration, and how it is drawn.
        at: Alter only tensors at or below these paths; empty: all tensors.
        format: Convert values to this format, alter them, and convert them back; "": alter them as stored.
        file: Draw nothing: load the state of this file.
    """

    target: str = "model"
    how: Alteration | None = None
    at: tuple[str, ...] = ()
    format: str = ""
    file: str = ""


class RankProcess:
    """This process's part of the training.

    Args:
        setup: The training.
        rank: The rank of this process.
        file: The file of the state: loaded if it exists, else written.
    """

    def __init__(self, setup: SoftErrorSetup, rank: int, file: Path) -> None:
        self._setup, self._file = setup, file
        self._platform = make_platform(setup, rank)
        self._undisturbed: list[dict[str, Tensor]] = []

    def begin(self) -> list[dict[str, Any]]:
        """Train to the restart epoch, or load the state file; then resume undisturbed and return the result."""
        is_known = self._file.exists()
        # Train an epoch from a loaded state too: DDP reduces gradients in another order after its first step.
        for epoch in range(1 if is_known else self._setup.restart):
            self._platform.train(epoch)
        if is_known:
            read_state(self._platform, self._file)
        else:
            write_state(self._platform, self._setup.restart, self._file)
        self._held = HeldTraining(self._platform.module, self._platform.optimizer, self._platform.scheduler)
        return [self.go_on([None])[0] | {"layers": layers_of(self._platform), "file": str(self._file)}]

    def go_on(self, disturbances: Sequence[Disturbance | None]) -> list[dict[str, Any]]:
        """Load the restart state, alter it, train to the end, and return the result.

        Args:
            disturbances: One entry: that of this process.
        """
        platform = self._platform
        self._held.restore()
        flips, count = self._disturb(disturbances[0]) if disturbances[0] else ([], 0)
        begun_with = digest_of(platform)
        losses: list[float] = []
        states = []
        for epoch in range(self._setup.restart, self._setup.restart + self._setup.epochs):
            losses.append(platform.train(epoch))
            is_over = len(losses) == self._setup.epochs or not math.isfinite(losses[-1])  # NaN: the outcome is known
            if len(losses) == 1 or is_over:
                states.append(copied(platform))
            if is_over:
                break
        if not self._undisturbed:
            self._undisturbed = states
        return [
            {"flips": flips, "flipped": count, "begun_with": begun_with}
            | seen(platform, losses)
            | errors_of(states, self._undisturbed)
        ]

    def _disturb(self, disturbance: Disturbance) -> tuple[list[dict[str, Any]], int]:
        if disturbance.file:
            read_state(self._platform, Path(disturbance.file))
            return [], 0
        assert disturbance.how is not None
        try:
            there = chosen(tensors_of(self._platform, disturbance.target), disturbance.at)
        except ConfigError:  # another process has that layer
            return [], 0
        return alter(there, disturbance.how, disturbance.format)


def alter(there: Mapping[str, Tensor], how: Alteration, format: str = "") -> tuple[list[dict[str, Any]], int]:
    """Alter tensors; return the first changes and the number of flipped bits.

    Args:
        there: The tensors by path.
        how: The alteration.
        format: Convert the chosen values to this format, alter them, and convert them back; other values are untouched.
    """
    dtype = getattr(torch, format) if format else None
    lying = {path: tensor if dtype is None else tensor.to(dtype) for path, tensor in there.items()}
    values = Tensors(lying)
    changes = draw(values, how)
    apply(values, changes)
    if dtype is not None:
        for change in changes:
            path = values.places[change.place].path
            _put_back(there[path], lying[path], change)
    return listed(values.places, changes), sum(map(_bits, changes))


def _bits(change: ValueChange) -> int:
    """Return the number of flipped bits."""
    return int(np.unpackbits((change.before ^ change.after).view(np.uint8)).sum())


def _put_back(tensor: Tensor, altered: Tensor, change: ValueChange) -> None:
    index = torch.from_numpy(change.index)
    with torch.no_grad():
        tensor.view(-1)[index] = altered.view(-1)[index].to(tensor.dtype)


def seen(platform: ModelPlatform, losses: Sequence[float]) -> dict[str, Any]:
    """Return the results of a training in this process.

    Args:
        platform: The training at its end.
        losses: The loss of each epoch.
    """
    accuracy, test_loss = platform.evaluate()
    return {
        "accuracy": accuracy,
        "test_loss": test_loss,
        "losses": list(losses),
        "finite": are_finite(losses, tensors_of(platform, "model").values()),
        "ended_with": digest_of(platform),
    }


def errors_of(states: Sequence[Mapping[str, Tensor]], undisturbed: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return the deviation of each layer after the first epoch and at the end.

    Args:
        states: Weights after the first epoch and at the end; a single entry if the first epoch was the last.
        undisturbed: The same of the undisturbed run.
    """
    first = layer_errors(undisturbed[0], states[0])
    last = first if len(undisturbed) == 1 else layer_errors(undisturbed[-1], states[-1])
    return {"errors_first": first, "errors_last": last}


def digest_of(platform: ModelPlatform) -> str:
    """Return a digest of all tensors that may be altered."""
    return digest(tensors_of(platform, "model") | tensors_of(platform, "optimizer"))


def copied(platform: ModelPlatform) -> dict[str, Tensor]:
    """Return a copy of the weights and floating-point buffers, by name."""
    begin = len("model/")
    return {path[begin:]: tensor.clone() for path, tensor in tensors_of(platform, "model").items()}


def layers_of(platform: ModelPlatform) -> list[str]:
    """Return the modules that have weights, in model order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in platform.module.named_parameters()))
