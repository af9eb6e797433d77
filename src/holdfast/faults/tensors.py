"""Altering tensors where they lie: :class:`~holdfast.faults.alteration.Values` over live ones, on the CPU or an accelerator.

What is written goes past autograd: no version is counted up, so that a backward pass computes with what lies there by
then, as it would after a fault of the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Change, Place, apply, draw
from holdfast.faults.flip import Flip
from holdfast.faults.formats import FORMATS, Raw, bits_of, shown
from holdfast.faults.names import chosen

MOST_LISTED = 64
"""Of how many altered values it is said one by one what became of them."""

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes; torch can do little with unsigned ones of more than one."""


class Tensors:
    """The values of some tensors, read and written where they lie; no tensor is copied.

    Tensors of formats whose values cannot be altered, as complex numbers, are left out, and so are sparse ones.

    Args:
        named: By path. On the CPU they may have any strides, but no value may lie in two places of one tensor.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        chosen = {path: tensor for path, tensor in named.items() if _format_name(tensor) in FORMATS}
        self.places: Sequence[Place] = [
            Place(path, FORMATS[_format_name(tensor)], tuple(tensor.shape)) for path, tensor in chosen.items()
        ]
        # `.data` shares no version with the tensor.
        raw = [tensor.data.view(_WHOLE[tensor.element_size()]) for tensor in chosen.values()]
        self._raw = [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in raw]

    def read(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[Raw]:
        """See :meth:`~holdfast.faults.alteration.Values.read`."""
        found = []
        for place, index in wanted:
            raw, at = self._raw[place], self._at(place, index)
            values: Raw = raw.numpy()[at] if raw.device.type == "cpu" else raw[_on(raw, at)].cpu().numpy()
            found.append(values.view(self.places[place].format.raw))
        return found

    def write(self, changes: Sequence[Change]) -> None:
        """See :meth:`~holdfast.faults.alteration.Values.write`."""
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
    """Alter tensors where they lie.

    Args:
        named: By path.
        flip: What is to be done; only to those that it names.

    Returns:
        What became of the first values, see :func:`listed`; and how many were altered.

    Raises:
        ConfigError: if it names none of them, or it cannot be done.
    """
    if not named:
        raise ConfigError(
            f"nothing of the target {flip.target} is here; an optimizer keeps nothing before its first step"
        )
    values = Tensors(chosen(named, flip.at))
    changes = draw(values, flip.how)
    apply(values, changes)
    return listed(values.places, changes, flip.how.scale), sum(map(len, changes))


def listed(places: Sequence[Place], changes: Sequence[Change], scale: float | None = None) -> list[dict[str, Any]]:
    """Return what became of the first :data:`MOST_LISTED` values, one entry a flip.

    An entry tells ``path``, ``index`` in row-major order, ``bit`` from the least significant one, and the value ``before``
    and ``after``, all of its flips together; what is infinite or NaN is a text, the hexadecimal digits of its bits.

    Args:
        places: Of the changes.
        changes: What was done.
        scale: What values were multiplied by; None if bits were flipped.
    """
    found: list[dict[str, Any]] = []
    for change in _first(changes, MOST_LISTED):
        path, format = places[change.place].path, places[change.place].format
        values = list(
            zip(change.index.tolist(), shown(format, change.before), shown(format, change.after), strict=True)
        )
        for which, bit in zip(*bits_of(format, change.before, change.after, scale), strict=True):
            index, before, after = values[which]
            found.append({"path": path, "index": index, "bit": bit, "before": before, "after": after})
    return found


def _first(changes: Sequence[Change], most: int) -> Iterator[Change]:
    """Yield the changes of the first values."""
    for change in changes:
        if most > 0:
            yield Change(change.place, change.index[:most], change.before[:most], change.after[:most])
        most -= len(change)


def _format_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's format, none if its values do not lie in memory one by one."""
    return str(tensor.dtype).removeprefix("torch.") if tensor.layout == torch.strided else ""


def _on(raw: torch.Tensor, at: tuple[NDArray[np.int64], ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(axis).to(raw.device) for axis in at)
