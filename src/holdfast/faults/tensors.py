"""Altering tensors in place: :class:`~holdfast.faults.alteration.Values` over live CPU or accelerator tensors.

Writes bypass autograd: the version counter does not change, so a backward pass computes with the altered values, as it
would after a hardware fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from holdfast.faults.alteration import ValueChange, ValuePosition, apply, draw
from holdfast.faults.flip import Flip
from holdfast.faults.formats import FORMATS, Raw, bits_of, shown
from holdfast.faults.names import chosen

MOST_LISTED = 64
"""Number of altered values that are listed individually."""

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integer types by number of bytes; torch supports few operations on wider unsigned types."""


class Tensors:
    """The values of some tensors, read and written in place; no tensor is copied.

    Tensors of formats whose values cannot be altered, such as complex numbers, are skipped, and so are sparse tensors.

    Args:
        named: Tensors by path. On the CPU they may have any strides, but may not overlap themselves.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        chosen = {path: tensor for path, tensor in named.items() if _format_name(tensor) in FORMATS}
        self.places: Sequence[ValuePosition] = [
            ValuePosition(path, FORMATS[_format_name(tensor)], tuple(tensor.shape)) for path, tensor in chosen.items()
        ]
        # `.data` does not share the tensor's version counter.
        raw = [tensor.data.view(_WHOLE[tensor.element_size()]) for tensor in chosen.values()]
        self._raw = [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in raw]

    def read(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[Raw]:
        results = []
        for place, index in wanted:
            raw, at = self._raw[place], self._at(place, index)
            values: Raw = raw.numpy()[at] if raw.device.type == "cpu" else raw[_on(raw, at)].cpu().numpy()
            results.append(values.view(self.places[place].format.raw))
        return results

    def write(self, changes: Sequence[ValueChange]) -> None:
        for change in changes:
            raw, at, values = self._raw[change.place], self._at(change.place, change.index), change.after
            if raw.device.type == "cpu":
                array = raw.numpy()
                array[at] = values.view(array.dtype)
            else:
                signed = values.view(f"i{values.itemsize}") if values.itemsize > 1 else values
                raw[_on(raw, at)] = torch.from_numpy(signed).to(raw.device)

    def _at(self, place: int, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        shape = tuple(self._raw[place].shape)
        return (index,) if len(shape) == 1 else np.unravel_index(index, shape)


def alter(named: Mapping[str, torch.Tensor], flip: Flip) -> tuple[list[dict[str, Any]], int]:
    """Alter tensors in place.

    Args:
        named: Tensors by path.
        flip: The alteration, applied only to the tensors that it names.

    Returns:
        The first altered values, see :func:`listed`; and how many were altered.

    Raises:
        ConfigError: if it names none of the tensors, or cannot be applied.
    """
    if not named:
        raise ConfigError(
            f"there is no tensor of the target {flip.target} here; an optimizer has no state before its first step"
        )
    values = Tensors(chosen(named, flip.at))
    changes = draw(values, flip.how)
    apply(values, changes)
    return listed(values.places, changes, flip.how.scale), sum(map(len, changes))


def listed(
    places: Sequence[ValuePosition], changes: Sequence[ValueChange], scale: float | None = None
) -> list[dict[str, Any]]:
    """Return the first :data:`MOST_LISTED` altered values, one entry for each flip.

    An entry has ``path``, ``index`` in row-major order, ``bit`` from the least significant one, and the value
    ``before`` and ``after`` all of its flips; an infinite value or NaN is text, the hexadecimal digits of its bits.

    Args:
        places: The places of the changes.
        changes: The changes made.
        scale: The factor that values were multiplied by; None if bits were flipped.
    """
    entries: list[dict[str, Any]] = []
    for change in _first(changes, MOST_LISTED):
        path, format = places[change.place].path, places[change.place].format
        values = list(
            zip(change.index.tolist(), shown(format, change.before), shown(format, change.after), strict=True)
        )
        for which, bit in zip(*bits_of(format, change.before, change.after, scale), strict=True):
            index, before, after = values[which]
            entries.append({"path": path, "index": index, "bit": bit, "before": before, "after": after})
    return entries


def _first(changes: Sequence[ValueChange], most: int) -> Iterator[ValueChange]:
    """Yield the changes of the first ``most`` values."""
    for change in changes:
        if most > 0:
            yield ValueChange(change.place, change.index[:most], change.before[:most], change.after[:most])
        most -= len(change)


def _format_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's format, "" if its values are not stored individually in memory."""
    return str(tensor.dtype).removeprefix("torch.") if tensor.layout == torch.strided else ""


def _on(raw: torch.Tensor, at: tuple[NDArray[np.int64], ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(axis).to(raw.device) for axis in at)
