"""The register of deaths of one start of a job, to which everything that sees a worker die reports.

A thread that waits for the end of each worker reports it at once, the record bus when it reads how a worker ended, and the
launchers of other nodes when a node is lost with its workers.

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
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.side_work import run_aside
from holdfast.errors import StoreLost
from holdfast.launch.supervise.processes import Process
from holdfast.membership import Store
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path
from holdfast.summary.event_lines import cause_of_death


@dataclass(frozen=True, slots=True)
class DeathRegister:
    """Notifies the survivors of deaths, and launchers that come late. Reports are those of its start only, however late.

    Args:
        members: The workers' store; None if their fabric notifies them.
        launchers: The launchers' store; None if there is one launcher.
        start: Number of the start.
        node: Rank of this node.
    """

    members: Store | None = None
    launchers: Store | None = None
    start: int = 0
    node: int = 0

    def report(self, rank: int, cause: str) -> None:
        """Notify the workers that ``rank`` has died; for any thread."""
        if self.members is not None:
            with contextlib.suppress(StoreLost):  # then no worker continues
                self.members.put(f"dead/{rank}", cause)

    def note_end(self, rank: int, cause: str = "") -> None:
        """Record that a worker has ended, or was given up; if it died, notify the workers of the ``cause``."""
        if cause:
            self.report(rank, cause)
        if self.launchers is not None:
            with contextlib.suppress(StoreLost):  # detected at the launcher's next check
                self.launchers.put(f"gone/{self.start}/{rank}", str(self.node))

    def noted_by(self, rank: int) -> str | None:
        """Return the node whose launcher recorded that a worker has ended; None if none did."""
        return None if self.launchers is None else self.launchers.get(f"gone/{self.start}/{rank}")


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
