"""Values in files: read and written where they lie, so that the cost grows with how many there are of them, not with the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import CheckpointCorrupt, CheckpointError
from holdfast.faults.alteration import Change, Place
from holdfast.faults.formats import Raw

Index = NDArray[np.int64]

_NEAR_BYTES = 1 << 9
"""Values no farther apart are read together: what is between them costs less than a call."""
_MOST_BYTES = 1 << 22
"""No more is read at a time."""
_MOST_VALUES = 1 << 18
"""Tensors are joined until they have so many values: beyond, a call for each costs little, and joining takes memory."""


class Store(Protocol):
    """A tensor whose values can be read and written."""

    @property
    def place(self) -> Place:
        """What it is."""
        ...

    def read(self, index: Index) -> Raw:
        """Return raw values, of shape (k,), for indices in rising order without repetition."""
        ...

    def write(self, index: Index, raw: Raw) -> None:
        """Replace them."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor whose values lie in a file as they are, one behind the other in the order of their indices.

    Args:
        place: What it is.
        file: Which.
        offset: The first byte of the first value.
        order: Of the bytes of a value, ``<`` or ``>``.
    """

    place: Place
    file: Bytes
    offset: int
    order: str

    @property
    def width(self) -> int:
        """Return the bytes of a value."""
        return self.place.format.bits // 8


@dataclass(frozen=True, slots=True)
class Skipped:
    """What is in a file and cannot be altered.

    Args:
        path: Its name.
        why: In words, as the end of a sentence that begins with the path.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be altered.

    Args:
        path: A file of another program, or a directory of checkpoints.
        step: Which checkpoint of a directory; None for a file.
    """

    path: Path
    step: int | None = None

    def __str__(self) -> str:
        if self.step is None:
            return str(self.path)
        from holdfast.checkpoint.storage import step_folder

        return str(self.path / step_folder(self.step))


class FileValues:
    """See :class:`~holdfast.faults.alteration.Values`.

    Args:
        kind: Of the file.
        stores: The tensors.
        skipped: What else is there.
    """

    def __init__(self, kind: str, stores: Sequence[Store | Row], skipped: Sequence[Skipped] = ()) -> None:
        self.kind = kind
        self.skipped = tuple(skipped)
        self._stores = stores
        self._places = [store.place for store in stores]

    @property
    def places(self) -> Sequence[Place]:
        """What can be altered."""
        return self._places

    def read(self, wanted: Sequence[tuple[int, Index]]) -> list[Raw]:
        """See :meth:`holdfast.faults.alteration.Values.read`; all that lies in rows of one file is read at once."""
        found: dict[int, Raw] = {}
        for rows in self._rows(wanted):
            at, ends = _laid_out(rows)
            first = rows[0][1]
            read = np.split(first.file.read(at, first.width, first.order), ends)
            found.update(zip((place for place, _, _ in rows), read, strict=True))
        for place, index in wanted:
            store = self._stores[place]
            if not isinstance(store, Row):
                found[place] = store.read(index)
        return [found[place] for place, _ in wanted]

    def write(self, changes: Sequence[Change]) -> None:
        """See :meth:`holdfast.faults.alteration.Values.write`; all that lies in rows of one file is written at once."""
        after = {change.place: change.after for change in changes}
        for rows in self._rows([(change.place, change.index) for change in changes]):
            at, _ = _laid_out(rows)
            first = rows[0][1]
            first.file.write(at, first.width, first.order, np.concatenate([after[place] for place, _, _ in rows]))
        for change in changes:
            store = self._stores[change.place]
            if not isinstance(store, Row):
                store.write(change.index, change.after)

    def _rows(self, wanted: Sequence[tuple[int, Index]]) -> Iterable[list[tuple[int, Row, Index]]]:
        """Return those of the places that are rows, with what is read and written at once together."""
        alike: dict[tuple[Bytes, int, str, int], list[tuple[int, Row, Index]]] = {}
        before = 0
        for place, index in wanted:
            row = self._stores[place]
            if isinstance(row, Row):
                alike.setdefault((row.file, row.width, row.order, before // _MOST_VALUES), []).append(
                    (place, row, index)
                )
                before += len(index)
        return alike.values()

    def seal(self, *, keep_digests: bool) -> None:
        """Make right whatever digests the file has of what was written, unless they are to be kept."""


class Bytes:
    """An open file, altered in place.

    Args:
        path: Which.
        write: Whether it may be altered.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self._path = path
        self.touched: list[Index] = []
        """The first bytes of all values that were written."""
        with explained(path):
            self._number = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, at: Index, width: int, order: str) -> Raw:
        """Return values that begin at some bytes, each of so many bytes in this order; of shape (k,)."""
        found = np.empty(len(at), f"u{width}")
        alone, runs = _apart(at)
        found[alone] = self._read_each(at[alone], width, order)
        for run in runs:
            first = int(at[run[0]])
            data = self.get(first, int(at[run[-1]]) + width - first)[_bytes_of(at[run] - first, width)]
            found[run] = data.view(f"{order}u{width}").reshape(-1)
        return found

    def write(self, at: Index, width: int, order: str, raw: Raw) -> None:
        """Replace them."""
        new = raw.astype(f"{order}u{width}", copy=False)
        self.touched.append(at)
        alone, runs = _apart(at)
        self._write_each(at[alone], new[alone])
        for run in runs:
            first = int(at[run[0]])
            around = self.get(first, int(at[run[-1]]) + width - first)
            around[_bytes_of(at[run] - first, width)] = new[run].view(np.uint8).reshape(-1, width)
            self.replace(first, around.data)

    def _read_each(self, at: Index, width: int, order: str) -> Raw:
        with explained(self._path):
            data = b"".join(map(os.pread, repeat(self._number), repeat(width), at.tolist()))
        if len(data) < len(at) * width:
            self._refuse(int(at.max()) + width)
        return np.frombuffer(data, f"{order}u{width}").astype(f"u{width}", copy=False)

    def _write_each(self, at: Index, new: Raw) -> None:
        values = new.view(f"V{new.itemsize}").tolist()
        with explained(self._path):
            done = sum(map(os.pwrite, repeat(self._number), values, at.tolist()))
        if done < new.nbytes:
            msg = (
                f"{self._path} took {done} of {new.nbytes} bytes that were to be altered; see whether the disk is full"
            )
            raise CheckpointError(msg)

    def get(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return some bytes.

        Raises:
            CheckpointCorrupt: if the file ends before they do.
        """
        data = np.empty(size_bytes, np.uint8)
        if self.read_into(offset, data.data) < size_bytes:
            self._refuse(offset + size_bytes)
        return data

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill memory with the bytes from an offset on; return how many there were."""
        done = 0
        with explained(self._path):
            while done < len(out) and (got := os.preadv(self._number, [out[done:]], offset + done)):
                done += got
        return done

    def replace(self, offset: int, data: memoryview | bytes) -> None:
        """Replace some bytes."""
        view, done = memoryview(data), 0
        with explained(self._path):
            while done < len(view):
                done += os.pwrite(self._number, view[done:], offset + done)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return os.fstat(self._number).st_size

    def sync(self) -> None:
        """Make what was written durable."""
        with explained(self._path):
            os.fsync(self._number)

    def close(self) -> None:
        """Close it."""
        os.close(self._number)

    def _refuse(self, end: int) -> NoReturn:
        msg = f"{self._path} is damaged: it ends before byte {end}, where values should be"
        raise CheckpointCorrupt(msg)


def _laid_out(rows: Sequence[tuple[int, Row, Index]]) -> tuple[Index, Index]:
    """Return the first bytes of values, row by row, and where those of each row but the first begin among them."""
    at = [index * row.width + row.offset for _, row, index in rows]
    return np.concatenate(at), np.cumsum([len(one) for one in at])[:-1]


def _apart(at: Index) -> tuple[Index, list[Index]]:
    """Return which values have no other near, and of the others, in the order of the file, those that are near each other."""
    order = np.argsort(at, kind="stable")
    is_far = np.ones(len(at) + 1, np.bool_)
    if len(at):
        is_far[1:-1] = (np.diff(at[order]) > _NEAR_BYTES) | (np.diff(at[order] // _MOST_BYTES) > 0)
    is_alone = is_far[:-1] & is_far[1:]
    near = order[~is_alone]
    runs = np.split(near, np.flatnonzero(is_far[:-1][~is_alone])[1:]) if len(near) else []
    return order[is_alone], runs


def _bytes_of(at: Index, width: int) -> Index:
    return at[:, np.newaxis] + np.arange(width)


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, whose values lie in a file as they are.

    Args:
        file: Which.
        offset: Its first byte there.
        start: First index in each dimension of the tensor.
        shape: Of the box.
        strides: From one index to the next in each dimension, in values.
    """

    file: Bytes
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Laid:
    """A tensor whose values lie in files as they are; see :class:`Store`.

    Args:
        place: What it is.
        boxes: Fill it.
        order: Of the bytes of a value, ``<`` or ``>``.
    """

    def __init__(self, place: Place, boxes: Sequence[Box], order: str = "<") -> None:
        self.place = place
        self._boxes = boxes
        self._order = order
        self._width = place.format.bits // 8

    def read(self, index: Index) -> Raw:
        """See :meth:`Store.read`."""
        found = np.empty(len(index), self.place.format.raw)
        for file, which, at in self._found(index):
            found[which] = file.read(at, self._width, self._order)
        return found

    def write(self, index: Index, raw: Raw) -> None:
        """See :meth:`Store.write`."""
        for file, which, at in self._found(index):
            file.write(at, self._width, self._order, raw[which])

    def _found(self, index: Index) -> Iterator[tuple[Bytes, Any, Index]]:
        """Yield in which file some of the values are, which, and the first byte of each."""
        shape = self.place.shape
        if not shape:
            yield self._boxes[0].file, slice(None), index + self._boxes[0].offset
            return
        at = np.stack(np.unravel_index(index, shape))
        for box in self._boxes:
            inner = at - np.array(box.start)[:, np.newaxis]
            inside = np.flatnonzero(((inner >= 0) & (inner < np.array(box.shape)[:, np.newaxis])).all(0))
            if len(inside):
                steps = np.array(box.strides) @ inner[:, inside]
                yield box.file, inside, box.offset + steps * self._width


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the operating system says into one line."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.EACCES: "give a file that this user may alter",
            errno.EPERM: "give a file that this user may alter",
            errno.EROFS: "copy it to a disk that may be written, with -o",
            errno.ENOSPC: "free some space",
        }.get(error.errno or 0, "see to it that it can be read and written")
        msg = f"cannot alter {path}: {error.strerror or error}; {advice}"
        raise CheckpointError(msg) from error
