"""Interfaces of a file format: :class:`TensorWriter` lays files out, :class:`TensorReader` opens them. No torch at import."""

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

ALIGN = 64
"""Values are aligned to cache lines if the format allows it, so that a reader may map the file."""

STAND_INS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}
"""Dtypes that numpy lacks, and the integer dtypes of the same width that hold their bits in numpy's formats."""


class TensorWriter(ABC):
    """A format in which checkpoints can be written."""

    name: str
    """The name under ``format`` in the manifest."""

    @abstractmethod
    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
        """Create files of their final size; values are row-major, little-endian and without padding.

        Args:
            folder: An existing directory.
            stem: Beginning of the file name, where the format leaves a choice.
            tensors: By name; contiguous, on the CPU. A name may contain any characters.

        Raises:
            OSError: if a file cannot be written.
            CheckpointError: if the format cannot hold a tensor.
        """


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The result of :meth:`TensorWriter.lay_out`."""

    files: tuple[str, ...]  # Names of the files in the folder
    places: dict[str, tuple[str, int]]  # By name of the tensor: the file, and the offset of its values
    has_values: bool = False  # Whether the values have been written already


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
