"""``.safetensors``, the format of checkpoints: eight bytes of header length, a JSON header, the values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from holdfast.checkpoint.files.base import ALIGN, FileLayout, TensorWriter

DTYPES = {
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.complex128: "F64"}
"""The format has no complex128: it is written as pairs of real and imaginary part."""


class Safetensors(TensorWriter):
    """See :class:`~holdfast.checkpoint.files.base.TensorWriter`; the package ``safetensors`` reads it."""

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


def _order(item: tuple[str, torch.Tensor]) -> tuple[bool, int]:
    """Return the sort key of a tensor in a format that forbids gaps.

    Tensors of whole cache lines come first, so that each of them is aligned: reading values that begin 4 bytes beside a
    cache line takes half as long again. The others follow, the widest types first: readers need aligned numbers.
    """
    tensor = item[1]
    return tensor.nbytes % ALIGN != 0, -tensor.element_size()
