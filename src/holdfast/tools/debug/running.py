"""Debugging of a running job: the stack of a hung worker before it is killed, and bundles when workers are lost."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.launch.control import RunningJob
from holdfast.launch.job import Job, check_writable
from holdfast.launch.processes import Process, WatchedWorker, this_node
from holdfast.launch.stacks import last_stack, stack_from_outside, stack_path
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path
from holdfast.records.queued import NotTaken
from holdfast.records.types import JobRestarted, Record, Recovered, WorkerFenced

if TYPE_CHECKING:
    from holdfast.tools.debug.bundle import BundleSource

OFF = "off"
"""Value of ``--debug-bundles`` with which not even stacks are taken."""
_MOST_BUNDLES = 5
_MOST_STACKS = 8
"""A run writes no more bundles, and no more stacks, than this: the first failures explain the most."""
_STOPPED_S = 0.3
"""How long py-spy may take to read the stacks of a stopped worker; it usually takes 50 ms."""
_BUNDLE_S = 60.0
_LAST_BUNDLE_S = 2.0
"""Time limits of the process that writes a bundle: usually, and at the end of the job."""
_AT_ONCE = 8


def check_bundles(job: Job) -> None:
    """Raise a ConfigError that says what to change, if ``--debug-bundles`` names a folder that cannot be written."""
    if job.debug_bundles not in ("", OFF):
        check_writable(Path(job.debug_bundles), "--debug-bundles")


class LastStacks:
    """Stacks of workers that are about to be killed because they hang.

    Args:
        run_dir: The directory of the run.
        is_off: Take none.
    """

    def __init__(self, run_dir: Path, *, is_off: bool) -> None:
        self._run_dir = run_dir
        self._left = 0 if is_off else _MOST_STACKS

    def take(self, rank: int, worker: Process) -> str:
        """Return the stacks of a worker; "" if it does not write them within 50 ms, or is stopped and py-spy is missing."""
        if self._left <= 0:
            return ""
        self._left -= 1
        if worker.is_stopped():  # it must not be resumed, not even to write its stacks
            stack = stack_from_outside(worker.pid, _STOPPED_S)
            return "" if stack.startswith("(") else stack
        return last_stack(stack_path(self._run_dir, rank), worker.send)


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
        self._generations: set[int] = set()
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
        if isinstance(record, JobRestarted):  # its workers count their generations from the beginning
            self._generations.clear()
        if isinstance(record, Recovered) and record.lost and record.generation not in self._generations:
            self._generations.add(record.generation)
            return f"recovery-step-{record.step}"
        return ""


def live_source(job: RunningJob) -> BundleSource:
    """Return what a bundle of a running job is made from, with the positions and stacks of its workers on this machine.

    Raises:
        ConfigError: if the job has just ended.
    """
    from concurrent.futures import ThreadPoolExecutor

    from holdfast.launch.debug_handlers import flight_recorder, handlers_path
    from holdfast.tools.debug.bundle import BundleSource

    ranks = sorted(int(path.name.removeprefix("process-")) for path in job.run_dir.glob("process-*") if _is_rank(path))
    pairs = {rank: WatchedWorker.read(job.run_dir / f"process-{rank}") for rank in ranks}
    local_workers = {
        rank: pair.worker for rank, pair in pairs.items() if pair is not None and pair.node in ("", this_node())
    }
    alive = {rank: worker for rank, worker in local_workers.items() if worker.is_alive()}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        stacks = dict(zip(alive, pool.map(lambda worker: stack_from_outside(worker.pid), alive.values()), strict=True))
        traces = {rank: flight_recorder(handlers_path(job.run_dir, rank)) for rank in alive}
    live = {"positions.json": json.dumps(_positions(job.run_dir, ranks), indent=1) + "\n"}
    live |= {f"stacks/rank-{rank}.txt": text for rank, text in stacks.items() if not text.startswith("(")}
    live |= {f"flight-recorder/rank-{rank}.json": text for rank, text in traces.items() if not text.startswith("(")}
    notes = [f"stack of rank {rank}: {text}" for rank, text in stacks.items() if text.startswith("(")]
    notes += [f"flight recorder of rank {rank}: {text}" for rank, text in traces.items() if text.startswith("(")]
    notes += [
        f"rank {rank} is on another machine"
        for rank, pair in pairs.items()
        if pair is not None and rank not in local_workers
    ]
    return BundleSource(
        report_dir=Path(job.report_dir) if job.report_dir else None,
        run_dir=job.run_dir,
        log_dir=Path(job.log_dir) if job.log_dir else None,
        environment=_environment_of(job.pid),
        live=live,
        notes=notes,
    )


def _is_rank(path: Path) -> bool:
    return path.name.removeprefix("process-").isdecimal()


def _positions(run_dir: Path, ranks: Sequence[int]) -> dict[int, dict[str, object]]:
    positions = {rank: Beacon.read(beacon_path(run_dir, rank)) for rank in ranks}
    return {rank: asdict(position) for rank, position in positions.items() if position is not None}


def _environment_of(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError as error:
        raise ConfigError(f"job {pid} has ended in the meantime") from error
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
