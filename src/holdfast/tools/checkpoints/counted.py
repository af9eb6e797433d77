"""A storage that reports how many bytes of its files are read, to show the progress of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.storage import Storage, StorageReader


class _CountedReader:
    def __init__(self, reader: StorageReader, count: Callable[[int], None]) -> None:
        self._reader, self._count = reader, count
        self.size_bytes, self.num_names, self.part_bytes = reader.size_bytes, reader.num_names, reader.part_bytes

    def read_into(self, offset: int, out: memoryview) -> int:
        size = self._reader.read_into(offset, out)
        self._count(size)
        return size


class CountedStorage:
    """Another storage; ``count`` is called with the number of bytes of each read of an open file.

    Args:
        storage: The storage.
        count: May be called from any thread.
    """

    def __init__(self, storage: Storage, count: Callable[[int], None]) -> None:
        self.inner, self._count = storage, count
        self.url, self.has_links = storage.url, storage.has_links

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        return self.inner.names(folder)

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, which is not counted."""
        return self.inner.read(path)

    @contextmanager
    def reader(self, path: str) -> Iterator[StorageReader]:
        """Open a file."""
        with self.inner.reader(path) as reader:
            yield _CountedReader(reader, self._count)

    def prepare(self, folder: str) -> Path:
        """Return a local directory for the files of a new folder."""
        return self.inner.prepare(folder)

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        """Store the files of a folder."""
        self.inner.store(folder, names)

    def link(self, path: str, name: str) -> bool:
        """Give a file a second name."""
        return self.inner.link(path, name)

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a small file."""
        self.inner.put(path, data)

    def remove(self, path: str) -> None:
        """Remove a file or folder."""
        self.inner.remove(path)
