"""HDF5: one data set per tensor, in groups that follow its path.

``h5py.File(file)["model/fc.weight"][...]`` reads it, and so does every HDF5 library since 1.8. Values are contiguous.
bfloat16 and float8, which HDF5 lacks, are stored as uint16 and uint8 with the same bits, with an attribute
``torch_dtype`` that names the dtype; bool is h5py's enumeration, complex numbers are its pairs ``r``, ``i``.

Paths that HDF5 would interpret are escaped, and no two tensors get the same name:

=========================================  ==========
in the tensor's path                       in the file
=========================================  ==========
``%``                                      ``%25``
NUL                                        ``%00``
a part that is ``.``                       ``%2E``
an empty part, as between two ``/``        ``%``
all of ``a``, where there is ``a/b`` too   ``a%``
=========================================  ==========

A file of another program may link to other files, contain custom types, and declare shapes without stored values.
Only plain numeric arrays inside this one file are read. Attributes are ignored, except for those that mark integers
as bfloat16 or float8.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.checkpoint.files.base import ALIGN, FileLayout, TensorWriter
from holdfast.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.tools.formats.base import STAND_INS, TensorInfo, TensorReader, TensorSource, escaped, numpy_dtype
from holdfast.tools.formats.checks import (
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

if TYPE_CHECKING:
    import torch

FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
"""The filters that come with HDF5 and h5py. Any other would load a library."""

_BAD = (OSError, RuntimeError, ValueError, TypeError, KeyError, MemoryError, OverflowError, AttributeError)
"""Exceptions that h5py raises for invalid files."""

_MAX_DIMENSIONS = 32
_MAX_DEPTH = 64
_MAX_HOPS = 16
_MAX_LINKS = 100_000
"""Maximum number of links: sixteen soft links can reference each other 10**12 times."""

_SMALL_BYTES = 1 << 20
_MOST_RATIO = 2000
"""A data set may have ``_SMALL_BYTES`` however little of it is stored; a larger one up to this multiple of its stored size.

