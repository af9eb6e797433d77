"""Where in a file the values of each tensor lie, so that single ones can be altered in place. HDF5 needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from holdfast_lab.inject.locate.base import Places

Locate = Callable[[Path, ExitStack], Places]
"""Returns where the values of each tensor of a file lie; no value is read, and nothing in the file is run.

The stack closes what is kept open to reach packed values. Raises :class:`~holdfast.errors.CheckpointCorrupt` if the file is
not what its format should be, :class:`~holdfast.errors.CheckpointError` if values do not lie in this file at all.
"""

HDF5_KINDS = (".h5", ".hdf5")


def locators() -> dict[str, Locate]:
    """Return how values are located in other programs' files, by what the file's name ends with, but for HDF5."""
    from holdfast_lab.inject.locate.foreign import locate_npz, locate_safetensors, locate_torch

    kinds = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), locate_torch)
    return {**kinds, ".safetensors": locate_safetensors, ".npz": locate_npz}
