"""The safetensors format: eight bytes of length, a JSON header, the values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from holdfast.checkpoint.formats.base import ALIGN, Layout

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex128: "F64",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Safetensors:
    """See :class:`~holdfast.checkpoint.formats.base.TensorFormat`; other programs read the file with ``safetensors``."""

    name = "safetensors"

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Write the header; the values follow each other without gaps, as the format asks, the widest types first."""
        name = f"{stem}.safetensors"
        header: dict[str, object] = {}
        starts: dict[str, int] = {}
        end = 0
        # safetensors wants no gaps, and readers want aligned numbers: types of the most bytes come first.
        for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            starts[key] = end
            size = tensor.numel() * tensor.element_size()
            pair = [2] if tensor.dtype is torch.complex128 else []  # the format has no name for it: real, imaginary
            header[key] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": [*tensor.shape, *pair],
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        return Layout(files=(name,), places={key: (name, 8 + len(text) + start) for key, start in starts.items()})
