"""Reads and writes values in place in files, so the cost grows with their number and not with the file size."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.blocks import PART_BYTES
from holdfast.checkpoint.storage import step_folder
from holdfast.errors import CheckpointCorrupt, CheckpointError
from holdfast.faults.alteration import ValueChange, ValuePosition
from holdfast.faults.formats import FORMATS, Raw
from holdfast_lab.inject.locate.base import Chunk, Index, Located, Places, Unreachable, member_start

_NEAR_BYTES = 1 << 9
"""Values at most this far apart are read together, because the bytes in between cost less than a call."""
_MOST_BYTES = 1 << 22
"""Largest single read."""
_MOST_VALUES = 1 << 18
"""Tensors are joined up to this many values: beyond it, a call per tensor costs little, and joining takes memory."""

_Runs = list[tuple[tuple["FileBytes", int, str], list[tuple[int, Any, Index]]]]
"""For each file, width and byte order: the tensor, positions among its requested values, and the first byte of each."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of a file that cannot be altered.

    Args:
        path: Its name.
        why: The reason, as the end of a sentence that begins with the path.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class InjectionTarget:
    """What is to be altered.

    Args:
        path: A file of another program, or a directory of checkpoints.
        step: The checkpoint of a directory; None for a file.
    """

    path: Path
    step: int | None = None

    def __str__(self) -> str:
        return str(self.path if self.step is None else self.path / step_folder(self.step))


