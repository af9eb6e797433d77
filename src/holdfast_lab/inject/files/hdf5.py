"""HDF5 of any writer: Keras, Chainer, PyTorch with h5py, ours.

What HDF5 keeps as it is, a whole data set or a chunk of one, is altered where it lies, and HDF5 does not hear of it. What
it has packed, or not set aside yet, goes through HDF5: the touched chunks are read, altered and written again. Nothing
outside of the file is opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.faults.alteration import Place
from holdfast.faults.formats import FORMATS, Format, Raw
from holdfast_lab.inject.files.base import Bytes, FileValues, Index, Row, Skipped, Store

_LOSSLESS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 32000: "lzf"}
"""Filters that give back the bits that were put in, and come with HDF5 and h5py."""

_FLOATS = {
    (f.bits, (f.bits - 1, f.mantissa, f.exponent, 0, f.mantissa), (1 << (f.exponent - 1)) - 1): f
    for f in FORMATS.values()
    if f.is_float
}
"""Known floats by their bits, the places of sign, exponent and mantissa, and the bias, as HDF5 says it."""

_BAD = (OSError, RuntimeError, ValueError, TypeError, KeyError, MemoryError, OverflowError, AttributeError)
"""What h5py raises for files that are not sound."""


class Hdf5Values(FileValues):
    """The values of an HDF5 file; see :class:`~holdfast_lab.inject.files.base.FileValues`.

    Args:
        path: Which.
        stack: Closes it.
        write: Whether it may be altered.
    """

    def __init__(self, path: Path, stack: ExitStack, *, write: bool) -> None:
        self._library = _Library(path)
        stack.callback(self._library.close)
        self._bytes = Bytes(path, write=write)
        stack.callback(self._bytes.close)
        stores: list[Store | Row] = []
        skipped: list[Skipped] = []
        with _sound(path):
            for name in self._library.names():
                found = self._look_at(name, self._library.dataset(name))
                (skipped if isinstance(found, Skipped) else stores).append(found)  # type: ignore[arg-type]
        super().__init__("hdf5", stores, skipped)

    def _look_at(self, name: str, dataset: Any) -> Store | Row | Skipped:
        h5, made, space = self._library.h5py, dataset.get_create_plist(), dataset.get_space()
        kind, layout = dataset.get_type(), made.get_layout()
        if made.get_external_count() or layout == h5.h5d.VIRTUAL:
            return Skipped(name, "has its values in another file, which is not opened")
        format = _format_of(h5, dataset, kind)
        if isinstance(format, str):
            return Skipped(name, format)
        if space.get_simple_extent_type() == h5.h5s.NULL:
            return Skipped(name, "has no values")
        for number in range(made.get_nfilters()):
            code = made.get_filter(number)[0]
            if code not in _LOSSLESS or not h5.h5z.get_filter_info(code) & h5.h5z.FILTER_CONFIG_ENCODE_ENABLED:
                return Skipped(
                    name, f"is packed by the filter {_LOSSLESS.get(code, code)}, which cannot write it again"
                )
        place = Place(name, format, space.shape)
        is_big = kind.get_class() != h5.h5t.OPAQUE and kind.get_order() == h5.h5t.ORDER_BE
        order = ">" if is_big else "<"
        # Without values there is no place, whatever HDF5 says.
        is_plain = layout == h5.h5d.CONTIGUOUS and dataset.get_storage_size() > 0
        offset = dataset.get_offset() if is_plain else None
        if offset is not None:
            return Row(place, self._bytes, offset, order)
        return _Packed(place, made, order, self._library, self._bytes)

    def seal(self, *, keep_digests: bool) -> None:
        """See :meth:`FileValues.seal`; what HDF5 itself checks is right as soon as it is written."""
        self._library.close()


class _Library:
    """A file as h5py has it open: for reading, and for writing from when that is first needed."""

    def __init__(self, path: Path) -> None:
        self.h5py = _import_h5py()
        self.path = path
        self._file = self._open("r")

    @property
    def userblock_bytes(self) -> int:
        """How many bytes of the file are before HDF5's own."""
        return int(self._file.userblock_size)

    def names(self) -> list[str]:
        """Return the names of all data sets, each once; links that may lead to other files are not followed."""
        found: list[str] = []

        def visit(name: bytes, info: Any) -> None:
            if info.type == self.h5py.h5o.TYPE_DATASET:
                found.append(name.decode("utf-8", "surrogateescape"))

        self.h5py.h5o.visit(self._file.id, visit, info=True)
        return found

    def dataset(self, name: str) -> Any:
        """Return a data set, as HDF5 itself knows it: what is around it in h5py takes longer than all that is asked."""
        return self.h5py.h5d.open(self._file.id, name.encode("utf-8", "surrogateescape"))

    def begin_writing(self) -> None:
        """Have it open for writing; data sets that were returned before are closed."""
        if self._file.mode == "r":
            self._file.close()
            self._file = self._open("r+")

    def close(self) -> None:
        """Close it; what was written is in the file then."""
        self._file.close()

    def _open(self, mode: str) -> Any:
        with _sound(self.path):
            return self.h5py.File(self.path, mode, locking="best-effort")


