"""``.npz``: a zip archive of numpy's arrays."""

from __future__ import annotations

import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from holdfast.checkpoint.foreign.base import (
    Spot,
    check_shape,
    check_zip,
    damaged,
    dtype_of,
    member_start,
    not_a,
    refuse,
    row_major,
    state_of,
)
from holdfast.checkpoint.source import Entry, Source

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

_BAD = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, EOFError, RuntimeError, KeyError, MemoryError)
"""What the standard library and numpy raise for archives that are not sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Array:
    member: str
    dtype: np.dtype[Any]
    is_fortran: bool
    entry: Entry


def read_npz(path: Path, stack: ExitStack) -> Source:
    """Open a file of ``numpy.savez``; its arrays are read when they are asked for."""
    archive = _open_archive(path, stack)
    arrays = {name: array for name, array, _ in _arrays(path, archive)}

    def read(name: str) -> torch.Tensor:
        with _opened(path, archive, arrays[name].member) as file:
            return _read(path, arrays[name], file)

    return Source(
        name=str(path),
        kind="npz",
        tensors={name: array.entry for name, array in arrays.items()},
        read=read,
        load=lambda: state_of({name: read(name) for name in arrays}),
    )


def locate_npz(path: Path) -> dict[str, Spot]:
    """Return where the values of each array lie.

    Raises:
        CheckpointError: if one is compressed.
    """
    spots: dict[str, Spot] = {}
    with ExitStack() as stack:
        archive = _open_archive(path, stack)
        for name, array, header_bytes in _arrays(path, archive):
            member = archive.getinfo(array.member)
            if member.compress_type != zipfile.ZIP_STORED:
                refuse(path, f"has the compressed array {name!r:.80}, whose values lie nowhere; use numpy.savez")
            shape = array.entry.shape
            strides = row_major(shape[::-1])[::-1] if array.is_fortran else row_major(shape)
            order = ">" if array.dtype.byteorder == ">" else "<"
            spots[name] = Spot(array.entry, member_start(path, member) + header_bytes, strides, order)
    return spots


def _open_archive(path: Path, stack: ExitStack) -> zipfile.ZipFile:
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except _BAD as error:
        not_a("an .npz file", path, str(error), error)
    check_zip(path, archive, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    return archive


def _arrays(path: Path, archive: zipfile.ZipFile) -> list[tuple[str, _Array, int]]:
    """Return the name of each array, what it is, and how many bytes stand before its values."""
    arrays: dict[str, tuple[str, _Array, int]] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in arrays or name == member.filename:
            damaged(path, f"has the member {member.filename!r:.80}: it must end with .npy, and be there once")
        with _opened(path, archive, member.filename) as file:
            arrays[name] = (name, _describe(path, member, file), file.tell())
    return list(arrays.values())


@contextmanager
def _opened(path: Path, archive: zipfile.ZipFile, member: str) -> Iterator[IO[bytes]]:
    try:
        with archive.open(member) as file:
            yield file
    except _BAD as error:
        why = " ".join(str(error).split())
        damaged(path, f"has the member {member!r:.80}, which cannot be read: {why:.200}", error)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read what stands before an array's values.

    Raises:
        ValueError: if it is no header, or one of numpy's structures.
    """
    version = np.lib.format.read_magic(file)
    if version not in _READ_HEADER:
        msg = f"version {version} of its header is not read; known are 1.0 and 2.0"
        raise ValueError(msg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old files; and a hostile header may hold anything that Python warns of
        try:
            shape, is_fortran, dtype = _READ_HEADER[version](file)
        except Exception as error:  # numpy has Python parse it, which can raise anything
            msg = f"its header cannot be read: {type(error).__name__}: {error}"
            raise ValueError(msg) from error
    return shape, bool(is_fortran), dtype


def _describe(path: Path, member: zipfile.ZipInfo, file: IO[bytes]) -> _Array:
    name = member.filename
    shape, is_fortran, dtype = _header(file)
    entry = Entry(dtype_of(path, name, dtype), check_shape(path, name, shape))
    holds = member.file_size - file.tell()
    if math.prod(entry.shape) * dtype.itemsize != holds:
        damaged(
            path,
            f"has the array {name!r:.80} of shape {list(entry.shape)!r:.80}, which needs {entry.size_bytes} bytes and "
            f"has {holds}",
        )
    return _Array(member=name, dtype=dtype, is_fortran=is_fortran, entry=entry)


def _read(path: Path, array: _Array, file: IO[bytes]) -> torch.Tensor:
    if _header(file) != (array.entry.shape, array.is_fortran, array.dtype):
        damaged(path, "changed while it was read")
    memory = bytearray(array.entry.size_bytes)
    done, view = 0, memoryview(memory)
    while done < len(memory):
        data = file.read(min(len(memory) - done, 1 << 20))
        if not data:
            damaged(path, f"ends inside the array {array.member!r:.80}")
        view[done : done + len(data)] = data
        done += len(data)
    if file.read(1):  # at the end, where the archive's own checksum is looked at
        damaged(path, f"has more in {array.member!r:.80} than the array needs")
    if not memory:
        return torch.empty(array.entry.shape, dtype=array.entry.dtype)
    values = np.frombuffer(memory, dtype=array.dtype)
    values = values.reshape(array.entry.shape, order="F" if array.is_fortran else "C")
    return torch.from_numpy(np.ascontiguousarray(values, dtype=array.dtype.newbyteorder("="))).reshape(
        array.entry.shape
    )
