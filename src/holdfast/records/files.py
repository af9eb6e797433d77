"""Writing records down, one file a worker.

Each worker appends to a file of its own with one ``write`` a line, so that a SIGKILL loses nothing
that was written and tears no line (the page cache outlives the process); only a full disk tears one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigError, InternalError
from holdfast.records.encoding import record_from_dict, record_to_dict
from holdfast.records.types import Record, StateHashed, StepCommitted

_RESERVE_BYTES = 1 << 14
"""Room that each file of records keeps for lines that must not be lost; a recovery writes some 300 bytes."""


_MANY = (StepCommitted, StateHashed)
"""Records of each step."""


_LIBC = ctypes.CDLL(None, use_errno=True)


_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


_KEEP_SIZE = 1


_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileRecorder:
    """Appends JSON lines to ``path``. Training must not stop for a full disk: records that cannot be written are dropped.

    Room is reserved ahead of the end of the file, so that a disk that fills up costs lines about steps, of which there are many,
    and not those about failures and the end of a worker, on which the launcher acts.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False
        self._torn = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write records to {path}: {error.strerror}") from error
        self._reserved = self._size = os.fstat(self._file).st_size
        with contextlib.suppress(OSError):  # the first record meets the same error, and says so
            self._reserve(0)

    def write(self, record: Record) -> None:
        """Append one line; if it cannot be written, say so once and drop it.

        Raises:
            InternalError: if the record was not stamped; see :class:`~holdfast.records.logger.Logger`.
        """
        if missing := record.missing_stamps():
            raise InternalError(f"a {type(record).__name__} is written down without {', '.join(missing)}")
        line = (json.dumps(record_to_dict(record)) + "\n").encode()
        try:
            if isinstance(record, _MANY):
                self._reserve(len(line))
            self._append(line)
        except OSError as error:
            self._warn(error)

    def _append(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        written = os.write(self._file, line)
        self._size += written
        self._torn = written < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _reserve(self, size: int) -> None:
        """Keep :data:`_RESERVE_BYTES` for this file beyond ``size`` more bytes, without making it longer.

        Raises:
            OSError: if the disk is full.
        """
        if self._size + size + _RESERVE_BYTES <= self._reserved:
            return
        wanted = self._size + size + 2 * _RESERVE_BYTES
        if _LIBC.fallocate(self._file, _KEEP_SIZE, 0, wanted):
            error = ctypes.get_errno()
            if error in _FULL:  # after any other error writing still works, without a reserve
                raise OSError(error, os.strerror(error))
        self._reserved = wanted

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(OSError):  # standard error may go to the same disk
            sys.stderr.write(
                f"holdfast: cannot write records to {self._path}: {error.strerror}; training continues, "
                "and the report will lack what was not written\n"
            )
            sys.stderr.flush()


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of one file; a line that is not a record, such as half a one, is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (record := parse_record(line)) is not None:
                yield record


def parse_record(line: bytes) -> Record | None:
    """Return the record that a line holds, None if it holds none: it was cut short by a full disk, or altered."""
    try:
        return _checked(record_from_dict(json.loads(line)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def load_events(directory: Path) -> list[Record]:
    """Return the records of the run in ``directory``, in the order of time; none if it has no ``events.jsonl``.

    Raises:
        ConfigError: if a line is not a record.
    """
    path = directory / "events.jsonl"
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(_checked(record_from_dict(json.loads(line))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a record of this version of Holdfast ({error})") from error
        except RecursionError as error:
            raise ConfigError(
                f"{path}, line {number}: not a record of this version of Holdfast (its brackets are nested too deep)"
            ) from error
    return sorted(records, key=lambda r: r.t_s)


def _checked(record: Record) -> Record:
    """Return a record that can be put in order; a file may have been altered."""
    for name, kinds in (("t_s", (int, float)), ("step", (int,)), ("rank", (int,))):
        value = getattr(record, name, 0)
        if not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}, no number")
    return record


def read_run(run_dir: Path) -> list[Record]:
    """Return the records of all workers and of the launcher in ``run_dir``, in the order of time."""
    files = sorted(run_dir.glob("records-*.jsonl"))
    return sorted((r for file in files for r in read_records(file)), key=lambda r: r.t_s)
