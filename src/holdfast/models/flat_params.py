"""Flattened parameters and optimizer state of a part of a model, divided into equal blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.models.part import ModelPart

BLOCK_BYTES = 64
"""Parameters are aligned to this many bytes, like torch's allocations: a matrix product may depend on the alignment."""


def in_row(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Move parameters of one dtype and device into one flat tensor there, and return it."""
    first = parameters[0]
    row = torch.zeros(sum(map(_padded_numel, parameters)), dtype=first.dtype, device=first.device)
    for parameter, place in views(parameters, row):
        parameter.data = place.copy_(parameter.detach())
    return row


def views(parameters: Sequence[nn.Parameter], row: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield parameters, each with the view of its shape at its offset in ``row``."""
    at = 0
    for parameter in parameters:
        yield parameter, row[at : at + parameter.numel()].view(parameter.shape)
        at += _padded_numel(parameter)


def _padded_numel(parameter: nn.Parameter) -> int:
    step = BLOCK_BYTES // parameter.element_size()
    return -(-parameter.numel() // step) * step


def check_in_host(device: torch.device) -> None:
    """Check that a part can be saved in blocks.

    Raises:
        ConfigError: if it is not in CPU memory.
    """
    if device.type != "cpu":
        raise ConfigError(f"mirror_every above 1 needs a model in CPU memory, got one on {device}: leave it out")


class FlatParams:
    """A part whose parameters lie in ``row``, in blocks of :data:`BLOCK_BYTES` that never straddle two parameters.

    Optimizer state with one number per element is moved into rows, too. All must have one dtype.
    """

    def __init__(self, part: ModelPart, row: torch.Tensor) -> None:
        self._part = part
        self._row = row
        self._parameters = list(part.model.parameters())
        if types := {p.dtype for p in self._parameters} - {row.dtype}:
            dtype_names = ", ".join(sorted(str(t).removeprefix("torch.") for t in {row.dtype, *types}))
            raise ConfigError(
                f"mirror_every above 1 needs parameters of one dtype in each part of the model, got {dtype_names}"
            )
        self._of_optimizer: dict[str, torch.Tensor] = {}

    def of_parameters(self) -> torch.Tensor:
        """Return the parameters; a view of shape (blocks, elements per block)."""
        return self._row.view(-1, BLOCK_BYTES // self._row.element_size())

    def of_optimizer(self) -> tuple[torch.Tensor, ...]:
        """Return the optimizer state tensors in the same shape, by name; empty before the optimizer's first step."""
        state = self._part.optimizer.state
        names = {
            name
            for parameter in self._parameters
            for name, value in state.get(parameter, {}).items()
            if self._is_alike(value, parameter)
        }
        shape = self.of_parameters().shape
        return tuple(self._moved(name).view(shape) for name in sorted(names))

    def _moved(self, name: str) -> torch.Tensor:
        """Return the row of one kind of optimizer state, which lives there from now on."""
        if name not in self._of_optimizer:
            self._of_optimizer[name] = torch.zeros_like(self._row)
        row = self._of_optimizer[name]
        for parameter, place in views(self._parameters, row):
            kept = self._part.optimizer.state.get(parameter, {})
            if self._is_alike(kept.get(name), parameter) and kept[name].data_ptr() != place.data_ptr():
                kept[name] = place.copy_(kept[name])
        return row

    def _is_alike(self, kept: Any, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer keeps one number per element of a parameter, and not one for all of it."""
        return (
            isinstance(kept, torch.Tensor)
            and kept.dtype == self._row.dtype
            and kept.shape == parameter.shape
            and parameter.dim() > 0
        )
