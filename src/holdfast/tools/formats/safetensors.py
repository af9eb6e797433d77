"""``.safetensors`` files of other programs; checkpoints in the format are written by the core."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdfast.checkpoint.files.safetensors import DTYPES
from holdfast.checkpoint.format import tensor_bytes
from holdfast.checkpoint.manifest import no_duplicates
from holdfast.tools.formats.base import TensorInfo, TensorReader, TensorSource
from holdfast.tools.formats.checks import MAX_NAMES, check_shape, damaged, not_a, refuse, state_of, step_in

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the ``safetensors`` package."""


class SafetensorsReader(TensorReader):
    """See :class:`~holdfast.tools.formats.base.TensorReader`."""

    def open(self, path: Path, stack: ExitStack) -> TensorSource:
        """See :meth:`TensorReader.open`; values are read on demand."""
        file = stack.enter_context(path.open("rb"))
        tensors, starts, metadata = read_header(path, file)

        def read(name: str) -> torch.Tensor:
            tensor = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
            file.seek(starts[name])
            if tensor.nbytes and file.readinto(tensor_bytes(tensor)) != tensor.nbytes:
                damaged(path, f"ends inside the tensor {name!r:.80}")
            return tensor

        return TensorSource(
            name=str(path),
            kind="safetensors",
            tensors=tensors,
            read=read,
            load=lambda: state_of({name: read(name) for name in tensors}),
            step=step_in(metadata.get("step")) if isinstance(metadata, dict) else None,
        )


def read_header(path: Path, file: BinaryIO) -> tuple[dict[str, TensorInfo], dict[str, int], Any]:
    """Return each tensor's entry and offset in the file, and the header's metadata."""
    size_bytes = path.stat().st_size
    length = int.from_bytes(file.read(8), "little")
    if size_bytes < 8 or length > min(size_bytes - 8, _MAX_HEADER_BYTES):
        not_a("a safetensors file", path, f"it has {size_bytes} bytes, its header would have {length}")
    header = _parse(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    starts: dict[str, int] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, fields in header.items():
        tensors[name], starts[name] = _check(path, name, fields)
    _check_places(path, tensors, starts, size_bytes - 8 - length)
    return tensors, {name: 8 + length + start for name, start in starts.items()}, metadata


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        not_a("a safetensors file", path, f"its header cannot be read: {error}", error)
    if type(header) is not dict or len(header) > MAX_NAMES:
        not_a("a safetensors file", path, f"its header is not an object, or has more than {MAX_NAMES} members")
    return header


def _check(path: Path, name: str, fields: Any) -> tuple[TensorInfo, int]:
    """Return a tensor's entry and offset from a member of the header."""
    if type(fields) is not dict or fields.keys() != {"dtype", "shape", "data_offsets"}:
        damaged(path, f"is damaged: its header does not say dtype, shape and data_offsets of {name!r:.80}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        refuse(path, f"has the tensor {name!r:.80} of type {dtype!r:.40}; supported are {', '.join(DTYPES)}")
    if type(shape) is not list or type(offsets) is not list or [type(n) for n in offsets] != [int, int]:
        damaged(path, f"is damaged: shape or data_offsets of {name!r:.80} are not lists of whole numbers")
    entry = TensorInfo(DTYPES[dtype], check_shape(path, name, shape))
    start, end = offsets
    if start < 0 or end - start != math.prod(entry.shape) * entry.dtype.itemsize:
        damaged(
            path,
            f"is damaged: the tensor {name!r:.80} of shape {list(entry.shape)!r:.80} needs {entry.size_bytes} bytes, "
            f"its place is {start!r:.20} to {end!r:.20}",
        )
    return entry, start


def _check_places(path: Path, tensors: dict[str, TensorInfo], starts: dict[str, int], data_bytes: int) -> None:
    """Check that the values follow each other without gaps, as the format requires."""
    end = 0
    for name in sorted(tensors, key=lambda name: (starts[name], tensors[name].size_bytes)):
        if starts[name] != end:
            damaged(path, f"is damaged: the tensor {name!r:.80} begins at {starts[name]}, the one before ends at {end}")
        end += tensors[name].size_bytes
    if end != data_bytes:
        damaged(path, f"is damaged: its tensors need {end} bytes, it holds {data_bytes}; was it cut short?")
