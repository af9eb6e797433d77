"""Incremental reading of files that other processes are still writing."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.records.files import parse_record
from holdfast.records.types import Record

_CHUNK_BYTES = 1 << 16
"""Read at once: a buffer of this size is allocated for each read, also of nothing."""


class LineTail:
    """Returns the complete lines that were added to ``path`` since the last call; the file need not exist yet.

    A ``far`` file is written on other machines and reopened each time: only then all data is certain to be visible.
    """

    __slots__ = ("_far", "_file", "_read_bytes", "_rest", "path")  # three are kept for each worker that has ended

    def __init__(self, path: Path, *, far: bool = False) -> None:
        self.path = str(path)
        self._far = far
        self._read_bytes = 0
        self._file: int | None = None
        self._rest = b""

    def read(self) -> list[bytes]:
        """Return the new lines, without line ends."""
        if self._file is None:
            try:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
            os.lseek(self._file, self._read_bytes, os.SEEK_SET)
        parts = [self._rest]
        while chunk := os.read(self._file, _CHUNK_BYTES):
            parts.append(chunk)
            self._read_bytes += len(chunk)
        if self._far:
            self.close()
        *lines, self._rest = b"".join(parts).split(b"\n")
        return lines

    def rest(self) -> bytes:
        """Return the text after the last line end: an incomplete line, if the writer died."""
        rest, self._rest = self._rest, b""
        return rest

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RecordTail(LineTail):
    """Returns the records that were added to ``path`` since the last call; see :class:`LineTail`."""

    __slots__ = ("skipped",)

    def __init__(self, path: Path, *, far: bool = False) -> None:
        super().__init__(path, far=far)
        self.skipped = 0
        """Lines so far that are not records: truncated by a full disk, or written by another program."""

    def records(self) -> list[Record]:
        """Return the new records."""
        lines = self.read()
        records = [record for line in lines if (record := parse_record(line)) is not None]
        self.skipped += len(lines) - len(records)
        return records
