"""What a file format is: :class:`TensorWriter` lays files out, :class:`TensorReader` opens them. No torch at import."""

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
"""Values begin on cache lines where a format allows it, so that a reader may map the file."""

STAND_INS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}
"""Dtypes that numpy has no name for, and the integers of the same bits that stand for them in its formats."""


class TensorWriter(ABC):
    """A format in which checkpoints are written."""

    name: str
    """What the manifest says under ``format``."""

    @abstractmethod
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


class TensorReader(ABC):
    """A format of files that any program wrote."""

    @abstractmethod
    def open(self, path: Path, stack: ExitStack) -> Source:
        """Return what there is to read in a file.

        Args:
            path: Which.
            stack: Closes it; until then values can be read.

        Raises:
            CheckpointCorrupt: if it is not what its format should be: cut short, inconsistent, or made to do harm.
            CheckpointError: if it is sound, and holds something that is no tensor of numbers.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a format made."""

    files: tuple[str, ...]  # Names of the files in the folder
    places: dict[str, tuple[str, int]]  # By name of the tensor, the file and the first byte of its values there
    has_values: bool = False  # The values are there already


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint, or a file that another program wrote, whose tensors can be read one by one."""

    name: str  # Where it is, for messages
    kind: str  # Its format
    tensors: Mapping[str, Entry]  # By path; tied ones stand here under each of their paths
    read: Callable[[str], torch.Tensor]
    """Reads one of them. Raises :class:`~holdfast.errors.CheckpointCorrupt` if it is damaged."""
    load: Callable[[], Any]
    """Reads everything and puts it together, as :func:`~holdfast.checkpoint.write_plan.take` wants it."""
    scalars: Mapping[str, Any] | None = None  # What else is in it, by path; None if its format can hold nothing else
    step: int | None = None  # Steps that the state has behind it, None if it is not recorded
    manifest: Manifest | None = None  # That of a checkpoint; None for another program's file
    written_s: float | None = None  # When a checkpoint was completed, seconds since 1970; None if it is not recorded
    ties: Mapping[str, str] = field(default_factory=dict)
    """Paths at which a tensor stands again, and where it stood first."""


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return what numpy calls a dtype, or its stand-in."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(STAND_INS.get(name, name))


def escaped(name: str) -> str:
    """Return a name without NUL, where C programs end a name: NUL becomes ``%00``, and ``%`` becomes ``%25``."""
    return name.replace("%", "%25").replace("\0", "%00")
