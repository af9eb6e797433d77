"""Interface of a format in which checkpoints are written. No torch at import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGN = 64
"""Values are aligned to cache lines if the format allows it, so that a reader may map the file."""


class TensorWriter(ABC):
    """A format in which checkpoints can be written."""

    name: str
    """The name under ``format`` in the manifest."""
    one_writer = False
    """Whether one process must write all tensors of a checkpoint, and the format's own code every value of them."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The result of :meth:`TensorWriter.lay_out`."""

    files: tuple[str, ...]  # Names of the files in the folder
    places: dict[str, tuple[str, int]]  # By name of the tensor: the file, and the offset of its values
    has_values: bool = False  # Whether the values have been written already
