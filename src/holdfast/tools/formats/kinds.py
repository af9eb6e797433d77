"""Files of other programs by suffix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.errors import CheckpointError, ConfigError
from holdfast.tools.formats.base import TensorReader, TensorSource
from holdfast.tools.formats.checks import refuse
from holdfast.tools.formats.hdf5 import Hdf5
from holdfast.tools.formats.npz import Npz
from holdfast.tools.formats.safetensors import SafetensorsReader
from holdfast.tools.formats.torch import Torch

READERS: dict[str, TensorReader] = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), Torch()),
    ".safetensors": SafetensorsReader(),
    ".npz": Npz(),
    **dict.fromkeys((".h5", ".hdf5"), Hdf5()),
}
"""Readers of other programs' files, by suffix. A library that only one of them needs is imported when that one reads."""

KINDS = tuple(READERS)
"""Suffixes of the files that can be read."""


@contextmanager
def open_imported(path: str | Path) -> Iterator[TensorSource]:
    """Open a file that another program wrote; the source can be read until it is closed.

    Args:
        path: A file with one of the suffixes :data:`KINDS`.

    Raises:
        ConfigError: if the file does not exist, or its format is unknown.
        CheckpointCorrupt: if it violates its format: truncated, inconsistent, or malicious.
        CheckpointError: if it is valid, but contains something other than numeric tensors.
    """
    path = Path(path)
    if path.is_dir() and (path / ".metadata").exists():
        refuse(
            path,
            "is a folder of torch.distributed.checkpoint, whose index .metadata is a pickle: reading it could run "
            "anything. Only folders with a manifest.json of holdfast can be read; load it with torch, "
            "if you trust it, and save it as .safetensors",
        )
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} cannot be read; the file name must end with one of {', '.join(KINDS)}")
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}" if not path.exists() else f"{path} is not a plain file; give a file"
        )
    with ExitStack() as stack:
        try:
            source = reader.open(path, stack)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        yield source