class _Packed:
    """A data set that does not lie in the file as it is, or in chunks; see :class:`~holdfast_lab.inject.files.base.Store`."""

    def __init__(self, place: Place, made: Any, order: str, library: _Library, file: Bytes) -> None:
        self.place = place
        self._library = library
        self._file = file
        self._width = place.format.bits // 8
        self._order = order
        has_chunks = made.get_layout() == library.h5py.h5d.CHUNKED
        self._chunk: tuple[int, ...] = made.get_chunk() if has_chunks else place.shape
        # Chunks behind a user block some versions find elsewhere.
        self._has_plain_chunks = has_chunks and not made.get_nfilters() and not library.userblock_bytes

    def read(self, index: Index) -> Raw:
        """See :meth:`Store.read`."""
        found = np.empty(len(index), self.place.format.raw)
        at, packed = self._split(index)
        plain = np.flatnonzero(at >= 0)
        found[plain] = self._file.read(at[plain], self._width, self._order)
        for which, corner, inner in packed:
            found[which] = self._exchange(corner)[inner]
        return found

    def write(self, index: Index, raw: Raw) -> None:
        """See :meth:`Store.write`."""
        at, packed = self._split(index)
        plain = np.flatnonzero(at >= 0)
        self._file.write(at[plain], self._width, self._order, raw[plain])
        if packed:
            self._library.begin_writing()
        for which, corner, inner in packed:
            values = self._exchange(corner)
            values[inner] = raw[which]
            self._exchange(corner, values)

    def _split(self, index: Index) -> tuple[Index, list[tuple[Index, tuple[int, ...], tuple[Index, ...]]]]:
        """Return the first byte of each value, -1 where HDF5 alone can reach it; and these by chunk.

        Of a chunk: which they are, its first index in each dimension, and where in it they are.
        """
        at = np.full(len(index), -1, np.int64)
        if not self.place.shape:
            return at, [(np.arange(len(index)), (), (index,))]
        indices = np.stack(np.unravel_index(index, self.place.shape))
        size = np.array(self._chunk)[:, np.newaxis]
        grid = tuple(-(-whole // part) for whole, part in zip(self.place.shape, self._chunk, strict=True))
        numbers = np.ravel_multi_index(tuple(indices // size), grid)
        order = np.argsort(numbers, kind="stable")
        packed, dataset = [], self._library.dataset(self.place.path)
        for which in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            corner = tuple((indices[:, which[0]] // size[:, 0] * size[:, 0]).tolist())
            inner = tuple(indices[:, which] - np.array(corner)[:, np.newaxis])
            start = dataset.get_chunk_info_by_coord(corner).byte_offset if self._has_plain_chunks else None
            if start is None:
                packed.append((which, corner, inner))
            else:
                at[which] = start + np.ravel_multi_index(inner, self._chunk) * self._width
        return at, packed

    def _exchange(self, corner: tuple[int, ...], values: Any = None) -> Any:
        """Write a chunk as it is given, or return it as it is; in the file's own type, so that no bit is converted."""
        dataset = self._library.dataset(self.place.path)
        h5s, raw = self._library.h5py.h5s, np.dtype(f"{self._order}u{self._width}")
        shape = tuple(min(n, whole - a) for n, whole, a in zip(self._chunk, self.place.shape, corner, strict=True))
        here, there = h5s.ALL, h5s.ALL
        if shape:
            here, there = h5s.create_simple(shape), dataset.get_space()
            there.select_hyperslab(corner, shape)
        with _sound(self._library.path):
            if values is None:
                values = np.empty(shape or (1,), raw)
                dataset.read(here, there, values, dataset.get_type())
            else:
                dataset.write(here, there, values, dataset.get_type())
        return values


def _format_of(h5: Any, dataset: Any, kind: Any) -> Format | str:
    """Return the format of a data set's values, which are of an HDF5 type ``kind``, or why they cannot be altered."""
    t = h5.h5t
    if kind.get_class() == t.FLOAT:
        return _float_format(kind)
    bits = kind.get_size() * 8
    # What HDF5 had no name for when it was written is bytes or whole numbers, and an attribute says what they mean.
    meant = ""
    if kind.get_class() in (t.INTEGER, t.OPAQUE):
        notes = h5.Dataset(dataset).attrs
        meant = next((str(notes[key]) for key in ("torch_dtype", "dtype") if key in notes), "")
    if meant in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        format = FORMATS[meant]
        return format if format.bits == bits else f"is said to be of {meant}, and its values have {bits} bits"
    if kind.get_class() == t.INTEGER and meant.startswith("float8"):
        return f"is of {meant}"
    if kind.get_class() == t.INTEGER:
        name = f"{'' if kind.get_sign() else 'u'}int{bits}"
        is_whole = name in FORMATS and kind.get_precision() == bits
        return FORMATS[name] if is_whole else f"is of whole numbers of {kind.get_precision()} of {bits} bits"
    names = {t.STRING: "texts", t.ENUM: "a bool or another enumeration", t.COMPOUND: "a compound type"}
    return f"is of {names.get(kind.get_class(), 'a type that is no number')}"


def _float_format(kind: Any) -> Format | str:
    bits = kind.get_size() * 8
    format = _FLOATS.get((bits, kind.get_fields(), kind.get_ebias()))
    return f"is of floats of {bits} bits in a form that is not known" if format is None else format


@contextmanager
def _sound(path: Path | str) -> Iterator[None]:
    """Turn what h5py says of a file into one line."""
    try:
        yield
    except _BAD as error:
        if isinstance(error, ConfigError):  # which is a ValueError, too
            raise
        words = " ".join(str(error).split())
        msg = f"{path} cannot be read or altered as HDF5: {words:.200}"
        raise CheckpointCorrupt(msg) from error


def _import_h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        msg = "HDF5 files need h5py to be altered; pip install 'holdfast[hdf5]'"
        raise ConfigError(msg) from error
