"""What a format of tensor files is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


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
