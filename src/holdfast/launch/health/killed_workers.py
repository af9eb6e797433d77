"""Reports workers that were killed, before the kernel has freed their memory.

To free the memory of a process that has imported torch takes the kernel milliseconds. Only then its watcher is woken, which
records how it ended, and the launcher reads records every now and then. The survivors could have recovered by then.

The life lock of a worker (:mod:`~holdfast.records.life_lock`) wakes a thread here as soon as its main thread ends. The lock
alone says too little: it is also released by a worker that replaces its program, or ends in order. So the kernel must say
of the same process that none of its threads runs any more, and that a signal ends it. All other ends are left to the
record of the watcher, which follows in any case.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.base.side_work import run_aside
from holdfast.launch.health.deaths import DeathRegister
from holdfast.launch.supervise.processes import Process
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path
from holdfast.summary.event_lines import cause_of_death

_LAST_THREAD_S = 0.1
"""Time within which the other threads of a killed worker end, too: they must be given a core for it."""
_LOOK_S = 2e-4


class KilledWorkers:
    """Waits for the workers of this machine, each in a thread of its own, which costs nothing while they live.

    Args:
        run_dir: Directory of the run.
        deaths: Each death is reported to it once, in a thread. Without survivors to notify, no worker is waited for.
    """

    def __init__(self, run_dir: Path, deaths: DeathRegister) -> None:
        self._run_dir = run_dir
        self._deaths = deaths
        self._is_closed = False

    def watch(self, rank: int, worker: Process) -> None:
        """From now on report the death of a worker, whose beacon exists; not if the system gives no more threads."""
        if self._deaths.members is not None:
            _start_thread(self._wait, rank, worker)

    def close(self) -> None:
        """Report nothing more: later deaths are the launcher's doing."""
        self._is_closed = True

    def _wait(self, rank: int, worker: Process) -> None:
        """Wait in a thread that does nothing else: survivors see the mark in the lock again once it has ended."""
        if Beacon.wait_for_end(beacon_path(self._run_dir, rank)):
            _start_thread(self._look, rank, worker)

    def _look(self, rank: int, worker: Process) -> None:
        ends_s = time.monotonic() + _LAST_THREAD_S
        while (number := worker.signal_of_end()) is None and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
        if number and not self._is_closed:
            cause = cause_of_death(-number)
            run_aside("reporting a death at once", lambda: self._deaths.report(rank, cause), None)  # the record follows


def _start_thread(target: Callable[[int, Process], None], rank: int, worker: Process) -> None:
    with contextlib.suppress(RuntimeError):  # no more threads: then the record of the watcher comes first
        threading.Thread(target=target, args=(rank, worker), name=f"holdfast-end-{rank}", daemon=True).start()
