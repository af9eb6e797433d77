"""What a worker and its watcher read of the job from their environment, and where they record what happens to them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.base.clock import SystemClock
from holdfast.config import Settings
from holdfast.engine.start_rank import rank_at_start
from holdfast.errors import ConfigError
from holdfast.launch.supervise.processes import Process, WatchedWorker, pair_path, this_node
from holdfast.records.beacon import Beacon
from holdfast.records.files import FileRecorder
from holdfast.records.logger import Logger
from holdfast.records.paths import beacon_path, records_path

LOG_DIR = "HOLDFAST_LOG_DIR"
"""Directory in which each worker's output is kept; if not set, output is not redirected."""
LAUNCHER = "HOLDFAST_LAUNCHER"
"""The launcher's process: the workers end with it, even if mpirun hangs."""
ALL_STOP = "HOLDFAST_ALL_STOP"
"""Whether all workers of the job stop when the launcher is gone, not only those of this node."""
LAUNCHER_NODE = "HOLDFAST_LAUNCHER_NODE"
"""Set if workers may be on other machines than the launcher: the name of its machine, and ``origin_s`` as Unix time."""
GRACE_S = "HOLDFAST_GRACE_S"
"""Time that workers may take to save and exit when the launcher is gone, in seconds."""


def worker_name() -> tuple[Settings, int]:
    """Return the settings and the rank of this worker; the defaults if a setting is wrong."""
    try:
        settings = Settings.from_env()
    except ConfigError:  # reported by the worker
        settings = Settings()
    return settings, rank_at_start(settings)


def note_pair(run_dir: Path, rank: int, worker_pid: int, watcher_pid: int) -> None:
    """Record the processes of a worker and its watcher, unless one has ended."""
    worker, watcher = Process.of(worker_pid), Process.of(watcher_pid)
    if worker is not None and watcher is not None:
        WatchedWorker(worker, watcher, this_node() if LAUNCHER_NODE in os.environ else "").note(
            pair_path(run_dir, rank)
        )


def is_elsewhere() -> bool:
    """Return whether the launcher is on another machine."""
    return LAUNCHER_NODE in os.environ and os.environ[LAUNCHER_NODE].split()[0] != this_node()


def read_our_clock() -> None:
    """On another machine than the launcher's, set the start of the job on this machine's monotonic clock."""
    if is_elsewhere():
        began = float(os.environ[LAUNCHER_NODE].split()[1])
        os.environ["HOLDFAST_ORIGIN_S"] = str(time.monotonic() - (time.time() - began))


def launcher_process() -> Process | None:
    """Return the launcher; None if it is on another machine, where Open MPI's local daemon is monitored instead."""
    return None if is_elsewhere() else Process.parse(os.environ.get(LAUNCHER, ""))


def log_beside(settings: Settings, rank: int, name: str) -> Logger:
    """Return a logger that writes to ``name`` in the run directory, with the step from a worker's beacon."""
    run_dir = Path(settings.run_dir)

    def where() -> tuple[int, int]:
        position = Beacon.read(beacon_path(run_dir, rank))
        return rank, -1 if position is None else position.step

    return Logger(SystemClock(settings.origin_s), where, FileRecorder(records_path(run_dir, name)))
