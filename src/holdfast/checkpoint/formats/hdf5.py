"""HDF5: one data set a tensor, in groups that follow its path.

``h5py.File(file)["model/fc.weight"][...]`` reads it, and so does every HDF5 library since 1.8. Values are contiguous.
bfloat16 and float8, which HDF5 has no names for, are uint16 and uint8 of the same bits, with an attribute
``torch_dtype`` that says what they are; bool is h5py's enumeration, complex numbers are its pairs ``r``, ``i``.

Paths that HDF5 would read otherwise are escaped, and no two tensors get the same name:

=========================================  ==========
in the tensor's path                       in the file
=========================================  ==========
``%``                                      ``%25``
NUL                                        ``%00``
a part that is ``.``                       ``%2E``
an empty part, as between two ``/``        ``%``
all of ``a``, where there is ``a/b`` too   ``a%``
=========================================  ==========
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.formats.base import ALIGN, STAND_INS, Layout, escaped, numpy_dtype
from holdfast.errors import CheckpointError

_MAX_DIMENSIONS = 32


class Hdf5:
    """See :class:`~holdfast.checkpoint.formats.base.TensorFormat`; other programs read the file with HDF5."""

    name = "hdf5"

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Have HDF5 set the places of all values aside, and write none of them."""
        h5py = _import_h5py()
        file_name = f"{stem}.h5"
        names = _names(tensors)
        places: dict[str, tuple[str, int]] = {}
        # "earliest" is what most programs read. The file is ours alone: a lock would only fail on some network disks.
        # Tensors of less than a cache line are not aligned: HDF5 keeps a list of the gaps, and slows down as it grows.
        aligned = {"alignment_threshold": ALIGN, "alignment_interval": ALIGN}
        with _plain_errors(), h5py.File(folder / file_name, "w", libver="earliest", locking=False, **aligned) as file:
            properties = _properties(h5py)
            for key, tensor in tensors.items():
                places[key] = (file_name, _add(h5py, file, names[key], tensor, properties))
        return Layout(files=(file_name,), places=places)


def _properties(h5py: Any) -> tuple[Any, Any]:
    """Return how data sets are made, and how they are linked."""
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
    """Make a data set; return the place of its values, any if it has none."""
    if tensor.dim() > _MAX_DIMENSIONS:
        msg = (
            f"the hdf5 format cannot hold tensor {name!r}: it has {tensor.dim()} dimensions, and HDF5 allows "
            f"{_MAX_DIMENSIONS}; reshape it, or choose the format safetensors"
        )
        raise CheckpointError(msg)
    dtype = h5py.h5t.py_create(numpy_dtype(tensor.dtype), logical=True)
    space = h5py.h5s.create_simple(tuple(tensor.shape))
    # Not file.create_dataset(): for a scalar it forgets that memory is to be set aside now.
    made = h5py.h5d.create(file.id, name.encode(), dtype, space, *properties)
    if tensor.dtype in STAND_INS:
        h5py.Dataset(made).attrs["torch_dtype"] = str(tensor.dtype).removeprefix("torch.")
    return made.get_offset() or 0


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn the reports of HDF5, which have several lines, into the error of the operating system that is in them."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = re.search(r"errno = ([0-9]+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def _names(keys: Iterable[str]) -> dict[str, str]:
    """Return what each tensor is called in the file; see the head of this one."""
    names = {key: "/".join(_part(part) for part in key.split("/")) for key in keys}
    groups = {name[:end] for name in names.values() for end, letter in enumerate(name) if letter == "/"}
    return {key: f"{name}%" if name in groups else name for key, name in names.items()}


def _part(part: str) -> str:
    return {"": "%", ".": "%2E"}.get(part) or escaped(part)


def _import_h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        msg = "checkpoints in the format hdf5 need h5py; pip install 'holdfast[hdf5]', or choose the format safetensors"
        raise CheckpointError(msg) from error
