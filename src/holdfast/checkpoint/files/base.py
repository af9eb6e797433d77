"""What a file format is: :class:`TensorWriter` lays files out, :class:`TensorReader` opens them and locates their values.

No torch at import: values in HDF5 files are located without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from holdfast.checkpoint.manifest import Manifest

Index = NDArray[np.int64]
"""Indices of values in row-major order, or bytes of a file."""

ALIGN = 64
"""Values begin on cache lines where a format allows it, so that a reader may map the file."""

STAND_INS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}
"""Dtypes that numpy has no name for, and the integers of the same bits that stand for them in its formats."""


class TensorWriter(ABC):
    """A format in which checkpoints are written."""

    name: str
    """What the manifest says under ``format``."""

    @abstractmethod
    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Make files of their final size; values are row-major, little-endian and without padding.

        Args:
            folder: Where; it is there.
            stem: What the file's name begins with, where the format leaves a choice.
            tensors: By name; contiguous, on the CPU. A name may hold any characters.

        Raises:
            OSError: if a file cannot be written.
            CheckpointError: if the format cannot hold a tensor.
        """


class TensorReader(ABC):
    """A format of files that any program wrote."""

    is_zip = False
    """Whether its files are ZIP archives, which have a checksum of the bytes of each tensor."""

    @abstractmethod
    def open(self, path: Path, stack: ExitStack) -> Source:
        """Return what there is to read in a file.

        Args:
            path: Which.
            stack: Closes it; until then values can be read.

        Raises:
            CheckpointCorrupt: if it is not what its format should be: cut short, inconsistent, or made to do harm.
            CheckpointError: if it is sound, and holds something that is no tensor of numbers.
        """

    @abstractmethod
    def locate(self, path: Path, stack: ExitStack) -> Places:
        """Return where the values of each tensor lie; no value is read, and nothing in the file is run.

        Args:
            path: Which.
            stack: Closes what is kept open to reach packed values.

        Raises:
            CheckpointCorrupt: as :meth:`open`.
            CheckpointError: if values do not lie in this file at all.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a format made.

    Args:
        files: Names of the files in the folder.
        places: By name of the tensor, the file and the first byte of its values there.
        has_values: The values are there already.
    """

    files: tuple[str, ...]
    places: dict[str, tuple[str, int]]
    has_values: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint, or a file that another program wrote, whose tensors can be read one by one.

    Args:
        name: Where it is, for messages.
        kind: Its format.
        tensors: By path; tied ones stand here under each of their paths.
        read: Reads one of them. Raises :class:`~holdfast.errors.CheckpointCorrupt` if it is damaged.
        load: Reads everything and puts it together, as :func:`~holdfast.checkpoint.write_plan.take` wants it.
        scalars: What else is in it, by path; None if its format can hold nothing else.
        step: Steps that the state has behind it, None if it is not recorded.
        manifest: That of a checkpoint; None for another program's file.
        written_s: When a checkpoint was completed, seconds since 1970; None if it is not recorded.
    """

    name: str
    kind: str
    tensors: Mapping[str, Entry]
    read: Callable[[str], torch.Tensor]
    load: Callable[[], Any]
    scalars: Mapping[str, Any] | None = None
    step: int | None = None
    manifest: Manifest | None = None
    written_s: float | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    """Paths at which a tensor stands again, and where it stood first."""


class Chunk(NamedTuple):
    """Values that lie packed in a file: all of a chunk are read, and written, together."""

    which: Index
    """Positions of the values among those that were asked for."""
    inner: tuple[Index, ...]
    """Where each of them is in the chunk."""
    exchange: Callable[[NDArray[Any] | None], NDArray[Any]]
    """Writes a chunk as it is given, or returns it as it is, given None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(ABC):
    """Where the values of a tensor lie.

    Args:
        dtype: As torch calls it.
        shape: Of the tensor.
        width: Bytes of a value.
        order: ``<`` if the least significant byte of a value comes first, ``>`` if it comes last.
    """

    dtype: str
    shape: tuple[int, ...]
    width: int
    order: str = "<"

    @abstractmethod
    def find(self, index: Index) -> tuple[list[tuple[Path, Any, Index]], list[Chunk]]:
        """Return where some values are, each once.

        Args:
            index: Of the values, in rising order.

        Returns:
            Of values that lie in a file as they are: the file, their positions in ``index``, and the first byte of each.
            And the chunks of the others.
        """


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, whose values lie in a file as they are.

    Args:
        file: Which.
        offset: The first byte of its first value.
        start: Its first index in each dimension of the tensor.
        shape: Of the box.
        strides: From one index to the next in each dimension, in values.
    """

    file: Path
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes(Located):
    """A tensor whose values lie in files as they are; see :class:`Located`.

    Args:
        boxes: Fill it.
    """

    boxes: tuple[Box, ...]

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
        why: In words, as the end of a sentence that begins with its name.
    """

    why: str


Places = Mapping[str, Located | Unreachable]
"""By name of the tensor, where its values lie, or why they cannot be altered."""


def in_place(path: Path, entry: Entry, offset: int, strides: tuple[int, ...] | None = None, order: str = "<") -> Boxes:
    """Return where a tensor lies whose values lie in one file as they are.

    Args:
        path: Of the file.
        entry: What is known of the tensor.
        offset: The first byte of its first value.
        strides: From one index to the next in each dimension, in values; None: row by row.
        order: Of the bytes of a value.
    """
    start, strides = (0,) * len(entry.shape), row_major(entry.shape) if strides is None else strides
    dtype, box = str(entry.dtype).removeprefix("torch."), Box(path, offset, start, entry.shape, strides)
    return Boxes(dtype=dtype, shape=entry.shape, width=entry.dtype.itemsize, order=order, boxes=(box,))


def apart(located: Mapping[str, Boxes]) -> Places:
    """Return tensors of one box each, without those that share a value with one before, or have two at one place.

    Altered both, the second writing would take back what the first one altered.
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
    """Return the strides of values that lie behind one another, the last index changing first."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return what numpy calls a dtype, or its stand-in."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(STAND_INS.get(name, name))


def escaped(name: str) -> str:
    """Return a name without NUL, where C programs end a name: NUL becomes ``%00``, and ``%`` becomes ``%25``."""
    return name.replace("%", "%25").replace("\0", "%00")
