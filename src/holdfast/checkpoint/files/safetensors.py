"""``.safetensors``: eight bytes of header length, a JSON header, the values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdfast.checkpoint.files.base import ALIGN, FileLayout, TensorInfo, TensorReader, TensorSource, TensorWriter
from holdfast.checkpoint.files.checks import MAX_NAMES, check_shape, damaged, not_a, refuse, state_of, step_in
from holdfast.checkpoint.format import tensor_bytes
from holdfast.checkpoint.manifest import no_duplicates

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the ``safetensors`` package."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {torch.complex128: "F64"}
"""The format has no complex128: it is written as pairs of real and imaginary part."""


class Safetensors(TensorWriter, TensorReader):
    """See :class:`~holdfast.checkpoint.files.base.TensorWriter`; the package ``safetensors`` reads and writes it."""

    name = "safetensors"

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
        """Write the header; the values follow without gaps, as the format requires, whole cache lines first."""
        name = f"{stem}.safetensors"
        header: dict[str, object] = {}
        starts: dict[str, int] = {}
        end = 0
        for key, tensor in sorted(tensors.items(), key=_order):
            starts[key] = end
            size = tensor.numel() * tensor.element_size()
            pair = [2] if tensor.dtype is torch.complex128 else []
            header[key] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": [*tensor.shape, *pair],
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        return FileLayout(files=(name,), places={key: (name, 8 + len(text) + start) for key, start in starts.items()})

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


def _order(item: tuple[str, torch.Tensor]) -> tuple[bool, int]:
    """Return the sort key of a tensor in a format that forbids gaps.

    Tensors of whole cache lines come first, so that each of them is aligned: reading values that begin 4 bytes beside a
    cache line takes half as long again. The others follow, the widest types first: readers need aligned numbers.
    """
    tensor = item[1]
    return tensor.nbytes % ALIGN != 0, -tensor.element_size()


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
    if type(dtype) is not str or dtype not in _DTYPES:
        refuse(path, f"has the tensor {name!r:.80} of type {dtype!r:.40}; supported are {', '.join(_DTYPES)}")
    if type(shape) is not list or type(offsets) is not list or [type(n) for n in offsets] != [int, int]:
        damaged(path, f"is damaged: shape or data_offsets of {name!r:.80} are not lists of whole numbers")
    entry = TensorInfo(_DTYPES[dtype], check_shape(path, name, shape))
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
