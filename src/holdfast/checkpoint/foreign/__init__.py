"""Files that other programs wrote, behind a seam: one module per kind.

They carry no digests, and anybody may have written them. So each reader decides what a file may contain before it sets
memory aside, refuses everything else in one line, and executes nothing. What it returns reads like a checkpoint: see
:class:`~holdfast.checkpoint.source.Source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.checkpoint.foreign.base import Spot, refuse, row_major
from holdfast.checkpoint.foreign.hdf5 import read_hdf5
from holdfast.checkpoint.foreign.npz import locate_npz, read_npz
from holdfast.checkpoint.foreign.safetensors import locate_safetensors, read_safetensors
from holdfast.checkpoint.foreign.torch import locate_torch, read_torch
from holdfast.checkpoint.source import Source
from holdfast.errors import CheckpointError, ConfigError

__all__ = ["KINDS", "LOCATORS", "Spot", "open_foreign", "row_major"]

_READERS: dict[str, Callable[[Path, ExitStack], Source]] = {
    ".pt": read_torch,
    ".pth": read_torch,
    ".bin": read_torch,
    ".ckpt": read_torch,
    ".safetensors": read_safetensors,
    ".npz": read_npz,
    ".h5": read_hdf5,
    ".hdf5": read_hdf5,
}

KINDS = tuple(_READERS)
"""What the name of a file that can be read ends with."""


LOCATORS: dict[str, Callable[[Path], dict[str, Spot]]] = {
    ".pt": locate_torch,
    ".pth": locate_torch,
    ".bin": locate_torch,
    ".ckpt": locate_torch,
    ".safetensors": locate_safetensors,
    ".npz": locate_npz,
}
"""What says, of files in which values lie as they are, where those of each tensor do. It raises
:class:`~holdfast.errors.CheckpointCorrupt` if a file is not what its kind should be, and
:class:`~holdfast.errors.CheckpointError` if its values do not lie there so."""


@contextmanager
def open_foreign(path: str | Path) -> Iterator[Source]:
    """Open a file that another program wrote; what it gives can be read until it is closed again.

    Args:
        path: A file whose name ends with one of :data:`KINDS`.

    Raises:
        ConfigError: if there is no such file, or it is of no known kind.
        CheckpointCorrupt: if it is not what its kind should be: cut short, inconsistent, or made to do harm.
        CheckpointError: if it is sound, and holds something that is no tensor of numbers.
    """
    path = Path(path)
    if path.is_dir() and (path / ".metadata").exists():
        refuse(
            path,
            "is a folder of torch.distributed.checkpoint, whose index .metadata is a pickle: reading it could run "
            "anything. Only those that have a manifest.json of holdfast beside them can be read; load it with torch, "
            "where you trust it, and save it as .safetensors",
        )
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        msg = f"{path} is no file that can be read; its name must end with one of {', '.join(KINDS)}"
        raise ConfigError(msg)
    if not path.is_file():
        msg = f"there is no file {path}" if not path.exists() else f"{path} is not a plain file; give a file"
        raise ConfigError(msg)
    with ExitStack() as stack:
        try:
            source = reader(path, stack)
        except OSError as error:
            msg = f"cannot read {path}: {error.strerror or error}"
            raise CheckpointError(msg) from error
        yield source
