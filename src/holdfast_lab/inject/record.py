"""The record of an alteration: every value before and after, in the form of :func:`~holdfast.faults.tensors.listed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.faults.alteration import ValueChange, ValuePosition
from holdfast.faults.formats import Raw, bits_of, shown


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The alterations of one tensor.

    Args:
        place: The tensor.
        index: Indices of the values, ascending; shape (k,).
        before: Shape (k,).
        after: Shape (k,).
    """

    place: ValuePosition
    index: NDArray[np.int64]
    before: Raw
    after: Raw


@dataclass(frozen=True, slots=True)
class InjectionRecord:
    """A record of alterations.

    Args:
        tensors: The altered tensors, in the order of alteration.
        scale: The factor of the values; None if bits were flipped.
    """

    tensors: tuple[TensorRecord, ...]
    scale: float | None = None


def record_of(places: Sequence[ValuePosition], changes: Sequence[ValueChange], scale: float | None) -> InjectionRecord:
    """Return the record of changes."""
    return InjectionRecord(tuple(TensorRecord(places[c.place], c.index, c.before, c.after) for c in changes), scale)


def entries(record: InjectionRecord) -> Iterator[dict[str, Any]]:
    """Yield the record's entry for each flip."""
    for path, flips in flips_of(record, lambda value: value):
        for index, bit, before, after in flips:
            yield {"path": path, "index": index, "bit": bit, "before": before, "after": after}


def flips_of(
    record: InjectionRecord, say: Callable[[Any], Any]
) -> Iterator[tuple[str, Iterator[tuple[int, int | None, Any, Any]]]]:
    """Yield each tensor's path and flips: index, bit, and values before and after, as formatted by ``say``.

    Ordered by value, the lowest bit first. If values were multiplied, each has one entry, whose bit is None.
    """
    values = _values(record.tensors, say)
    for number, tensor in enumerate(record.tensors):
        which, bits = bits_of(tensor.place.format, tensor.before, tensor.after, record.scale)
        before, after = values[number]
        at = which.tolist()
        index = tensor.index[which].tolist()
        yield tensor.place.path, zip(index, bits, map(before.__getitem__, at), map(after.__getitem__, at), strict=True)


def _values(tensors: Sequence[TensorRecord], say: Callable[[Any], Any]) -> list[tuple[list[Any], list[Any]]]:
    """Return the values of tensors before and after.

    Tensors of one format are processed together, because many are small.
    """
    alike: dict[str, list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault(tensor.place.format.name, []).append(number)
    found: dict[int, tuple[list[Any], list[Any]]] = {}
    for numbers in alike.values():
        raw = [raw for number in numbers for raw in (tensors[number].before, tensors[number].after)]
        said = map(say, shown(tensors[numbers[0]].place.format, np.concatenate(raw)))
        for number in numbers:
            before, after = (list(islice(said, len(tensors[number].index))) for _ in range(2))
            found[number] = before, after
    return [found[number] for number in range(len(tensors))]
