"""What was altered: value by value, before and after, as :func:`~holdfast.faults.tensors.listed` says it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.faults.alteration import Change, Place
from holdfast.faults.formats import Raw, bits_of, shown


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
        which, bits = bits_of(tensor.place.format, tensor.before, tensor.after, record.scale)
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
        said = map(say, shown(tensors[numbers[0]].place.format, np.concatenate(raw)))
        for number in numbers:
            before, after = (list(islice(said, len(tensors[number].index))) for _ in range(2))
            found[number] = before, after
    return [found[number] for number in range(len(tensors))]
