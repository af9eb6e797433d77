"""``events.jsonl`` of a report directory: written while the job runs, in files of limited size.

=======================  ========================================================================
=======================  ========================================================================
``events.jsonl``         the newest records; it exists from the first record of a run on
``events-000001.jsonl``  the oldest ones, once the file has reached its size; and so on
=======================  ========================================================================

A full file gets its number by one ``rename``, so that a crash loses no record, and keeps it for good. A new
file is called ``events.jsonl.next`` until the earlier one has its number.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.records.files import FileRecorder, RecordLine
from holdfast.records.paths import event_files, events_path
from holdfast.records.types import Record


class EventLog:
    """Writes the records of a run to a report directory, while the job runs.

    The first record removes what an earlier run left there. Of several launchers with the same directory that of the first
    node writes, and each of the others writes all records at its end, unless it sees that the directory is in use: only
    launchers on the same machine see that on every file system.

    Args:
        folder: The report directory.
        most_bytes: Bytes after which a file is full; 0: never. It may end up longer by its last record.
        is_first: Whether this launcher is that of the first node.
    """

    def __init__(self, folder: Path, most_bytes: int = 0, *, is_first: bool = True) -> None:
        self._folder, self._most_bytes, self._is_first = folder, most_bytes, is_first
        self._path = events_path(folder)
        self._num_full = 0
        self._lock: int | None = None
        self._file: FileRecorder | None = None
        self._has_begun = self._is_incomplete = False

    def is_final(self) -> bool:
        """Return whether the files stay as they are: they hold all records in several files, or are another launcher's."""
        if self._file is not None:
            return self._num_full > 0 and self.has_all()
        return self._lock is None and self._has_begun and self._is_elsewhere()

    def has_all(self) -> bool:
        """Return whether this launcher has written all records to the files, and they are still there."""
        return self._file is not None and not self._is_incomplete and self._file.is_there()

    def write(self, record: Record) -> None:
        """Append a record, in a new file if this one is full."""
        self.write_all((record,))

    def write_all(self, records: Sequence[Record]) -> None:
        """Append records, with one ``write`` for each file."""
        if records and not self._has_begun:
            self._has_begun = True
            self._begin()
        if self._file is None:
            return
        lines: list[RecordLine] = []
        size = self._file.size
        for line in map(RecordLine.of, records):
            if 0 < self._most_bytes <= size:
                self._append(self._file, lines)
                lines = []
                self._file = self._rotate(self._file)
                size = self._file.size
            lines.append(line)
            size += len(line.text)
        self._append(self._file, lines)

    def _append(self, file: FileRecorder, lines: Sequence[RecordLine]) -> None:
        if lines:
            self._is_incomplete |= not file.write_lines(lines)

    def _begin(self) -> None:
        """Take over the folder; if that is not possible, the end of the run says so, when it writes the report."""
        if not self._is_first or self._is_elsewhere():
            return
        self._file = self._new_file(self._remove_earlier)
        self._is_incomplete = self._file is None

    def _remove_earlier(self) -> None:
        for earlier in (*event_files(self._folder), self._folder / "report.json"):
            earlier.unlink(missing_ok=True)

    def _new_file(self, make_room: Callable[[], None]) -> FileRecorder | None:
        """Open ``events.jsonl`` anew, and return it; None if that is not possible.

        It is opened with another name before ``make_room`` takes the earlier one away: that stays if no file can be made, and
        the new one has an inode of its own, by which readers know it.
        """
        draft = self._path.with_name(f"{self._path.name}.next")
        try:
            draft.unlink(missing_ok=True)
            file = FileRecorder(draft, is_report=True)
        except (OSError, ConfigError):
            return None
        try:
            make_room()
            file.rename(self._path)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):  # the next run removes it
                draft.unlink()
            return None
        return file

    def _is_elsewhere(self) -> bool:
        """Lock the folder; return whether another process holds the lock."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            return True
        except OSError:  # some network file systems have no locks of directories; other errors come again
            pass
        return False

    def _rotate(self, full: FileRecorder) -> FileRecorder:
        """Begin a new file and return it; if that is not possible, go on in the full one."""
        if not full.is_there():  # the folder was removed or moved: all records are written at the end
            return full
        file = self._new_file(lambda: full.rename(self._free_path()))
        if file is None:
            return full
        self._num_full += 1
        full.close()
        return file

    def _free_path(self) -> Path:
        """Return the next number's path that nothing has: no file is ever replaced."""
        numbers = itertools.count(self._num_full + 1)
        return next(path for number in numbers if not os.path.lexists(path := events_path(self._folder, number)))

    def close(self) -> None:
        """Close the file; another process may write there now."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
