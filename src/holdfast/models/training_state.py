"""The complete training state: its digest, its copies, and restoring it."""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.format import tensor_bytes


def model_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers with their paths, in path order; tied ones once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return sorted((name, tensor.detach()) for name, tensor in named)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor_bytes(tensor.detach().cpu().contiguous())


def model_sha256(model: nn.Module) -> str:
    """Return the sha256 over the bytes of all parameters and buffers, in path order."""
    return str(_model_hash(model).hexdigest())


def state_sha256(model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None = None) -> str:
    """Return the sha256 over the bytes of the model, of an average of its weights, and of the optimizer state.

    Optimizer state is ordered by parameter number, then by name; tensors as they are, numbers as float64.
    """
    digest = _model_hash(model)
    if average is not None:
        digest.update(_model_hash(average).digest())
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


def clone(value: Any) -> Any:
    """Return a deep copy of a ``state_dict``, which shares nothing with the original."""
    return copy.deepcopy(value)