class FileValues:
    """See :class:`~holdfast.faults.alteration.Values`.

    Args:
        kind: Kind of the file.
        located: Location of each tensor.
        files: All files that contain tensors.
        stack: Closes them.
        write: Whether they may be altered.
        archives: Files with a checksum for the bytes of each tensor, like ZIP archives.
    """

    def __init__(
        self, kind: str, located: Places, files: Iterable[Path], stack: ExitStack, *, write: bool, archives: bool
    ) -> None:
        self.kind = kind
        self._files = {path: FileBytes(path, write=write) for path in files}
        for file in self._files.values():
            stack.callback(file.close)
        self._archives = archives
        self._tensors: list[Located] = []
        self.places: list[ValuePosition] = []
        """The tensors that can be altered."""
        skipped = []
        for name, tensor in located.items():
            if isinstance(tensor, Unreachable):
                skipped.append(Skipped(name, tensor.why))
            elif tensor.dtype not in FORMATS or tensor.dtype == "bool":
                skipped.append(Skipped(name, f"is of {tensor.dtype}"))
            else:
                self._tensors.append(tensor)
                self.places.append(ValuePosition(name, FORMATS[tensor.dtype], tensor.shape))
        self.skipped = tuple(skipped)

    def read(self, wanted: Sequence[tuple[int, Index]]) -> list[Raw]:
        """See :meth:`holdfast.faults.alteration.Values.read`; uncompressed values of one file are read together."""
        found = {place: np.empty(len(index), self.places[place].format.raw) for place, index in wanted}
        runs, chunks = self._find(wanted)
        for (file, width, order), parts in runs:
            read = file.read(np.concatenate([at for _, _, at in parts]), width, order)
            ends = np.cumsum([len(at) for _, _, at in parts])[:-1]
            for (place, which, _), values in zip(parts, np.split(read, ends), strict=True):
                found[place][which] = values
        for place, chunk in chunks:
            found[place][chunk.which] = chunk.exchange(None)[chunk.inner]
        return [found[place] for place, _ in wanted]

    def write(self, changes: Sequence[ValueChange]) -> None:
        """See :meth:`holdfast.faults.alteration.Values.write`; uncompressed values of one file are written together."""
        after = {change.place: change.after for change in changes}
        runs, chunks = self._find([(change.place, change.index) for change in changes])
        for (file, width, order), parts in runs:
            at = np.concatenate([at for _, _, at in parts])
            file.write(at, width, order, np.concatenate([after[place][which] for place, which, _ in parts]))
        for place, chunk in chunks:
            values = chunk.exchange(None)
            values[chunk.inner] = after[place][chunk.which]
            chunk.exchange(values)

    def _find(self, wanted: Sequence[tuple[int, Index]]) -> tuple[_Runs, list[tuple[int, Chunk]]]:
        """Return the uncompressed values, grouped for joint reads and writes, and the chunks of the others."""
        runs: dict[tuple[FileBytes, int, str, int], list[tuple[int, Any, Index]]] = {}
        chunks: list[tuple[int, Chunk]] = []
        before = 0
        for place, index in wanted:
            tensor = self._tensors[place]
            plain, packed = tensor.find(index)
            for path, which, at in plain:
                alike = (self._files[path], tensor.width, tensor.order, before // _MOST_VALUES)
                runs.setdefault(alike, []).append((place, which, at))
            chunks += [(place, chunk) for chunk in packed]
            before += len(index)
        return [(alike[:3], parts) for alike, parts in runs.items()], chunks

    def seal(self, *, keep_digests: bool) -> None:
        """Update the files' checksums of what was written, unless they are to be kept.

        Altered members of an archive are read whole.
        """
        if self._archives and not keep_digests:
            for path, file in self._files.items():
                if file.touched:
                    _renew_checksums(path, file)


class FileBytes:
    """An open file that is altered in place.

    Args:
        path: The file.
        write: Whether it may be altered.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self._path = path
        self.touched: list[Index] = []
        """The first bytes of all values that were written."""
        with explained(path):
            self._number = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, at: Index, width: int, order: str) -> Raw:
        """Return the values that begin at the bytes ``at``, each of ``width`` bytes in this order; shape (k,)."""
        found = np.empty(len(at), f"u{width}")
        alone, runs = _apart(at)
        found[alone] = self._read_each(at[alone], width, order)
        for run in runs:
            first = int(at[run[0]])
            data = self.get(first, int(at[run[-1]]) + width - first)[_bytes_of(at[run] - first, width)]
            found[run] = data.view(f"{order}u{width}").reshape(-1)
        return found

    def write(self, at: Index, width: int, order: str, raw: Raw) -> None:
        """Replace the values that begin at the bytes ``at``."""
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
            raise CheckpointError(
                f"{self._path} took {done} of {new.nbytes} bytes that were to be altered; check whether the disk is "
                "full"
            )

    def get(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return some bytes.

        Raises:
            CheckpointCorrupt: if the file ends before them.
        """
        data = np.empty(size_bytes, np.uint8)
        if self.read_into(offset, data.data) < size_bytes:
            self._refuse(offset + size_bytes)
        return data

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill memory with the bytes from an offset on; return the number of bytes read."""
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
        """The size of the file."""
        return os.fstat(self._number).st_size

    def sync(self) -> None:
        """Make what was written durable."""
        with explained(self._path):
            os.fsync(self._number)

    def close(self) -> None:
        """Close the file."""
        os.close(self._number)

    def _refuse(self, end: int) -> NoReturn:
        raise CheckpointCorrupt(f"{self._path} is damaged: it ends before byte {end}, where values should be")


def _apart(at: Index) -> tuple[Index, list[Index]]:
    """Return the values with no other nearby, and groups of the rest that are close together in the file."""
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


def _renew_checksums(path: Path, file: FileBytes) -> None:
    """Update the CRC of every member that was written to, which reads these members whole."""
    touched = np.sort(np.concatenate(file.touched))
    with zipfile.ZipFile(path) as archive:
        line = archive.start_dir
        for member in archive.infolist():
            start = member_start(path, member)
            end = start + member.compress_size
            if np.searchsorted(touched, start) < np.searchsorted(touched, end):
                _renew(file, member, line, start, end)
            line += 46 + sum(struct.unpack("<3H", bytes(file.get(line + 28, 6))))


def _renew(file: FileBytes, member: zipfile.ZipInfo, line: int, start: int, end: int) -> None:
    """Write the CRC of a member with these data bounds, whose central directory entry begins at ``line``."""
    crc = 0
    for first in range(start, end, PART_BYTES):
        crc = zlib.crc32(file.get(first, min(PART_BYTES, end - first)).data, crc)
    new = struct.pack("<L", crc)
    file.replace(line + 16, new)
    if not member.flag_bits & 8:
        file.replace(member.header_offset + 14, new)
    else:  # it follows the data, usually after a signature
        is_marked = bytes(file.get(end, 4)) == b"PK\7\x08"
        file.replace(end + (4 if is_marked else 0), new)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one line."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.EACCES: "give a file that this user may alter",
            errno.EPERM: "give a file that this user may alter",
            errno.EROFS: "copy it to a writable disk with -o",
            errno.ENOSPC: "free some space",
        }.get(error.errno or 0, "make sure that it can be read and written")
        raise CheckpointError(f"cannot alter {path}: {error.strerror or error}; {advice}") from error
