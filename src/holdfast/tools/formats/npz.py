"""The format of ``numpy.savez``: an uncompressed ZIP archive with one array per member.

``numpy.load(file, allow_pickle=False)`` reads it. Compressed archives of other programs can be read, too. The array of tensor
``model/fc.weight`` has that name, in the member ``model/fc.weight.npy``. bfloat16 and float8, which numpy lacks, are stored as uint16
and uint8 with the same bits; the manifest has the dtype. Ambiguous names are escaped, and no two tensors get the same name:

======================  =========
in the tensor's path    in the name
======================  =========
``%``                   ``%25``
NUL                     ``%00``
``.npy`` at the end     ``%2Enpy``
======================  =========

Source: PKWARE's APPNOTE.TXT 6.3.10, and the format of .npy files in the numpy documentation.
"""

from __future__ import annotations

import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from holdfast.checkpoint.blocks import run
from holdfast.checkpoint.files.base import ALIGN, FileLayout, TensorWriter
from holdfast.checkpoint.format import tensor_bytes
from holdfast.errors import CheckpointError
from holdfast.tools.formats.base import TensorInfo, TensorReader, TensorSource, escaped, numpy_dtype
from holdfast.tools.formats.checks import check_shape, check_zip, damaged, dtype_of, not_a, state_of

_LARGE = 0xFFFFFFFF
"""Marks a 32-bit size or offset whose value is in a 64-bit field."""

_LARGE_FROM = _LARGE
"""The smallest value that needs the 64-bit field."""

_MAX_16 = 0xFFFF
"""Length of the longest name; as a number of members, it marks a 64-bit field, like _LARGE."""

_NEW_YEAR = (0, 1 << 5 | 1)
"""Midnight of 1 January 1980: the file contains no time, so that the same state gives the same bytes."""

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

_BAD = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, EOFError, RuntimeError, KeyError, MemoryError)
"""Exceptions that the standard library and numpy raise for invalid archives."""


class Npz(TensorWriter, TensorReader):
    """See :class:`~holdfast.checkpoint.files.base.TensorWriter`; numpy reads and writes it."""

    name = "npz"

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
        """Write everything except the values. Their checksums precede them, so these are computed from memory."""
        file_name = f"{stem}.npz"
        total = sum(tensor.nbytes for tensor in tensors.values())
        members = run(lambda item: _member(*item), list(tensors.items()), total)
        places: dict[str, tuple[str, int]] = {}
        contents = []
        with (folder / file_name).open("wb") as file:
            for (key, tensor), member in zip(tensors.items(), members, strict=True):
                offset = file.tell()
                contents.append(member.central(offset))
                file.write(member.local(offset) + member.header)
                places[key] = (file_name, file.tell())
                file.seek(tensor.nbytes, os.SEEK_CUR)
            table = b"".join(contents)
            file.write(table + _end(len(contents), len(table), file.tell()))
        return FileLayout(files=(file_name,), places=places)

    def open(self, path: Path, stack: ExitStack) -> TensorSource:
        """See :meth:`TensorReader.open`; arrays are read on demand."""
        archive = open_archive(path, stack)
        arrays = arrays_of(path, archive)

        def read(name: str) -> torch.Tensor:
            with _opened(path, archive, arrays[name].member) as file:
                return _read(path, arrays[name], file)

        return TensorSource(
            name=str(path),
            kind="npz",
            tensors={name: array.entry for name, array in arrays.items()},
            read=read,
            load=lambda: state_of({name: read(name) for name in arrays}),
        )


# ---------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True, slots=True)
class _Member:
    """An array in the archive; ``size_bytes`` and ``crc`` cover its header and its values."""

    name: bytes
    header: bytes
    size_bytes: int
    crc: int

    def local(self, offset: int) -> bytes:
        """Return the local file header of a member at ``offset``, padded so that the values are aligned."""
        sizes = struct.pack("<2HQQ", 1, 16, self.size_bytes, self.size_bytes) if self.size_bytes >= _LARGE_FROM else b""
        padding = -(offset + 30 + len(self.name) + len(sizes) + 6) % ALIGN
        extra = sizes + struct.pack("<3H", 0xD935, 2 + padding, ALIGN) + bytes(padding)  # 0xD935: as in zipalign
        shown = _short(self.size_bytes)
        return (
            struct.pack("<4s2H", b"PK\3\4", *self._kind(sizes))
            + struct.pack("<3H3L2H", 0, *_NEW_YEAR, self.crc, shown, shown, len(self.name), len(extra))
            + self.name
            + extra
        )

    def central(self, offset: int) -> bytes:
        """Return the member's entry in the central directory."""
        large = [size for size in (self.size_bytes, self.size_bytes, offset) if size >= _LARGE_FROM]
        extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        shown = _short(self.size_bytes)
        return (
            struct.pack("<4s3H", b"PK\1\2", 3 << 8 | 45, *self._kind(extra))
            + struct.pack("<3H3L2H", 0, *_NEW_YEAR, self.crc, shown, shown, len(self.name), len(extra))
            + struct.pack("<3H2L", 0, 0, 0, 0o644 << 16, _short(offset))
            + self.name
            + extra
        )

    def _kind(self, large: bytes) -> tuple[int, int]:
        """Return the version that a reader needs, 4.5 for 64-bit fields, and the flag for UTF-8 names."""
        return 45 if large else 20, 0 if self.name.isascii() else 0x800


