"""The state of training as a whole: its digest, copies of it, and how it is put back."""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from holdfast.checkpoint.format import tensor_bytes

_WINDOW_BYTES = 64 << 10
"""How much of the weights the closing sum compares in a step."""


def model_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers with their paths, in path order; tied ones once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return sorted((name, tensor.detach()) for name, tensor in named)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor_bytes(tensor.detach().cpu().contiguous())


def model_sha256(model: nn.Module) -> str:
    """Return the sha256 over the bytes of all parameters and buffers, in path order."""
    return str(_model_hash(model).hexdigest())


def state_sha256(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the sha256 over the model's bytes and then the optimizer's.

    The optimizer's: by number of the parameter, then by name; tensors as they are, numbers as float64.
    """
    digest = _model_hash(model)
    for value in _optimizer_values(optimizer):
        digest.update(_bytes(value) if isinstance(value, torch.Tensor) else struct.pack("<d", float(value)))
    return str(digest.hexdigest())


def _model_hash(model: nn.Module) -> Any:
    digest = hashlib.sha256()
    for _, tensor in model_tensors(model):
        digest.update(_bytes(tensor))
    return digest


def _optimizer_values(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    state: Mapping[int, Mapping[str, Any]] = optimizer.state_dict()["state"]
    for number in sorted(state):
        for name in sorted(state[number]):
            if state[number][name] is not None:
                yield state[number][name]


class RotatingDigest:
    """Hashes another small part of the weights at every step, so that all of them are compared in time.

    Of the parameters only: when a step closes, buffers still hold what the worker's own slices made of them.

    Args:
        model: Whose parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._windows: list[torch.Tensor] = []
        for _, parameter in sorted(model.named_parameters()):
            tensor = parameter.detach()
            if tensor.is_contiguous() and tensor.numel():
                self._windows.extend(torch.split(tensor.view(-1), max(1, _WINDOW_BYTES // tensor.element_size())))

    def of_step(self, step: int) -> int:
        """Return a number from 0 to 2**62 - 1 that is the same wherever the part of this step is."""
        if not self._windows:
            return 0
        return xxhash.xxh3_64_intdigest(_bytes(self._windows[step % len(self._windows)])) >> 2


def clone(value: Any) -> Any:
    """Return a deep copy of a ``state_dict``: nothing in it is shared with what goes on changing."""
    return copy.deepcopy(value)
