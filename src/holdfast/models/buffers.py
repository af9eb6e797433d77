"""The model's buffers during a step, which slices change independently: they end as means over the slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import ScriptError
from holdfast.torch_private import buffers_of, copy_each, version_of


class StepBuffers:
    """The model's buffers during a step: every slice starts from their values at the step's beginning.

    Floating-point buffers end as the mean over the slices' values. Integer ones advance by the mean change, rounded
    (``num_batches_tracked``: by one). A buffer that no slice changed keeps its bits. Large buffers (masks, tables) are
    treated as constants, because sending them with every slice would cost more than the step.
    """

    MAX_NUMEL = 1 << 16
    """A forward pass must not change a larger buffer."""

    def __init__(self, model: nn.Module) -> None:
        found = {
            id(buffer): (f"{path}.{name}".lstrip("."), module, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.numel()
        }
        self._places = [(module, name, b) for _, module, name, b in found.values() if b.numel() <= self.MAX_NUMEL]
        self._constants = [place for place in found.values() if place[3].numel() > self.MAX_NUMEL]
        self._versions = [version_of(buffer) for *_, buffer in self._constants]
        self._paths = [path for path, *_, b in found.values() if b.numel() <= self.MAX_NUMEL]
        buffers = [b for *_, b in self._places]
        self._start = [b.detach().clone() for b in buffers]
        self._flat_start = torch.empty(0)
        self.dtype = torch.float64 if any(b.dtype == torch.float64 for b in buffers) else torch.float32
        self._sizes = [b.numel() for b in buffers]
        self._buffer_of = torch.repeat_interleave(torch.tensor(self._sizes, dtype=torch.int64))
        self.numel = sum(self._sizes) + len(buffers)

    def initial(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers by name, with their saved values from the beginning of the current step."""
        return list(zip(self._paths, self._start, strict=True))

    def begin_step(self) -> None:
        """Save the buffers at the beginning of a step."""
        _copy(self._start, self._collected())
        self._flat_start = torch.empty(0)
        self._versions = [version_of(buffer) for *_, buffer in self._constants]

    def rewind(self) -> None:
        """Restore the buffers to the beginning of the step."""
        _copy(self._collected(), self._start)

    def lend(self) -> None:
        """Give the next forward pass its own buffers, from the step's beginning: its backward pass may need them."""
        for (module, name, _), start in zip(self._places, self._start, strict=True):
            buffers_of(module)[name] = start.clone()

    def write_to(self, figures: torch.Tensor) -> None:
        """Write a slice's buffers, followed by the number of changed elements of each.

        Raises:
            ScriptError: if a forward pass changed a buffer that is treated as a constant.
        """
        self._check_constants()
        if not self._places:
            return
        values, changes = figures.split((len(self._buffer_of), len(self._places)))
        if not len(self._flat_start):
            self._buffer_of = self._buffer_of.to(figures.device)
            self._flat_start = torch.empty_like(values)
            self._flatten(self._start, self._flat_start)
        self._flatten(self._collected(), values)
        is_other = _bits(values) != _bits(self._flat_start)
        changes.zero_().index_add_(0, self._buffer_of, is_other.to(changes.dtype))

    def _flatten(self, buffers: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Flatten all buffers into one vector; integer ones as their change since the beginning of the step."""
        values = (
            buffer if buffer.is_floating_point() else buffer.long() - start.long()
            for buffer, start in zip(buffers, self._start, strict=True)
        )
        torch.cat([_flat(value, into.device) for value in values], out=into)

    def set_mean(self, figures: torch.Tensor, in_host: torch.Tensor, num_slices: int) -> None:
        """Set the buffers from the sum over ``num_slices`` slices, which ``in_host`` holds in host memory."""
        if not self._places:
            return
        values, changes = figures[: len(self._buffer_of)], in_host[len(self._buffer_of) :]
        means = (values / num_slices).split(self._sizes)
        ends = [
            start if not changed else mean.view_as(start) if start.is_floating_point() else _advanced(start, mean)
            for start, mean, changed in zip(self._start, means, changes.tolist(), strict=True)
        ]
        _copy(self._collected(), ends)

    def _collected(self) -> list[torch.Tensor]:
        """Return the buffers; a new tensor that the forward pass assigned is copied into the original one."""
        for module, name, buffer in self._places:
            now = buffers_of(module)[name]
            if now is not buffer and now is not None:
                buffer.copy_(now.detach())
                buffers_of(module)[name] = buffer
        return [buffer for *_, buffer in self._places]

    def _check_constants(self) -> None:
        for (path, module, name, buffer), version in zip(self._constants, self._versions, strict=True):
            if version_of(buffer) != version or buffers_of(module)[name] is not buffer:
                raise ScriptError(
                    f"the forward pass changed the buffer {path} of {buffer.numel()} elements; buffers of more than "
                    f"{self.MAX_NUMEL} must stay constant during a step, because they are not averaged"
                )


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value into its tensor, in one call, because separate calls would take longer than the copies."""
    if into:
        copy_each(into, values)


def _flat(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a flat tensor on ``device``, without a call of torch where it is one: a call costs more than the copy."""
    value = value.detach() if value.requires_grad else value
    value = value if value.dim() == 1 else value.flatten()
    return value if value.device == device else value.to(device)


def _advanced(start: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return integers advanced by a mean change, rounded."""
    return start.long() + mean.view_as(start).round().long()


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Return an integer view for bitwise comparison: a NaN equals itself, and the signs of zeros count."""
    return flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32)
