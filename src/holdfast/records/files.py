"""Record files, one for each worker.

Each worker appends to its own file with one ``write`` for each line. A SIGKILL therefore loses no line that was written
and truncates none (the page cache outlives the process); only a full disk truncates a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast.errors import ConfigError, InternalError
from holdfast.records.encoding import record_from_dict, record_to_dict
from holdfast.records.paths import event_files
from holdfast.records.types import HistogramLogged, ImageLogged, Record, StateHashed, StepCommitted

_RESERVE_BYTES = 1 << 14
"""Bytes that each record file reserves for lines that must not be lost; a recovery writes about 300 bytes."""


OF_STEPS = (StepCommitted, StateHashed, ImageLogged, HistogramLogged)
"""Records written in each step."""


_LIBC = ctypes.CDLL(None, use_errno=True)


_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


_KEEP_SIZE = 1


_FULL = (errno.ENOSPC, errno.EDQUOT)

_Read = TypeVar("_Read")


class RecordLine(NamedTuple):
    """A record as it is written to a file."""

    text: bytes
    is_of_step: bool

    @classmethod
    def of(cls, record: Record) -> RecordLine:
        """Return the line of a record.

        Raises:
            InternalError: if the record was not stamped; see :class:`~holdfast.records.logger.Logger`.
        """
        if missing := record.missing_stamps():
            raise InternalError(f"a {type(record).__name__} is written without {', '.join(missing)}")
        return cls((json.dumps(record_to_dict(record)) + "\n").encode(), isinstance(record, OF_STEPS))


class FileRecorder:
    """Appends JSON lines to ``path``. Training must not stop for a full disk: records that cannot be written are dropped.

    Space is reserved beyond the end of the file. A disk that fills up then costs some of the many lines about steps,
    and not those about failures and the end of a worker, on which the launcher acts.

    Args:
        path: The file; it is made if it is not there.
        is_report: The file belongs to a report: its permissions are those of other files, and a line that a full disk
            has truncated is removed. Otherwise the file is for this user only, and such a line stays, because the
            launcher may have read a part of it.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(self, path: Path, *, is_report: bool = False) -> None:
        self._path, self._is_report = path, is_report
        self._warned = False
        self._torn = False
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666 if is_report else 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write records to {path}: {error.strerror}") from error
        self._reserved = self._size = os.fstat(self._file).st_size
        with contextlib.suppress(OSError):  # writing the first record will raise and report the same error
            self._reserve(0)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def is_there(self) -> bool:
        """Return whether the file still has its name: it was not removed, and its folder was not moved."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def rename(self, path: Path) -> None:
        """Give the file another name.

        Raises:
            OSError: if that is not possible; it keeps its name.
        """
        self._path.rename(path)
        self._path = path

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def write(self, record: Record) -> bool:
        """Append one line, and return whether it was written; if it cannot be, warn once and drop it.

        Raises:
            InternalError: if the record was not stamped; see :class:`~holdfast.records.logger.Logger`.
        """
        return self.write_lines((RecordLine.of(record),))

    def write_lines(self, lines: Sequence[RecordLine]) -> bool:
        """Append lines with one ``write``, and return whether all were written; several only to a file of a report."""
        try:
            if any(line.is_of_step for line in lines):
                self._reserve(sum(len(line.text) for line in lines))
            self._append(b"".join(line.text for line in lines))
        except OSError as error:
            if len(lines) > 1:  # some of them may fit
                written = [self.write_lines((line,)) for line in lines]
                return all(written)
            self._warn(error)
            return False
        return True

    def _append(self, text: bytes) -> None:
        """Append whole lines; what a full disk has left of earlier ones is removed or, outside a report, ended."""
        if self._torn and self._is_report:
            os.ftruncate(self._file, self._size)
        elif self._torn:
            text = b"\n" + text
        written = os.write(self._file, text)
        self._torn = written < len(text)
        if not (self._torn and self._is_report):
            self._size += written
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _reserve(self, size: int) -> None:
        """Reserve :data:`_RESERVE_BYTES` for this file beyond ``size`` more bytes, without making it longer.

        Raises:
            OSError: if the disk is full.
        """
        if self._size + size + _RESERVE_BYTES <= self._reserved:
            return
        wanted = self._size + size + 2 * _RESERVE_BYTES
        if _LIBC.fallocate(self._file, _KEEP_SIZE, 0, wanted):
            error = ctypes.get_errno()
            if error in _FULL:  # other errors only prevent a reserve; writing still works
                raise OSError(error, os.strerror(error))
        self._reserved = wanted

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(OSError):  # standard error may go to the same disk
            sys.stderr.write(
                f"holdfast: cannot write records to {self._path}: {error.strerror}; training continues, and "
                f"{'these records are written at its end' if self._is_report else 'the report will lack these records'}\n"
            )
            sys.stderr.flush()


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of one file; a line that is not a record, such as a truncated one, is skipped."""
    for line in complete_lines(path):
        if (record := parse_record(line)) is not None:
            yield record


def parse_record(line: bytes) -> Record | None:
    """Return the record in a line, None if there is none because the line was truncated by a full disk or altered."""
    try:
        return _checked(record_from_dict(json.loads(line)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def load_events(directory: Path) -> list[Record]:
    """Return the records of the run in ``directory``, ordered by time; empty if it has no ``events.jsonl``.

    An incomplete last line of a file is skipped.

    Raises:
        ConfigError: if another line is not a record.
    """
    return sorted(read_event_files(directory, _events_in), key=lambda record: record.t_s)


def read_event_files(directory: Path, read: Callable[[Path], Iterable[_Read]]) -> list[_Read]:
    """Return what ``read`` yields for each file of records in a report directory, the oldest first."""
    while True:
        files = event_files(directory)
        with contextlib.suppress(FileNotFoundError):  # renamed or removed since
            items = [item for path in files for item in read(path)]
            if event_files(directory) == files:  # else the newest was renamed meanwhile, and another one has its name
                return items


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without the last one if it is incomplete."""
    with path.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


def _events_in(path: Path) -> Iterator[Record]:
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            yield _checked(record_from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a record of this version of Holdfast ({error})") from error
        except RecursionError as error:
            raise ConfigError(
                f"{path}, line {number}: not a record of this version of Holdfast (its brackets are nested too deep)"
            ) from error


def _checked(record: Record) -> Record:
    """Return a record that can be sorted by time; the file may have been altered."""
    for name, kinds in (("t_s", (int, float)), ("step", (int,)), ("rank", (int,))):
        value = getattr(record, name, 0)
        if not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}, not a number")
    return record


def read_run(run_dir: Path) -> list[Record]:
    """Return the records of all workers and of the launcher in ``run_dir``, ordered by time."""
    files = sorted(run_dir.glob("records-*.jsonl"))
    return sorted((r for file in files for r in read_records(file)), key=lambda r: r.t_s)
