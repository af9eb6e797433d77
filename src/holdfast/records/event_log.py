"""``events.jsonl`` of a report directory: written while the job runs, in files of limited size.

=======================  ========================================================================
=======================  ========================================================================
``events.jsonl``         the newest records; it exists from the first record of a run on
``events-000001.jsonl``  the oldest ones, once the file has reached its size; and so on
=======================  ========================================================================

A full file gets its number by one ``rename``, so that a crash loses no record, and keeps it for good.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.records.files import FileRecorder
from holdfast.records.paths import event_files, events_path
from holdfast.records.types import Record

_MODE = 0o666
"""Permissions of a report, before the umask, as those of its other files."""


class EventLog:
    """Writes the records of a run to a report directory, while the job runs.

    The first record removes what an earlier run left there. Of several launchers with the same directory one writes.

    Args:
        folder: The report directory.
        most_bytes: Bytes after which a file is full; 0: never. It may end up longer by its last record.
    """

    def __init__(self, folder: Path, most_bytes: int = 0) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._num_full = 0
        self._lock: int | None = None
        self._file: FileRecorder | None = None
        self._has_begun = self._is_incomplete = False

    def is_final(self) -> bool:
        """Return whether the files stay as they are: they hold all records in several files, or are another launcher's."""
        if self._lock is None:
            return self._has_begun and self._is_elsewhere()
        return self._num_full > 0 and not self._is_incomplete

    def write(self, record: Record) -> None:
        """Append a record, in a new file if this one is full."""
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        if self._file is None:
            return
        if 0 < self._most_bytes <= self._file.size:
            self._rotate(self._file)
        self._is_incomplete |= not self._file.write(record)

    def _begin(self) -> None:
        """Take over the folder; if that is not possible, the end of the run says so, when it writes the report."""
        if self._is_elsewhere():
            return
        try:
            for earlier in (*event_files(self._folder), self._folder / "report.json"):
                earlier.unlink(missing_ok=True)
            self._file = FileRecorder(events_path(self._folder), _MODE)
        except (OSError, ConfigError):
            self._is_incomplete = True

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

    def _rotate(self, full: FileRecorder) -> None:
        """Begin a new file; if that is not possible, go on in the full one."""
        path = events_path(self._folder)
        try:
            if path.exists():  # else it was renamed before, and no new one could be opened
                path.rename(events_path(self._folder, self._num_full + 1))
                self._num_full += 1
            self._file = FileRecorder(path, _MODE)
        except (OSError, ConfigError):
            return
        full.close()

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
