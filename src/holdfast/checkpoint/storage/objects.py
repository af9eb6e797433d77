"""What :class:`~holdfast.checkpoint.storage.remote.RemoteStorage` asks of a library that keeps bytes somewhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Objects(Protocol):
    """Objects by name, ``/`` between the parts of it: what a library does for :class:`RemoteStorage`.

    Methods raise whatever the library raises; :meth:`explain` knows what it means.
    """

    def children(self, folder: str) -> list[str]:
        """Return the names directly in a folder, as they are now: never from a cache."""
        ...

    def size(self, name: str) -> int:
        """Return the size of an object, bytes."""
        ...

    def get(self, name: str) -> bytes:
        """Return an object."""
        ...

    def get_range(self, name: str, start: int, end: int) -> Any:
        """Return a buffer with bytes of an object; ``start < end``, and both lie in it."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small object; others see the old one or the new one."""
        ...

    def upload(self, path: Path, name: str) -> None:
        """Write an object from a file."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object, and all in the folder of this name."""
        ...

    def explain(self, error: Exception) -> str | None:
        """Return what an error of the other methods means and what to do, None if only the object is not there."""
        ...
