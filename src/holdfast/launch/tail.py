"""Reading files that others are still writing, a bit at a time."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.records.files import parse_record
from holdfast.records.types import Record

_CHUNK_BYTES = 1 << 20


class LineTail:
    """Gives the whole lines that were added to ``path`` since it was last asked; the file need not exist yet.

    A ``far`` file is written on other machines, and opened anew each time: only then what they wrote is certain to be seen.
    """

    def __init__(self, path: Path, *, far: bool = False) -> None:
        self._path = path
        self._far = far
        self._read_bytes = 0
        self._file: int | None = None
        self._rest = b""

    def read(self) -> list[bytes]:
        """Return the new lines, without their ends."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
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
        """Return what stands after the last line's end: half a line, if its writer died."""
        rest, self._rest = self._rest, b""
        return rest

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RecordTail:
    """Gives the records that were added to ``path`` since it was last asked; see :class:`LineTail`."""

    def __init__(self, path: Path, *, far: bool = False) -> None:
        self.path = path
        self.skipped = 0
        """Lines so far that are not records: a full disk cut them short, or something else wrote into the file."""
        self._lines = LineTail(path, far=far)

    def read(self) -> list[Record]:
        """Return the new records."""
        records = [parse_record(line) for line in self._lines.read()]
        found = [record for record in records if record is not None]
        self.skipped += len(records) - len(found)
        return found

    def close(self) -> None:
        """Let go of the file."""
        self._lines.close()
