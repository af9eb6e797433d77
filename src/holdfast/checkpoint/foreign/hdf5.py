"""``.h5``, ``.hdf5``, ``.weights.h5``: HDF5, as Keras and many programs of science write it.

An HDF5 file may lead to other files, hold programs' own types, and claim shapes that nothing stands behind. Only plain
arrays of numbers inside this one file are read. Attributes are ignored, but for the one that says which integers stand
for bfloat16 or float8 (``formats/hdf5.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.foreign.base import (
    MAX_NAMES,
    check_shape,
    check_size,
    damaged,
    dtype_of,
    not_a,
    refuse,
    state_of,
    total_bytes,
)
from holdfast.checkpoint.format import DTYPES
from holdfast.checkpoint.formats.base import STAND_INS
from holdfast.checkpoint.source import Entry, Source
from holdfast.errors import ConfigError

_MAX_DEPTH = 64
_MAX_HOPS = 16
_MAX_LINKS = 100_000
"""Sixteen soft links can lead through each other a million million times."""

_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
"""Those that come with HDF5 and h5py. Any other would load a library."""

_SMALL_BYTES = 1 << 20
_MOST_RATIO = 2000
"""A data set may be this large however little of it is stored; a larger one so many times what is stored.

Deflate makes zeros a thousand times smaller, and a chunk that is not stored is all zeros.
"""

_BAD = (OSError, RuntimeError, ValueError, TypeError, KeyError, MemoryError, OverflowError, AttributeError)
"""What h5py raises for files that are not sound."""


def read_hdf5(path: Path, stack: ExitStack) -> Source:
    """Open an HDF5 file; its data sets are read when they are asked for."""
    h5py = _import_h5py()
    try:
        file = stack.enter_context(h5py.File(path, "r", locking=False))
    except _BAD as error:
        if isinstance(error, OSError) and error.errno:
            raise
        not_a("an HDF5 file", path, _words(error), error)
    with _explained(path):
        walk = _Walk(path, h5py, file)
        walk.into(file, "", 0)
    check_size(path, total_bytes(walk.tensors))

    def read(name: str) -> torch.Tensor:
        with _explained(path):
            return _read(walk.data[name], walk.tensors[name])

    first = {name: name for name in walk.tensors} | walk.ties

    def load() -> dict[str, Any]:
        tensors = {name: read(name) for name in walk.tensors if name not in walk.ties}
        return state_of({name: tensors[first[name]] for name in walk.tensors})

    return Source(name=str(path), kind="hdf5", tensors=walk.tensors, read=read, load=load, ties=walk.ties)


class _Walk:
    """Finds every data set of a file, once."""

    def __init__(self, path: Path, h5py: Any, file: Any) -> None:
        self.tensors: dict[str, Entry] = {}
        self.data: dict[str, Any] = {}
        self.ties: dict[str, str] = {}
        self._path = path
        self._h5py = h5py
        self._file = file
        self._groups: set[Any] = set()
        self._names: dict[Any, str] = {}
        self._links_left = _MAX_LINKS

    def into(self, group: Any, prefix: str, depth: int) -> None:
        """Look at everything in a group."""
        identity = self._identity(group)
        if identity in self._groups:
            damaged(self._path, f"leads to the group {prefix!r:.80} twice, or round in a circle")
        if depth > _MAX_DEPTH or len(self._groups) > MAX_NAMES:
            damaged(
                self._path, f"has groups deeper than {_MAX_DEPTH} levels, or more than {MAX_NAMES}, at {prefix!r:.80}"
            )
        self._groups.add(identity)
        for name in group:
            whole = f"{prefix}/{name}".removeprefix("/")
            found = self._open(group, name, whole, 0)
            if isinstance(found, self._h5py.Group):
                self.into(found, whole, depth + 1)
            elif isinstance(found, self._h5py.Dataset):
                self._take(found, whole)
            else:
                refuse(self._path, f"has {whole!r:.80}, which is neither a group nor a data set")

    def _open(self, group: Any, name: str, whole: str, hops: int) -> Any:
        """Return what a link leads to, without leaving the file."""
        # Not group.get(), nor "name in group": these look whether what a link leads to is there, and so open other files.
        kinds, links, raw = self._h5py.h5l, group.id.links, name.encode("utf-8", "surrogateescape")
        kind = links.get_info(raw).type
        if kind == kinds.TYPE_HARD:
            return group[name]
        if kind != kinds.TYPE_SOFT:
            where = links.get_val(raw)[0] if kind == kinds.TYPE_EXTERNAL else "somewhere else"
            damaged(self._path, f"has the external link {whole!r:.80} to {where!r:.80}: other files are not opened")
        self._links_left -= 1
        if hops >= _MAX_HOPS or self._links_left < 0:
            damaged(self._path, f"has the soft link {whole!r:.80}, which leads round in a circle, or too far")
        target = links.get_val(raw).decode("utf-8", "surrogateescape")
        here = self._file if target.startswith("/") else group
        for part in target.split("/"):
            if part in ("", "."):
                continue
            is_there = isinstance(here, self._h5py.Group) and here.id.links.exists(
                part.encode("utf-8", "surrogateescape")
            )
            if not is_there:
                damaged(self._path, f"has the soft link {whole!r:.80} to {target!r:.80}, which is not there")
            here = self._open(here, part, whole, hops + 1)
        return here

    def _take(self, dataset: Any, name: str) -> None:
        entry = self._check(dataset, name)
        first = self._names.setdefault(self._identity(dataset), name)
        if first != name:
            self.ties[name] = first
        self.tensors[name], self.data[name] = entry, dataset

    def _check(self, dataset: Any, name: str) -> Entry:
        """Return what a data set is, if it is a plain array of numbers in this file."""
        h5, made = self._h5py, dataset.id.get_create_plist()
        if made.get_external_count():
            damaged(self._path, f"keeps the values of {name!r:.80} in another file: other files are not opened")
        if made.get_layout() not in (h5.h5d.COMPACT, h5.h5d.CONTIGUOUS, h5.h5d.CHUNKED):
            damaged(
                self._path, f"has the virtual data set {name!r:.80}, put together from other files: they are not opened"
            )
        dtype = self._number_type(dataset, name)
        if dataset.shape is None:
            refuse(self._path, f"has the data set {name!r:.80} without a shape, which holds nothing")
        entry = Entry(dtype, check_shape(self._path, name, dataset.shape))
        for number in range(made.get_nfilters()):
            if (code := made.get_filter(number)[0]) not in _FILTERS:
                refuse(
                    self._path, f"has {name!r:.80} packed by filter {code}; known are {', '.join(_FILTERS.values())}"
                )
        if made.get_layout() == h5.h5d.CHUNKED:
            check_size(self._path, Entry(dtype, made.get_chunk()).size_bytes)
        stored_bytes = dataset.id.get_storage_size()
        if entry.size_bytes > max(_SMALL_BYTES, _MOST_RATIO * stored_bytes):
            damaged(
                self._path,
                f"has the data set {name!r:.80} of shape {list(entry.shape)!r:.80}, which needs {entry.size_bytes} bytes; "
                f"only {stored_bytes} are stored",
            )
        return entry

    def _number_type(self, dataset: Any, name: str) -> torch.dtype:
        t = self._h5py.h5t
        kind = dataset.id.get_type().get_class()
        odd = {
            t.COMPOUND: "of a compound type",
            t.REFERENCE: "of references",
            t.STRING: "of texts",
            t.VLEN: "of variable length",
            t.OPAQUE: "of an opaque type",
            t.BITFIELD: "of bit fields",
            t.ARRAY: "of arrays in arrays",
            t.TIME: "of times",
        }
        is_complex = kind == t.COMPOUND and dataset.dtype.kind == "c"
        if kind in odd and not is_complex:
            refuse(self._path, f"has the data set {name!r:.80} {odd[kind]}; it must be of numbers")
        dtype = dtype_of(self._path, name, dataset.dtype)
        if dtype in (torch.uint16, torch.uint8) and "torch_dtype" in dataset.attrs:
            meant = DTYPES.get(str(dataset.attrs["torch_dtype"]), dtype)
            return meant if STAND_INS.get(meant) == dtype else dtype
        return dtype

    def _identity(self, thing: Any) -> Any:
        info = self._h5py.h5o.get_info(thing.id)
        return info.fileno, info.addr


def _read(dataset: Any, entry: Entry) -> torch.Tensor:
    values = np.asarray(dataset[()])
    if values.shape != entry.shape:
        msg = "it changed while it was read"
        raise ValueError(msg)
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    return torch.from_numpy(native).view(entry.dtype).reshape(entry.shape)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except _BAD as error:
        if isinstance(error, ConfigError):  # which is a ValueError, too
            raise
        damaged(path, f"is damaged: {_words(error)}", error)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _import_h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        msg = "HDF5 files need h5py to be read; pip install 'holdfast[hdf5]'"
        raise ConfigError(msg) from error
