"""Bundles of a running job, written when workers were lost or hang: ``--debug-bundles``."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.launch.displays import Display
from holdfast.launch.health.stacks import OFF
from holdfast.launch.job import Job, check_writable
from holdfast.launch.record_bus import RunState
from holdfast.records.progress import RunProgress
from holdfast.records.queued import NotTaken, QueuedSink
from holdfast.records.types import Record, WorkerFenced

_MOST_BUNDLES = 5
"""A run writes no more bundles than this: the first failures explain the most."""
_BUNDLE_S = 60.0
_LAST_BUNDLE_S = 2.0
"""Time limits of the process that writes a bundle: usually, and at the end of the job."""


class BundleDisplay(Display):
    """The bundles of ``--debug-bundles``."""

    def check(self, job: Job) -> None:
        if job.debug_bundles not in ("", OFF):
            check_writable(Path(job.debug_bundles), "--debug-bundles")

    def open(self, run: RunState) -> Sequence[QueuedSink]:
        job = run.job
        if job.node_rank != 0 or job.debug_bundles in ("", OFF):
            return ()
        return (QueuedSink(BundleWriter(Path(job.debug_bundles).absolute()), run.view.print_line),)


class BundleWriter:
    """A sink of records that has a bundle written when workers were lost or hang, by a process of the lowest priority.

    Args:
        folder: Where bundles are written: ``START-PID-N-recovery-step-S.tar.gz`` and ``START-PID-N-hang-rank-R.tar.gz``, with
            the time when this launcher started and its PID, since other jobs may write to the folder, too.
    """

    name = "debug-bundles"
    trouble = "no debug bundle was written"
    pause_s = 0.2  # the records of a recovery arrive together
    longest_s = math.inf

    def __init__(self, folder: Path) -> None:
        self._begin = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._progress = RunProgress()
        self._written = 0
        self._writing: subprocess.Popen[bytes] | None = None

    def take(self, records: Sequence[Record]) -> None:
        """Start to write a bundle if a record tells of a new failure, and no other bundle is being written."""
        reasons = [reason for record in records if (reason := self._reason(record))]
        if not reasons or self._written >= _MOST_BUNDLES or self._is_busy():
            return
        self._written += 1
        out = f"{self._begin}-{self._written}-{reasons[-1]}.tar.gz"
        words = [sys.executable, "-m", "holdfast", "debug-bundle", "--job", str(os.getpid()), "--out", out]
        try:
            self._writing = subprocess.Popen(
                ["nice", "-n", "19", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise NotTaken(f"nice cannot be started: {error.strerror}") from error
        self._ends_s = time.monotonic() + _BUNDLE_S

    def close(self, end_s: float) -> None:
        """Wait shortly for the last bundle, whose run is over."""
        if self._writing is not None:
            try:
                self._writing.wait(_LAST_BUNDLE_S)
            except subprocess.TimeoutExpired:
                self._end()

    def _is_busy(self) -> bool:
        if self._writing is None or self._writing.poll() is not None:
            return False
        if time.monotonic() > self._ends_s:
            self._end()
            return False
        return True

    def _end(self) -> None:
        assert self._writing is not None
        os.killpg(self._writing.pid, signal.SIGKILL)  # started in its own session, so the group holds no other process
        self._writing.wait()
        for draft in self._begin.parent.glob(f".{self._begin.name}-{self._written}-*.draft"):
            draft.unlink(missing_ok=True)

    def _reason(self, record: Record) -> str:
        """Return what a bundle about a record is called; "" if it needs none."""
        if isinstance(record, WorkerFenced):
            return f"hang-rank-{record.rank}"
        known = len(self._progress.recoveries)
        self._progress.apply(record)
        return f"recovery-step-{record.step}" if len(self._progress.recoveries) > known else ""
