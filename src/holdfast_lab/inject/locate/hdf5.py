"""Locates values in an HDF5 file of any writer: Keras, Chainer, h5py with PyTorch, Holdfast. Needs no torch.

Uncompressed data, a whole dataset or a chunk of one, are altered in place without HDF5. Compressed data, and data
without allocated storage, go through HDF5: the affected chunks are read, altered and written again. No other file is
opened.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast.tools.formats.base import STAND_INS
from holdfast.tools.formats.hdf5 import FILTERS, explained, import_h5py
from holdfast_lab.inject.locate.base import Chunk, FileBox, FileBoxes, Index, Located, Places, Unreachable, row_major

_ALTERED = "cannot be read or altered as HDF5"

_LOSSLESS = {code: name for code, name in FILTERS.items() if name not in ("nbit", "scaleoffset")}
"""Lossless filters."""

_FLOATS = {
    (8 * width, (8 * width - 1, mantissa, exponent, 0, mantissa), (1 << (exponent - 1)) - 1): name
    for name, width, exponent, mantissa in (
        ("float64", 8, 11, 52),
        ("float32", 4, 8, 23),
        ("float16", 2, 5, 10),
        ("bfloat16", 2, 8, 7),
        ("float8_e4m3fn", 1, 4, 3),
        ("float8_e5m2", 1, 5, 2),
    )
}
"""Known float formats by their bits: the positions of sign, exponent and mantissa, and the bias, in HDF5's terms."""


def locate(path: Path, stack: ExitStack) -> Places:
    """Return the place of each dataset's values; links that may lead to other files are not followed."""
    library = _Library(path)
    stack.callback(library.close)
    with explained(path, _ALTERED):
        return {name: _look_at(library, name) for name in library.names()}


class _Library:
    """A file open in h5py: for reading, and for writing once that is needed."""

    def __init__(self, path: Path) -> None:
        self.h5py = import_h5py(ConfigError("HDF5 files need h5py to be altered; pip install 'holdfast[hdf5]'"))
        self.path = path
        self._file = self._open("r")

    @property
    def userblock_bytes(self) -> int:
        """Number of bytes before HDF5's own data."""
        return int(self._file.userblock_size)

    def names(self) -> list[str]:
        """Return the names of all datasets, each once; links that may lead to other files are not followed."""
        found: list[str] = []

        def visit(name: bytes, info: Any) -> None:
            if info.type == self.h5py.h5o.TYPE_DATASET:
                found.append(name.decode("utf-8", "surrogateescape"))

        self.h5py.h5o.visit(self._file.id, visit, info=True)
        return found

    def dataset(self, name: str) -> Any:
        """Return a dataset of the low-level API; h5py's wrapper takes longer than all that is asked of it."""
        return self.h5py.h5d.open(self._file.id, name.encode("utf-8", "surrogateescape"))

    def begin_writing(self) -> None:
        """Open the file for writing; datasets returned before are closed."""
        if self._file.mode == "r":
            self._file.close()
            self._file = self._open("r+")

    def close(self) -> None:
        """Close the file, which completes the writing."""
        self._file.close()

    def _open(self, mode: str) -> Any:
        with explained(self.path, _ALTERED):
            return self.h5py.File(self.path, mode, locking="best-effort")


