"""Interface of a reader of other programs' files, and what it returns. No torch at import."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from holdfast.checkpoint.manifest import Manifest

STAND_INS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}
"""Dtypes that numpy lacks, and the integer dtypes of the same width that hold their bits in numpy's formats."""


class TensorReader(ABC):
    """A format of files that any program may have written."""

    @abstractmethod
    def open(self, path: Path, stack: ExitStack) -> TensorSource:
        """Open a file as a source.

        Args:
            path: The file.
            stack: Closes the file; values can be read until then.

        Raises:
            CheckpointCorrupt: if it violates its format: truncated, inconsistent, or malicious.
            CheckpointError: if it is valid, but contains something other than numeric tensors.
        """


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype and shape of a tensor, known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A checkpoint, or a file of another program, whose tensors can be read one by one."""

    name: str  # Path or URL, for messages
    kind: str  # Format
    tensors: Mapping[str, TensorInfo]  # By path; tied tensors occur under each of their paths
    read: Callable[[str], torch.Tensor]
    """Reads one tensor. Raises :class:`~holdfast.errors.CheckpointCorrupt` if it is damaged."""
    load: Callable[[], Any]
    """Reads the whole state, in the form that :func:`~holdfast.checkpoint.write_plan.take` accepts."""
    scalars: Mapping[str, Any] | None = None  # All other values, by path; None if the format can hold only tensors
    step: int | None = None  # Number of steps that the state contains, None if not recorded
    manifest: Manifest | None = None  # The checkpoint's manifest; None for another program's file
    written_s: float | None = None  # Time of completion, seconds since 1970; None if not recorded
    ties: Mapping[str, str] = field(default_factory=dict)
    """Repeated paths of tied tensors, with the first path of each."""


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the numpy dtype, or the stand-in's."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(STAND_INS.get(name, name))


def escaped(name: str) -> str:
    """Return a name without NUL, which ends a name in C: NUL becomes ``%00``, and ``%`` becomes ``%25``."""
    return name.replace("%", "%25").replace("\0", "%00")
