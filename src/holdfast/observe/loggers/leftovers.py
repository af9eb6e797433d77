"""Records of a job whose launcher was killed: they are in its run folder, until another launcher removes that.

Workers commit steps, and may save a checkpoint after them, without waiting for the launcher to read their records. If
the launcher is killed then, only the records have these steps. The launcher that resumes the job logs them from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.temporary import write_private
from holdfast.launch.run_paths import SHARED
from holdfast.records.files import read_run
from holdfast.records.types import Record

_MARK = "logged.json"
"""File in a run folder: which job it is of, and the Unix time of the records' zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """The records of one start of a job, in its run folder.

    Args:
        run_dir: The folder.
        epoch_s: Unix time of the records' zero.
    """

    run_dir: Path
    epoch_s: float

    def read(self) -> list[Record]:
        """Return all records so far, ordered by time; empty if the folder is gone."""
        try:
            return read_run(self.run_dir)
        except OSError:
            return []


def mark_run(run_dir: Path, job: str, epoch_s: float) -> RunRecords:
    """Write into a run folder which job it is of, so that :class:`Leftovers` finds it.

    Args:
        run_dir: The folder.
        job: Name of the job that all its starts have in common: where its checkpoints are. "" if it cannot resume.
        epoch_s: Unix time of the records' zero.
    """
    if job:
        with contextlib.suppress(OSError):  # as long as this launcher lives, nothing reads it
            write_private(run_dir / _MARK, json.dumps({"job": job, "epoch_s": epoch_s}))
    return RunRecords(run_dir=run_dir, epoch_s=epoch_s)


class Leftovers:
    """The run folders of earlier starts of a job on this machine. None of them is removed as long as this exists.

    Args:
        job: Name of the job; see :func:`mark_run`. "": there are none.
    """

    def __init__(self, job: str) -> None:
        self._locks: list[int] = []
        folders = sorted(Path(tempfile.gettempdir()).glob("holdfast-*")) if job else []
        runs = [run for folder in folders if (run := self._open(folder, job)) is not None]
        self.runs: tuple[RunRecords, ...] = tuple(sorted(runs, key=lambda run: run.epoch_s))

    def _open(self, folder: Path, job: str) -> RunRecords | None:
        """Return the records in a folder and keep it locked, if it is one of the job."""
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        run = _run_in(folder, job) if os.fstat(lock).st_uid == os.getuid() else None
        if run is None:
            os.close(lock)
            return None
        with contextlib.suppress(OSError):  # another launcher removes the folder at this moment
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._locks.append(lock)
        return run

    def close(self) -> None:
        """Let the folders be removed by the next launcher."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []


def _run_in(folder: Path, job: str) -> RunRecords | None:
    run_dir = folder / SHARED if (folder / SHARED).is_dir() else folder
    try:
        mark = json.loads((run_dir / _MARK).read_bytes())
        return RunRecords(run_dir=run_dir, epoch_s=float(mark["epoch_s"])) if mark["job"] == job else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
