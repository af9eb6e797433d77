"""Where checkpoints are: what a storage must do, names in it, and the storage of an URL.

::

    root/
    ├── step-00000020/                        complete: it has a manifest
    │   ├── manifest.json
    │   └── data-18f3c2/                      the files that the manifest names
    │       └── part-00000.safetensors
    └── step-00000030/                        not complete: nobody reads it
        └── data-77aa01/

A path is relative to the root, with ``/`` between its parts. Nothing is ever renamed but manifests, so that the same
acts are safe in a directory and in an object store.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from holdfast.errors import ConfigError

_STEP = re.compile(r"step-([0-9]{8,})")


class Reader(Protocol):
    """An open file; several threads may read at once."""

    size_bytes: int
    part_bytes: int
    """How much is best read in one call."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill ``out`` with the bytes from ``offset`` on; return how many there were."""


class Storage(Protocol):
    """A place for checkpoints.

    Every method raises :class:`~holdfast.errors.CheckpointError` with what to do where the storage cannot be used, and
    :class:`~holdfast.errors.CheckpointCorrupt` where a file is gone, is no plain file, or its disk cannot read it.
    """

    url: str
    """Its name, for messages."""

    def names(self, folder: str) -> list[str]:
        """Return what is in a folder, sorted; nothing if it is not there."""

    def read(self, path: str) -> bytes | None:
        """Return a small file as a whole, None if it is not there."""

    def reader(self, path: str) -> AbstractContextManager[Reader]:
        """Open a file."""

    def prepare(self, folder: str) -> Path:
        """Return a local directory, in which files that belong into a new ``folder`` are to be written.

        The same thread stores them, or gives up and removes the folder.
        """

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        """Keep the files that were written into the directory of :meth:`prepare`; when this returns they are durable."""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, all or nothing, in the place of what was there; when this returns it is durable."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; it is right if it is not there."""


def step_folder(step: int) -> str:
    """Return where the checkpoint of ``step`` is, or would be."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder is named after, None if it is something else."""
    match = _STEP.fullmatch(name)
    if match is None or name != step_folder(int(match[1])):
        return None
    return int(match[1])


def is_remote(url: str | Path) -> bool:
    """Return whether this is the URL of something else than a local directory."""
    return isinstance(url, str) and "://" in url and not url.startswith("file://")


Where = Storage | str | Path
"""A storage, or the directory or URL of one."""


def as_storage(where: Where) -> Storage:
    """Return the storage that is meant; see :func:`open_storage`."""
    return open_storage(where) if isinstance(where, str | Path) else where


def open_storage(url: str | Path) -> Storage:
    """Return the storage of a directory, or of an URL (``s3://``, ``gs://``, ``az://`` or ``memory://``).

    Raises:
        ConfigError: if the URL is empty, or its kind unknown or not installed.
    """
    if not str(url):
        raise ConfigError("the place of checkpoints must be a directory or an URL such as s3://bucket/run, got ''")
    if is_remote(url):
        from holdfast.checkpoint.storage.remote import RemoteStorage

        return RemoteStorage(str(url))
    from holdfast.checkpoint.storage.local import LocalStorage

    return LocalStorage(Path(str(url).removeprefix("file://")))
