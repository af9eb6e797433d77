"""What was altered: value by value, before and after.

Told of each flip are ``path``, ``index`` in row-major order, ``bit`` from the least significant one, and the value ``before``
and ``after``, all of its flips together; what is infinite or NaN is a text, the hexadecimal digits of its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.faults.alteration import Change, Place
from holdfast.faults.formats import Format, Raw


@dataclass(frozen=True, slots=True)
class Recorded:
    """What happened to one tensor.

    Args:
        place: Which.
        index: Of the values, in rising order; of shape (k,).
        before: Of shape (k,).
        after: Of shape (k,).
    """

    place: Place
    index: NDArray[np.int64]
    before: Raw
    after: Raw


@dataclass(frozen=True, slots=True)
class Record:
    """What was altered.

    Args:
        tensors: In which tensors, in the order in which they were altered.
        scale: What values were multiplied by; None if bits were flipped.
    """

    tensors: tuple[Recorded, ...]
    scale: float | None = None


def record_of(places: Sequence[Place], changes: Sequence[Change], scale: float | None) -> Record:
    """Return the record of changes."""
    return Record(tuple(Recorded(places[c.place], c.index, c.before, c.after) for c in changes), scale)


def entries(record: Record) -> Iterator[dict[str, Any]]:
    """Yield what a record says of each flip."""
    for path, flips in flips_of(record, lambda value: value):
        for index, bit, before, after in flips:
            yield {"path": path, "index": index, "bit": bit, "before": before, "after": after}


def flips_of(
    record: Record, say: Callable[[Any], Any]
) -> Iterator[tuple[str, Iterator[tuple[int, int | None, Any, Any]]]]:
    """Yield of each tensor its path, and of each flip index, bit, and the values before and after as ``say`` says them.

    By value, the lowest bit first. Where values were multiplied there is one flip a value, and its bit is None.
    """
    values = _values(record.tensors, say)
    for number, tensor in enumerate(record.tensors):
        which, bits = _bits_of(tensor, record.scale)
        before, after = values[number]
        at = which.tolist()
        index = tensor.index[which].tolist()
        yield tensor.place.path, zip(index, bits, map(before.__getitem__, at), map(after.__getitem__, at), strict=True)


def _values(tensors: Sequence[Recorded], say: Callable[[Any], Any]) -> list[tuple[list[Any], list[Any]]]:
    """Return what the values of tensors were before and after; all of one format together, as they are many small ones."""
    alike: dict[str, list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault(tensor.place.format.name, []).append(number)
    found: dict[int, tuple[list[Any], list[Any]]] = {}
    for numbers in alike.values():
        raw = [raw for number in numbers for raw in (tensors[number].before, tensors[number].after)]
        shown = map(say, _shown(tensors[numbers[0]].place.format, np.concatenate(raw)))
        for number in numbers:
            before, after = (list(islice(shown, len(tensors[number].index))) for _ in range(2))
            found[number] = before, after
    return [found[number] for number in range(len(tensors))]


def _bits_of(tensor: Recorded, scale: float | None) -> tuple[NDArray[np.int64], list[Any]]:
    """Return of each flip which value it is in, and the bit; by value, the lowest bit first."""
    if scale is not None:
        return np.arange(len(tensor.index)), [None] * len(tensor.index)
    width = tensor.place.format.bits // 8
    flipped = (tensor.before ^ tensor.after).astype(f"<u{width}", copy=False).view(np.uint8).reshape(-1, width)
    which, bits = np.nonzero(np.unpackbits(flipped, axis=1, bitorder="little"))
    return which, bits.tolist()


def _shown(format: Format, raw: Raw) -> list[float | int | str]:
    values: list[float | int | str] = format.values(raw).tolist()
    for odd in np.flatnonzero(~format.is_finite(raw)).tolist():
        values[odd] = f"0x{int(raw[odd]):0{format.bits // 4}x}"
    return values
