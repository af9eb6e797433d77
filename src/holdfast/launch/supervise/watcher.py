"""The watcher of a worker: waits for it, records how it ended, and cleans up after it.

The watcher kills itself with SIGKILL unless the worker exited with 0: Open MPI notifies the other workers of a killed
worker, but not of one that exits with another code, which they would wait for forever.

It also kills the children of a worker that has ended, the worker when mpirun has ended, and all of them when the
launcher has; in the last case, the worker is first asked to save and stop. If the watcher is stopped (SIGSTOP) at that
moment, its worker resumes it, and so do the other watchers.

With several machines it also kills the worker when the launcher has removed the file of the two from the run directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from holdfast.base.side_work import run_aside, say
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.supervise.fork_protocol import FAILED, SUCCEEDED, peer
from holdfast.launch.supervise.processes import (
    Process,
    end_children,
    end_gently,
    name_of,
    outlive_parent,
    pair_path,
    pairs_in,
    value_of,
    wait_for_end,
)
from holdfast.launch.supervise.worker_context import (
    ALL_STOP,
    GRACE_S,
    LAUNCHER,
    LAUNCHER_NODE,
    is_elsewhere,
    launcher_process,
    log_beside,
    note_pair,
    worker_name,
)
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path, launcher_lost_path, records_path, stop_path
from holdfast.records.types import WorkerEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PUBLISH_S = 1.0
"""Interval at which a worker's files are synced to the other machines."""
_LINGER_S = 1.0
"""A watcher whose starter has ended in its place ends later: to free its memory, the torch of the fork server, takes a core
for milliseconds, in which the survivors recover."""
_LONGER = 0.5
"""Additional share of the grace period for a worker that waits for others, which may be the unresponsive ones."""

_MPIRUN = ("mpirun", "prterun", "prted")
"""Names of mpirun's process, and of its daemons on other hosts."""


class Starter:
    """The process that mpirun or the launcher started, if a fork server forked the watcher: it ends as the watcher does.

    Args:
        connection: Its connection to this process. If it ends unexpectedly, so does the worker.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        pid, _ = peer(connection)
        self.process = Process.of(pid) or Process(pid, -1)  # one that has ended already

    def end(self, *, succeeded: bool) -> None:
        """Let it exit with 0, or end by SIGKILL; without this, it ends by SIGKILL as soon as this process has ended."""
        with contextlib.suppress(OSError):  # it was killed: its exit code is its own
            self._connection.sendall(SUCCEEDED if succeeded else FAILED)

    def close(self) -> None:
        """Close the connection, in a process that is not the watcher."""
        self._connection.close()


def watch(pid: int, mpirun: Process | None, starter: Starter | None = None) -> NoReturn:
    """Wait for the worker ``pid``, record how it ended, and end so that the other workers are notified."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which was forked before: it would inherit this
    exit_code: int | None = None
    try:
        settings, rank = worker_name()
        tell = _make_notifier(settings, rank, pid)
        exit_code = _wait(
            pid, {"mpirun": mpirun, "starter": None if starter is None else starter.process}, settings, rank
        )
        if exit_code is not None:
            tell(exit_code)  # before the starter ends, whose parent then looks for this record
        if exit_code and starter is not None:
            starter.end(succeeded=False)
        end_children()
        if mpirun is not None and _is_last(settings):
            _end_mpirun(mpirun)
        if exit_code and starter is not None:
            time.sleep(_LINGER_S)
    except ConfigError as error:
        say(f"the watcher of a worker ends, and the worker with it: {error}")
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk may be the problem
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
    finally:  # in any case: the other workers wait until Open MPI has seen this process end
        if exit_code == 0:
            if starter is not None:
                starter.end(succeeded=True)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def end_if_orphaned(parent: int) -> None:
    """End this process if ``parent`` is not the mpirun that has started it, directly or through a starter, but has ended.

    MPI_Init would begin a job of its own, of one worker, in the folders of the restarted job.
    """
    is_of_mpirun = LAUNCHER in os.environ and "OMPI_COMM_WORLD_SIZE" in os.environ
    if is_of_mpirun and (Process.of(parent) is None or name_of(parent) not in _MPIRUN):
        os.kill(os.getpid(), signal.SIGKILL)


def mpirun_above(parent: int) -> Process | None:
    """Return the process ``parent``, if it is mpirun: neither the launcher nor an unrelated process that adopted us."""
    launcher = os.environ.get(LAUNCHER)
    if is_elsewhere():
        return Process.of(parent) if name_of(parent) == "prted" else None
    return Process.of(parent) if launcher and value_of(parent, LAUNCHER) == launcher else None