Deflate shrinks zeros to a thousandth, and a chunk that is not stored is all zeros.
"""


class Hdf5(TensorWriter, TensorReader):
    """See :class:`~holdfast.checkpoint.files.base.TensorWriter`; every HDF5 library reads and writes it."""

    name = "hdf5"

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
        """Let HDF5 allocate the space of all values, without writing them."""
        h5py = import_h5py(
            CheckpointError(
                "checkpoints in the format hdf5 need h5py; pip install 'holdfast[hdf5]', or choose the format safetensors"
            )
        )
        file_name = f"{stem}.h5"
        names = _names(tensors)
        places: dict[str, tuple[str, int]] = {}
        # Most programs read "earliest". No other process opens the file, and locking fails on some network file systems.
        # Tensors smaller than a cache line are not aligned: HDF5 keeps a list of the gaps, and slows down as it grows.
        aligned = {"alignment_threshold": ALIGN, "alignment_interval": ALIGN}
        with _plain_errors(), h5py.File(folder / file_name, "w", libver="earliest", locking=False, **aligned) as file:
            properties = _properties(h5py)
            for key, tensor in tensors.items():
                places[key] = (file_name, _add(h5py, file, names[key], tensor, properties))
        return FileLayout(files=(file_name,), places=places)

    def open(self, path: Path, stack: ExitStack) -> TensorSource:
        """See :meth:`TensorReader.open`; data sets are read on demand."""
        h5py = import_h5py(ConfigError("HDF5 files need h5py to be read; pip install 'holdfast[hdf5]'"))
        try:
            file = stack.enter_context(h5py.File(path, "r", locking=False))
        except _BAD as error:
            if isinstance(error, OSError) and error.errno:
                raise
            not_a("an HDF5 file", path, _words(error), error)
        with explained(path, "is damaged"):
            walk = _Walk(path, h5py, file)
            walk.into(file, "", 0)
        check_size(path, total_bytes(walk.tensors))

        def read(name: str) -> torch.Tensor:
            with explained(path, "is damaged"):
                return _read(walk.data[name], walk.tensors[name])

        first = {name: name for name in walk.tensors} | walk.ties

        def load() -> dict[str, Any]:
            tensors = {name: read(name) for name in walk.tensors if name not in walk.ties}
            return state_of({name: tensors[first[name]] for name in walk.tensors})

        return TensorSource(name=str(path), kind="hdf5", tensors=walk.tensors, read=read, load=load, ties=walk.ties)


# ---------------------------------------------------------------------------------------------
# Writing


def _properties(h5py: Any) -> tuple[Any, Any]:
    """Return the property lists for creating data sets and links."""
    making = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    making.set_layout(h5py.h5d.CONTIGUOUS)
    making.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    making.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    making.set_obj_track_times(False)  # the same state gives the same bytes
    linking = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    linking.set_create_intermediate_group(True)
    linking.set_char_encoding(h5py.h5t.CSET_UTF8)
    return making, linking


def _add(h5py: Any, file: Any, name: str, tensor: torch.Tensor, properties: tuple[Any, Any]) -> int:
    """Create a data set; return the offset of its values, arbitrary if it has none."""
    if tensor.dim() > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"the hdf5 format cannot hold tensor {name!r}: it has {tensor.dim()} dimensions, and HDF5 allows "
            f"{_MAX_DIMENSIONS}; reshape it, or choose the format safetensors"
        )
    dtype = h5py.h5t.py_create(numpy_dtype(tensor.dtype), logical=True)
    space = h5py.h5s.create_simple(tuple(tensor.shape))
    # Not file.create_dataset(): for a scalar it ignores early allocation.
    made = h5py.h5d.create(file.id, name.encode(), dtype, space, *properties)
    if (name_of_dtype := str(tensor.dtype).removeprefix("torch.")) in STAND_INS:
        h5py.Dataset(made).attrs["torch_dtype"] = name_of_dtype
    return made.get_offset() or 0


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn the multi-line reports of HDF5 into the operating system's error that they contain."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        match = re.search(r"errno = ([0-9]+)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error


def _names(keys: Iterable[str]) -> dict[str, str]:
    """Return each tensor's name in the file; the module's docstring has the rules."""
    names = {key: "/".join(_part(part) for part in key.split("/")) for key in keys}
    groups = {name[:end] for name in names.values() for end, letter in enumerate(name) if letter == "/"}
    return {key: f"{name}%" if name in groups else name for key, name in names.items()}


def _part(part: str) -> str:
    return {"": "%", ".": "%2E"}.get(part) or escaped(part)


# ---------------------------------------------------------------------------------------------
# Reading


class _Walk:
    """Finds every data set of a file, once."""

    def __init__(self, path: Path, h5py: Any, file: Any) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.data: dict[str, Any] = {}
        self.ties: dict[str, str] = {}
        self._path = path
        self._h5py = h5py
        self._file = file
        self._groups: set[Any] = set()
        self._names: dict[Any, str] = {}
        self._links_left = _MAX_LINKS

    def into(self, group: Any, prefix: str, depth: int) -> None:
        """Visit everything in a group."""
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
            node = self._open(group, name, whole, 0)
            if isinstance(node, self._h5py.Group):
                self.into(node, whole, depth + 1)
            elif isinstance(node, self._h5py.Dataset):
                self._take(node, whole)
            else:
                refuse(self._path, f"has {whole!r:.80}, which is neither a group nor a data set")

    def _open(self, group: Any, name: str, whole: str, hops: int) -> Any:
        """Return the target of a link, without leaving the file."""
        # Not group.get(), nor "name in group": these check whether the target of a link exists, and so open other files.
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
        node = self._file if target.startswith("/") else group
        for part in target.split("/"):
            if part in ("", "."):
                continue
            raw = part.encode("utf-8", "surrogateescape")
            if not (isinstance(node, self._h5py.Group) and node.id.links.exists(raw)):
                damaged(self._path, f"has the soft link {whole!r:.80} to {target!r:.80}, which is not there")
            node = self._open(node, part, whole, hops + 1)
        return node

    def _take(self, dataset: Any, name: str) -> None:
        entry = self._check(dataset, name)
        first = self._names.setdefault(self._identity(dataset), name)
        if first != name:
            self.ties[name] = first
        self.tensors[name], self.data[name] = entry, dataset

    def _check(self, dataset: Any, name: str) -> TensorInfo:
        """Return the entry of a data set, if it is a plain numeric array in this file."""
        h5, made = self._h5py, dataset.id.get_create_plist()
        if made.get_external_count():
            damaged(self._path, f"keeps the values of {name!r:.80} in another file: other files are not opened")
        if made.get_layout() not in (h5.h5d.COMPACT, h5.h5d.CONTIGUOUS, h5.h5d.CHUNKED):
            damaged(
                self._path, f"has the virtual data set {name!r:.80}, assembled from other files: they are not opened"
            )
        dtype = self._number_type(dataset, name)
        if dataset.shape is None:
            refuse(self._path, f"has the data set {name!r:.80} without a shape, which holds nothing")
        entry = TensorInfo(dtype, check_shape(self._path, name, dataset.shape))
        for number in range(made.get_nfilters()):
            if (code := made.get_filter(number)[0]) not in FILTERS:
                refuse(self._path, f"has {name!r:.80} packed by filter {code}, not by {', '.join(FILTERS.values())}")
        if made.get_layout() == h5.h5d.CHUNKED:
            check_size(self._path, TensorInfo(dtype, made.get_chunk()).size_bytes)
        stored_bytes = dataset.id.get_storage_size()
        if entry.size_bytes > max(_SMALL_BYTES, _MOST_RATIO * stored_bytes):
            damaged(
                self._path,
                f"has the data set {name!r:.80} of shape {list(entry.shape)!r:.80}, which needs {entry.size_bytes} bytes; "
                f"only {stored_bytes} are stored",
            )
        return entry

    def _number_type(self, dataset: Any, name: str) -> torch.dtype:
        from holdfast.checkpoint.format import DTYPES

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
            refuse(self._path, f"has the data set {name!r:.80} {odd[kind]}; it must be numeric")
        dtype = dtype_of(self._path, name, dataset.dtype)
        if dataset.dtype.kind == "u" and "torch_dtype" in dataset.attrs:
            meant = str(dataset.attrs["torch_dtype"])
            return DTYPES[meant] if STAND_INS.get(meant) == dataset.dtype.name else dtype
        return dtype

    def _identity(self, thing: Any) -> Any:
        info = self._h5py.h5o.get_info(thing.id)
        return info.fileno, info.addr


def _read(dataset: Any, entry: TensorInfo) -> torch.Tensor:
    import torch

    values = np.asarray(dataset[()])
    if values.shape != entry.shape:
        raise ValueError("it changed while it was read")
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    return torch.from_numpy(native).view(entry.dtype).reshape(entry.shape)


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """Turn an h5py error on a file into one line, which begins with ``what``."""
    try:
        yield
    except _BAD as error:
        if isinstance(error, ConfigError):  # a ValueError, too
            raise
        damaged(path, f"{what}: {_words(error)}", error)


def _words(error: BaseException) -> str:
    """Return h5py's message in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def import_h5py(missing: HoldfastError) -> Any:
    """Return h5py; raise ``missing`` if it is not installed."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise missing from error