def _look_at(library: _Library, name: str) -> Located | Unreachable:
    h5, dataset = library.h5py, library.dataset(name)
    made, space, kind = dataset.get_create_plist(), dataset.get_space(), dataset.get_type()
    layout = made.get_layout()
    if made.get_external_count() or layout == h5.h5d.VIRTUAL:
        return Unreachable("has its values in another file, which is not opened")
    dtype = _dtype_of(h5, dataset, kind)
    if isinstance(dtype, Unreachable):
        return dtype
    if space.get_simple_extent_type() == h5.h5s.NULL:
        return Unreachable("has no values")
    for number in range(made.get_nfilters()):
        code = made.get_filter(number)[0]
        if code not in _LOSSLESS or not h5.h5z.get_filter_info(code) & h5.h5z.FILTER_CONFIG_ENCODE_ENABLED:
            return Unreachable(f"is compressed by the filter {_LOSSLESS.get(code, code)}, which cannot write it again")
    is_big = kind.get_class() != h5.h5t.OPAQUE and kind.get_order() == h5.h5t.ORDER_BE
    shape: tuple[int, ...] = space.shape
    what: dict[str, Any] = {"dtype": dtype, "shape": shape, "width": kind.get_size(), "order": ">" if is_big else "<"}
    # Without values there is no place, whatever HDF5 reports.
    is_plain = layout == h5.h5d.CONTIGUOUS and dataset.get_storage_size() > 0
    if is_plain and (offset := dataset.get_offset()) is not None:
        return FileBoxes(**what, boxes=(FileBox(library.path, offset, (0,) * len(shape), shape, row_major(shape)),))
    has_chunks = layout == h5.h5d.CHUNKED
    return _Packed(
        **what,
        name=name,
        library=library,
        chunk=made.get_chunk() if has_chunks else shape,
        # Some versions misplace chunks behind a user block.
        has_plain_chunks=has_chunks and not made.get_nfilters() and not library.userblock_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed(Located):
    """A dataset that is compressed, or not stored contiguously.

    Args:
        name: Name of the dataset.
        library: The file.
        chunk: Shape of a chunk; that of the whole dataset without chunks.
        has_plain_chunks: Whether chunks are stored uncompressed once they are allocated.
    """

    name: str
    library: _Library
    chunk: tuple[int, ...]
    has_plain_chunks: bool

    def find(self, index: Index) -> tuple[list[tuple[Path, Any, Index]], list[Chunk]]:
        """See :meth:`Located.find`."""
        if not self.shape:
            return [], [Chunk(np.arange(len(index)), (index,), partial(self._exchange, ()))]
        indices = np.stack(np.unravel_index(index, self.shape))
        size = np.array(self.chunk)[:, np.newaxis]
        grid = tuple(-(-whole // part) for whole, part in zip(self.shape, self.chunk, strict=True))
        numbers = np.ravel_multi_index(tuple(indices // size), grid)
        order = np.argsort(numbers, kind="stable")
        plain: list[tuple[Path, Any, Index]] = []
        packed: list[Chunk] = []
        dataset = self.library.dataset(self.name)
        for which in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            corner = tuple((indices[:, which[0]] // size[:, 0] * size[:, 0]).tolist())
            inner = tuple(indices[:, which] - np.array(corner)[:, np.newaxis])
            start = dataset.get_chunk_info_by_coord(corner).byte_offset if self.has_plain_chunks else None
            if start is None:
                packed.append(Chunk(which, inner, partial(self._exchange, corner)))
            else:
                plain.append((self.library.path, which, start + np.ravel_multi_index(inner, self.chunk) * self.width))
        return plain, packed

    def _exchange(self, corner: tuple[int, ...], values: Any = None) -> Any:
        """Write a given chunk, or return it, in the file's own type, so that no bit is converted."""
        if values is not None:
            self.library.begin_writing()
        dataset = self.library.dataset(self.name)
        h5s, raw = self.library.h5py.h5s, np.dtype(f"{self.order}u{self.width}")
        shape = tuple(min(n, whole - a) for n, whole, a in zip(self.chunk, self.shape, corner, strict=True))
        here, there = h5s.ALL, h5s.ALL
        if shape:
            here, there = h5s.create_simple(shape), dataset.get_space()
            there.select_hyperslab(corner, shape)
        with explained(self.library.path, _ALTERED):
            if values is None:
                values = np.empty(shape or (1,), raw)
                dataset.read(here, there, values, dataset.get_type())
            else:
                dataset.write(here, there, values, dataset.get_type())
        return values


def _dtype_of(h5: Any, dataset: Any, kind: Any) -> str | Unreachable:
    """Return torch's name of a dataset's values, which are of an HDF5 type ``kind``, or why they cannot be altered."""
    t, bits, code = h5.h5t, kind.get_size() * 8, kind.get_class()
    if code == t.FLOAT:
        unknown = Unreachable(f"has floats of {bits} bits in an unknown format")
        return _FLOATS.get((bits, kind.get_fields(), kind.get_ebias()), unknown)
    # Types that HDF5 had no name for are stored as bytes or integers, and an attribute gives their meaning.
    meant = ""
    if code in (t.INTEGER, t.OPAQUE):
        notes = h5.Dataset(dataset).attrs
        meant = next((str(notes[key]) for key in ("torch_dtype", "dtype") if key in notes), "")
    if meant in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        fits = np.dtype(STAND_INS[meant]).itemsize * 8 == bits
        return meant if fits else Unreachable(f"is declared as {meant}, but its values have {bits} bits")
    if code == t.INTEGER and meant.startswith("float8"):
        return Unreachable(f"is of {meant}")
    if code == t.INTEGER:
        if bits in (8, 16, 32, 64) and kind.get_precision() == bits:
            return f"{'' if kind.get_sign() else 'u'}int{bits}"
        return Unreachable(f"has integers of {kind.get_precision()} of {bits} bits")
    names = {t.STRING: "texts", t.ENUM: "a bool or another enumeration", t.COMPOUND: "a compound type"}
    return Unreachable(f"is of {names.get(code, 'a type that is no number')}")