def _wait(pid: int, above: Mapping[str, Process | None], settings: Settings, rank: int) -> int | None:
    """Return the exit code of the worker ``pid``; if the launcher ends first, make the worker save and exit.

    None if mpirun or the starter (``above``) ended first: the worker was then killed, which is no failure of its own.
    """
    watched = {"launcher": launcher_process(), **above}
    opened = {name: process.open() for name, process in watched.items() if process is not None}
    handles = {name: handle for name, handle in opened.items() if handle is not None} | {"worker": os.pidfd_open(pid)}
    if "mpirun" in handles:
        outlive_parent()
    ended = opened.keys() - handles.keys() or _wait_and_publish(handles, settings, rank)
    if ended == {"launcher"}:
        handles.pop("launcher", None)
        run_aside("resuming other watchers", lambda: _wake_watchers(settings), None)
        _request_stop(pid, settings)
        ended = _wait_for_stop(handles, settings, rank)
    if "worker" not in ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if ended & above.keys() else os.waitstatus_to_exitcode(status)


def _wait_and_publish(handles: dict[str, int], settings: Settings, rank: int) -> set[str]:
    """Return which processes have ended. Until then, sync the worker's files to other machines.

    An empty set if the launcher, which may not reach this machine, has given the worker up.
    """
    if LAUNCHER_NODE not in os.environ or not settings.run_dir:
        return wait_for_end(handles)
    run_dir = Path(settings.run_dir)
    while not (ended := wait_for_end(handles, _PUBLISH_S)):
        if _is_disowned(run_dir, rank):
            break
        for path in (beacon_path(run_dir, rank), records_path(run_dir, str(rank))):
            run_aside("syncing a file to other machines", functools.partial(_publish, path), None)
    return ended


def _is_disowned(run_dir: Path, rank: int) -> bool:
    """Return whether the launcher has removed the file of this worker: the job goes on without it, or is over."""
    try:
        with pair_path(run_dir, rank).open("rb"):  # opened, because a network file system then asks its server
            return False
    except FileNotFoundError:
        return True
    except OSError:  # asked again in the next second
        return False


def _publish(path: Path) -> None:
    """Sync a file to its file system, including mapped memory, whose changes network file systems do not notice."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # not created yet, or the run is over and its directory removed
        return
    with contextlib.suppress(OSError):  # retried in the next second
        os.fsync(file)
    os.close(file)


def _request_stop(pid: int, settings: Settings) -> None:
    """Ask the worker ``pid``, whose launcher is gone, to save and stop: with all workers, or to leave the job."""
    run_dir = Path(settings.run_dir)
    if os.environ.get(ALL_STOP) == "1" and settings.run_dir and run_dir.is_dir():
        for path in (stop_path(run_dir), launcher_lost_path(run_dir)):  # without them, this worker alone leaves
            run_aside("asking all workers to stop", functools.partial(path.touch, mode=0o600), None)
    os.kill(pid, signal.SIGTERM)


def _wake_watchers(settings: Settings) -> None:
    """Resume the other watchers on this machine, which may be stopped: their workers may be hung or have ended."""
    for pair in pairs_in(Path(settings.run_dir)).values() if settings.run_dir else ():
        if pair.is_here:
            pair.watcher.send(signal.SIGCONT)


def _wait_for_stop(handles: dict[str, int], settings: Settings, rank: int) -> set[str]:
    """Return whether worker or mpirun has ended within the grace period; an empty set if neither has."""
    grace_s = float(os.environ[GRACE_S])
    ended = wait_for_end(handles, grace_s)
    path = beacon_path(Path(settings.run_dir), rank)
    position = run_aside("reading the beacon", lambda: Beacon.read(path), None) if settings.run_dir else None
    if ended or position is None or not position.waits:
        return ended
    return wait_for_end(handles, _LONGER * grace_s)  # it waits for a worker that is killed now, and can save then


def _is_last(settings: Settings) -> bool:
    """Return whether the launcher is gone, and this was the last worker of the job to end."""
    launcher = launcher_process()
    if launcher is None or launcher.is_alive() or not settings.run_dir or LAUNCHER_NODE in os.environ:
        return False  # workers on other machines are not known here; mpirun ends after them
    return not any(pair.worker.is_alive() for pair in pairs_in(Path(settings.run_dir)).values())


def _end_mpirun(mpirun: Process) -> None:
    """End mpirun, from a separate process: mpirun kills this one when it is asked to end."""
    if os.fork() == 0:
        os.setsid()
        end_gently(mpirun)
        os._exit(0)


def _make_notifier(settings: Settings, rank: int, pid: int) -> Callable[[int], None]:
    """Return a function that records how the worker ended; the file is opened now, as the others wait for us then.

    Raises:
        ConfigError: if nothing can be written to the run's directory.
    """
    if not settings.run_dir:
        return lambda exit_code: None
    run_dir = Path(settings.run_dir)
    try:
        note_pair(run_dir, rank, pid, os.getpid())
    except OSError as error:
        raise ConfigError(f"cannot write to {run_dir}: {error.strerror}") from error
    log = log_beside(settings, rank, f"watch-{rank}")

    def tell(exit_code: int) -> None:
        log.write(WorkerEnded(exit_code=exit_code, pid=pid))

    return tell
