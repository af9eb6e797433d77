"""Places of tensor values in files: :class:`Located`, or :class:`Unreachable` if they cannot be altered."""

from __future__ import annotations

import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.tools.formats.base import TensorInfo
from holdfast.tools.formats.checks import damaged

Index = NDArray[np.int64]
"""Indices of values in row-major order, or bytes of a file."""


class Chunk(NamedTuple):
    """Values stored compressed or chunked in a file; a chunk is read and written as a whole."""

    which: Index
    """Positions of the values among the requested ones."""
    inner: tuple[Index, ...]
    """Index of each of them in the chunk."""
    exchange: Callable[[NDArray[Any] | None], NDArray[Any]]
    """Writes a given chunk, or given None returns the chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(ABC):
    """The place of a tensor's values.

    Args:
        dtype: Its name in torch.
        shape: Shape of the tensor.
        width: Bytes of a value.
        order: ``<`` if the least significant byte of a value comes first, ``>`` if it comes last.
    """

    dtype: str
    shape: tuple[int, ...]
    width: int
    order: str = "<"

    @abstractmethod
    def find(self, index: Index) -> tuple[list[tuple[Path, Any, Index]], list[Chunk]]:
        """Return the places of some values, each once.

        Args:
            index: Indices of the values, ascending.

        Returns:
            For values stored uncompressed: the file, their positions in ``index``, and the first byte of each.
            And the chunks of the others.
        """


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box of a tensor whose values are stored uncompressed in a file.

    Args:
        file: The file.
        offset: The first byte of its first value.
        start: Its first index in each dimension of the tensor.
        shape: Shape of the box.
        strides: From one index to the next in each dimension, in values.
    """

    file: Path
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBoxes(Located):
    """A tensor whose values are stored uncompressed in files; see :class:`Located`.

    Args:
        boxes: The boxes that fill it.
    """

    boxes: tuple[FileBox, ...]

    def find(self, index: Index) -> tuple[list[tuple[Path, Any, Index]], list[Chunk]]:
        """See :meth:`Located.find`."""
        first = self.boxes[0]
        if first.shape == self.shape and first.strides == row_major(self.shape):
            return [(first.file, slice(None), first.offset + index * self.width)], []
        found, at = [], np.stack(np.unravel_index(index, self.shape))
        for box in self.boxes:
            inner = at - np.array(box.start)[:, np.newaxis]
            inside = np.flatnonzero(((inner >= 0) & (inner < np.array(box.shape)[:, np.newaxis])).all(0))
            if len(inside):
                found.append((box.file, inside, box.offset + np.array(box.strides) @ inner[:, inside] * self.width))
        return found, []


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A tensor whose values cannot be altered in place.

    Args:
        why: The reason, as the end of a sentence that begins with its name.
    """

    why: str


Places = Mapping[str, Located | Unreachable]
"""The place of each tensor's values by its name, or why they cannot be altered."""


def in_place(
    path: Path, entry: TensorInfo, offset: int, strides: tuple[int, ...] | None = None, order: str = "<"
) -> FileBoxes:
    """Return the place of a tensor whose values are stored uncompressed in one file.

    Args:
        path: The file.
        entry: Description of the tensor.
        offset: The first byte of its first value.
        strides: From one index to the next in each dimension, in values; None: row-major.
        order: Byte order of a value.
    """
    start, strides = (0,) * len(entry.shape), row_major(entry.shape) if strides is None else strides
    dtype, box = str(entry.dtype).removeprefix("torch."), FileBox(path, offset, start, entry.shape, strides)
    return FileBoxes(dtype=dtype, shape=entry.shape, width=entry.dtype.itemsize, order=order, boxes=(box,))


def apart(located: Mapping[str, FileBoxes]) -> Places:
    """Return tensors of one box each, except those that share values with an earlier one or with themselves.

    Altering both would overwrite the first alteration with the second.
    """
    shared, end = set(), 0
    for name, tensor in sorted(located.items(), key=lambda item: item[1].boxes[0].offset):
        (box,) = tensor.boxes
        reach, is_plain = 1, True
        for stride, size in sorted(zip(box.strides, box.shape, strict=True)):
            if size > 1:
                is_plain = is_plain and stride >= reach
                reach += stride * (size - 1)
        if not math.prod(box.shape):
            continue
        if not is_plain or box.offset < end:
            shared.add(name)
        end = max(end, box.offset + reach * tensor.width)
    why = Unreachable("shares values with another tensor")
    return {name: why if name in shared else tensor for name, tensor in located.items()}


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of contiguous values in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def member_start(path: Path, member: zipfile.ZipInfo) -> int:
    """Return where the data of a member of a zip archive begin."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        damaged(path, f"has no member {member.filename!r:.80} where its central directory says")
    return member.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