def _member(key: str, tensor: torch.Tensor) -> _Member:
    plain = escaped(key)
    name = (plain.removesuffix(".npy") + "%2Enpy" if plain.endswith(".npy") else plain).encode() + b".npy"
    if len(name) > _MAX_16:
        raise CheckpointError(
            f"the npz format cannot hold tensor {key:.80}...: its name has {len(name)} bytes, and a ZIP archive allows "
            f"{_MAX_16}; shorten the keys in the state, or choose the format safetensors"
        )
    header = _npy_header(tensor)
    crc = zlib.crc32(tensor_bytes(tensor), zlib.crc32(header))
    return _Member(name, header, len(header) + tensor.nbytes, crc)


def _npy_header(tensor: torch.Tensor) -> bytes:
    # Not numpy's own function: it leaves space for growing arrays, how much depends on its version.
    text = f"{{'descr': '{numpy_dtype(tensor.dtype).str}', 'fortran_order': False, 'shape': {tuple(tensor.shape)}, }}"
    length = -(-(10 + len(text) + 1) // ALIGN) * ALIGN - 10
    return b"\x93NUMPY\1\0" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"


def _end(number: int, table_bytes: int, offset: int) -> bytes:
    """Return the records after the central directory, which begins at ``offset``."""
    large = b""
    if number >= _MAX_16 or table_bytes >= _LARGE_FROM or offset >= _LARGE_FROM:
        large = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, number, number, table_bytes, offset)
        large += struct.pack("<4sLQL", b"PK\6\7", 0, offset + table_bytes, 1)
    shown = min(number, _MAX_16)
    return large + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, shown, shown, _short(table_bytes), _short(offset), 0)


def _short(value: int) -> int:
    return value if value < _LARGE_FROM else _LARGE


# ---------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class NpzArray:
    """An array in an archive; ``header_bytes`` precede its values."""

    member: str
    dtype: np.dtype[Any]
    is_fortran: bool
    header_bytes: int
    entry: TensorInfo


def open_archive(path: Path, stack: ExitStack) -> zipfile.ZipFile:
    """Open an archive that numpy could have written."""
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except _BAD as error:
        not_a("an .npz file", path, str(error), error)
    check_zip(path, archive, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    return archive


def arrays_of(path: Path, archive: zipfile.ZipFile) -> dict[str, NpzArray]:
    """Return the description of each array of an archive."""
    arrays: dict[str, NpzArray] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in arrays or name == member.filename:
            damaged(path, f"has the member {member.filename!r:.80}: it must end with .npy, and occur once")
        with _opened(path, archive, member.filename) as file:
            arrays[name] = _describe(path, member, file)
    return arrays


@contextmanager
def _opened(path: Path, archive: zipfile.ZipFile, member: str) -> Iterator[IO[bytes]]:
    try:
        with archive.open(member) as file:
            yield file
    except _BAD as error:
        why = " ".join(str(error).split())
        damaged(path, f"has the member {member!r:.80}, which cannot be read: {why:.200}", error)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array; raise ``ValueError`` if it is invalid, or that of a structured array."""
    version = np.lib.format.read_magic(file)
    if version not in _READ_HEADER:
        raise ValueError(f"version {version} of its header is not supported; supported are 1.0 and 2.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old files; a malicious header may trigger any warning of Python
        try:
            shape, is_fortran, dtype = _READ_HEADER[version](file)
        except Exception as error:  # numpy lets Python parse it, which can raise anything
            raise ValueError(f"its header cannot be read: {type(error).__name__}: {error}") from error
    return shape, bool(is_fortran), dtype


def _describe(path: Path, member: zipfile.ZipInfo, file: IO[bytes]) -> NpzArray:
    name = member.filename
    shape, is_fortran, dtype = _header(file)
    entry = TensorInfo(dtype_of(path, name, dtype), check_shape(path, name, shape))
    header_bytes = file.tell()
    holds = member.file_size - header_bytes
    if math.prod(entry.shape) * dtype.itemsize != holds:
        damaged(
            path,
            f"has the array {name!r:.80} of shape {list(entry.shape)!r:.80}, which needs {entry.size_bytes} bytes and "
            f"has {holds}",
        )
    return NpzArray(member=name, dtype=dtype, is_fortran=is_fortran, entry=entry, header_bytes=header_bytes)


def _read(path: Path, array: NpzArray, file: IO[bytes]) -> torch.Tensor:
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
    if file.read(1):  # reading the end verifies the archive's own checksum
        damaged(path, f"has more in {array.member!r:.80} than the array needs")
    if not memory:
        return torch.empty(array.entry.shape, dtype=array.entry.dtype)
    values = np.frombuffer(memory, dtype=array.dtype)
    values = values.reshape(array.entry.shape, order="F" if array.is_fortran else "C")
    return torch.from_numpy(np.ascontiguousarray(values, dtype=array.dtype.newbyteorder("="))).reshape(
        array.entry.shape
    )
