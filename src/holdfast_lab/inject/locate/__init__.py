"""Locates the values of each tensor in a file, so that single values can be altered in place. HDF5 needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from holdfast_lab.inject.locate.base import Places

Locate = Callable[[Path, ExitStack], Places]
"""Returns the places of the values of each tensor of a file, without reading values or executing content.

The stack closes what is kept open to reach compressed values. Raises :class:`~holdfast.errors.CheckpointCorrupt` if the
file violates its format, :class:`~holdfast.errors.CheckpointError` if values are not stored in this file at all.
"""

HDF5_KINDS = (".h5", ".hdf5")


def locators() -> dict[str, Locate]:
    """Return the functions that locate values in other programs' files, by file name extension, except for HDF5."""
    from holdfast_lab.inject.locate.foreign import locate_npz, locate_safetensors, locate_torch

    kinds = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), locate_torch)
    return {**kinds, ".safetensors": locate_safetensors, ".npz": locate_npz}
