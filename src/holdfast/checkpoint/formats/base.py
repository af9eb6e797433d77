"""What a format of tensor files is, and what several of them need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

ALIGN = 64
"""Values begin on cache lines where a format allows it, so that a reader may map the file."""

STAND_INS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
"""What numpy has no name for, and the integers of the same bits that stand for it in its formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a format made.

    Args:
        files: Names of the files in the folder.
        places: By name of the tensor, the file and the first byte of its values there.
        has_values: The values are there already.
    """

    files: tuple[str, ...]
    places: dict[str, tuple[str, int]]
    has_values: bool = False


class TensorFormat(Protocol):
    """One way to lay tensors out in files."""

    name: str
    """What the manifest says under ``format``."""

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Make files of their final size; values are row-major, little-endian and without padding.

        Args:
            folder: Where; it is there.
            stem: What the file's name begins with, where the format leaves a choice.
            tensors: By name; contiguous, on the CPU. A name may hold any characters.

        Raises:
            OSError: if a file cannot be written.
            CheckpointError: if the format cannot hold a tensor.
        """
        ...


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return what numpy calls a dtype, or its stand-in."""
    found: np.dtype[Any] = torch.empty(0, dtype=STAND_INS.get(dtype, dtype)).numpy().dtype
    return found


def escaped(name: str) -> str:
    """Return a name without NUL, where C programs end a name: NUL becomes ``%00``, and ``%`` becomes ``%25``."""
    return name.replace("%", "%25").replace("\0", "%00")
