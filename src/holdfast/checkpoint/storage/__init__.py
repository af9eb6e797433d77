"""Storage back ends for checkpoints: the interface, the names of folders, and opening the storage of a URL.

::

    root/
    ├── step-00000020/                        complete: it has a manifest
    │   ├── manifest.json
    │   └── data-18f3c2/                      the files that the manifest names
    │       └── part-00000.safetensors
    └── step-00000030/                        not complete: it is never read
        └── data-77aa01/

A path is relative to the root, with ``/`` between its parts. Nothing except manifests is ever renamed, so that the same
operations are safe in a directory and in an object store.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from holdfast.errors import ConfigError

_STEP = re.compile(r"step-([0-9]{8,19})")


class StorageReader(Protocol):
    """An open file; several threads may read concurrently."""

    size_bytes: int
    num_names: int
    """Number of names that it has: checkpoints share it if there are several."""
    part_bytes: int
    """Preferred number of bytes per read."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill ``out`` with the bytes starting at ``offset``; return how many there were."""


class Storage(Protocol):
    """A storage for checkpoints.

    Every method raises :class:`~holdfast.errors.CheckpointError`, with advice, if the storage cannot be used, and
    :class:`~holdfast.errors.CheckpointCorrupt` if a file is missing, not a plain file, or unreadable on its disk.
    """

    url: str
    """Its directory or URL, for messages."""
    has_links: bool
    """Whether :meth:`link` may succeed; if not, blocks are not compared with those of earlier checkpoints."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; an empty list if the folder does not exist."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

    def reader(self, path: str) -> AbstractContextManager[StorageReader]:
        """Open a file."""

    def prepare(self, folder: str) -> Path:
        """Return a local directory in which to write the files of a new ``folder``.

        The same thread must store them, or give up and remove the folder.
        """

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        """Store the files that were written into the directory of :meth:`prepare`; they are durable when this returns."""

    def link(self, path: str, name: str) -> bool:
        """Give a file a second name in a prepared folder, without copying it; both are paths.

        Returns:
            Whether that was possible: not in an object store, and not if the file is gone. :meth:`store` of the folder
            makes it durable.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a small file atomically; it is durable when this returns."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it does not exist."""


def step_folder(step: int) -> str:
    """Return the folder name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder name stands for, or None."""
    match = _STEP.fullmatch(name)
    if match is None or name != step_folder(int(match[1])):
        return None
    return int(match[1])


def is_remote(url: str | Path) -> bool:
    """Return whether this is a URL of something other than a local directory."""
    return isinstance(url, str) and "://" in url and not url.startswith("file://")


@runtime_checkable
class HasStorage(Protocol):
    """Something with a storage, such as :class:`~holdfast.checkpoint.store.CheckpointStore`."""

    storage: Storage


Where = HasStorage | Storage | str | Path
"""A storage, or its directory or URL."""


def as_storage(where: Where) -> Storage:
    """Return the storage; see :func:`open_storage`."""
    if isinstance(where, str | Path):
        return open_storage(where)
    return where.storage if isinstance(where, HasStorage) else where


def open_storage(url: str | Path, base: str = "") -> Storage:
    """Return the storage of a directory or a URL (``s3://``, ``gs://``, ``az://`` or ``memory://``).

    A relative directory is relative to ``base``; "": to the working directory.

    Raises:
        ConfigError: if the URL is empty, its scheme is unknown, or a package is missing.
    """
    if not str(url):
        raise ConfigError("checkpoints need a directory or a URL such as s3://bucket/run, got ''")
    if is_remote(url):
        from holdfast.checkpoint.storage.remote import RemoteStorage

        return RemoteStorage(str(url))
    from holdfast.checkpoint.storage.local import LocalStorage

    return LocalStorage(Path(str(url).removeprefix("file://")), Path(base))
