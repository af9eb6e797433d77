"""One worker: ``python -m holdfast.launch.worker SCRIPT [ARGS]...``, started by mpirun.

The process that mpirun starts forks immediately. The child runs the script. The parent, the *watcher*, waits for it,
records how it ended, and kills itself with SIGKILL unless the child exited with 0: Open MPI notifies the other workers
of a killed worker, but not of one that exits with another code, which they would wait for forever.

The watcher also cleans up: it kills the children of a worker that has ended, the worker when mpirun has ended, and all
of them when the launcher has; in the last case, the worker is first asked to save and stop. If the watcher is stopped
(SIGSTOP) at that moment, its worker resumes it, and so do the other watchers.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from holdfast.clock import SystemClock
from holdfast.config import Settings, mpi_rank, rank_at_start
from holdfast.errors import ConfigError, HoldfastError, InternalError
from holdfast.launch.processes import (
    Process,
    WatchedWorker,
    adopt_orphans,
    die_with_parent,
    end_children,
    end_gently,
    name_of,
    outlive_parent,
    pair_path,
    this_node,
    value_of,
    wait_for_end,
)
from holdfast.records.beacon import Beacon, show_life
from holdfast.records.files import FileRecorder
from holdfast.records.logger import Logger
from holdfast.records.paths import beacon_path, launcher_lost_path, records_path, stop_path
from holdfast.records.types import ScriptFailed, WorkerEnded

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Buffer

LOG_DIR = "HOLDFAST_LOG_DIR"
"""Directory in which each worker's output is kept; if not set, output is not redirected."""
LAUNCHER = "HOLDFAST_LAUNCHER"
"""The launcher's process: the workers end with it, even if mpirun hangs."""
STOPPED = 4
"""Exit code of a script whose session saved its state on request (SIGTERM)."""
ALL_STOP = "HOLDFAST_ALL_STOP"
"""Whether all workers of the job stop when the launcher is gone, not only those of this node."""
LAUNCHER_NODE = "HOLDFAST_LAUNCHER_NODE"
"""Set if workers may be on other machines than the launcher: the name of its machine, and ``origin_s`` as Unix time."""
GRACE_S = "HOLDFAST_GRACE_S"
"""Time that workers may take to save and exit when the launcher is gone, in seconds."""
_WAKE_S = 1.0
"""Interval at which a worker resumes its watcher after the launcher is gone."""
_PUBLISH_S = 1.0
"""Interval at which a worker's files are synced to the other machines."""
_LONGER = 0.5
"""Additional share of the grace period for a worker that waits for others, which may be the unresponsive ones."""


def main() -> NoReturn:
    """Fork, run the script in the child, watch it in the parent."""
    _read_our_clock()
    launcher, mpirun = _launcher(), _mpirun()
    if launcher is None or os.getppid() != launcher.pid:  # until _wait monitors it
        die_with_parent(signal.SIGKILL)
    adopt_orphans()
    watcher = os.getpid()
    pid = os.fork()  # before MPI and torch are loaded: neither survives a fork
    if pid == 0:
        die_with_parent(signal.SIGKILL, watcher)
        _wake_without_launcher(watcher)
        run_script(Path(sys.argv[1]), sys.argv[2:])
    watch_launcher(pid, mpirun)


# -- the watcher


def watch_launcher(pid: int, mpirun: Process | None) -> NoReturn:
    """Wait for the worker ``pid``, record how it ended, and end so that the other workers are notified."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which saves; the watcher outlives it
    exit_code: int | None = None
    try:
        settings, rank = _worker_name()
        tell = _make_notifier(settings, rank, pid)
        exit_code = _wait(pid, mpirun, settings, rank)
        if exit_code is not None:
            tell(exit_code)
        end_children()
        if mpirun is not None and _is_last(settings):
            _end_mpirun(mpirun)
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk may be the problem
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
    finally:  # in any case: the other workers wait until Open MPI has seen this process end
        if exit_code == 0:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _worker_name() -> tuple[Settings, int]:
    try:
        settings = Settings.from_env()
    except ConfigError:  # reported by the worker
        settings = Settings()
    return settings, rank_at_start(settings)


def _note_pair(run_dir: Path, rank: int, worker_pid: int, watcher_pid: int) -> None:
    worker, watcher = Process.of(worker_pid), Process.of(watcher_pid)
    if worker is not None and watcher is not None:
        WatchedWorker(worker, watcher, this_node() if LAUNCHER_NODE in os.environ else "").note(
            pair_path(run_dir, rank)
        )


def _is_elsewhere() -> bool:
    """Return whether the launcher is on another machine."""
    return LAUNCHER_NODE in os.environ and os.environ[LAUNCHER_NODE].split()[0] != this_node()


def _read_our_clock() -> None:
    """On another machine than the launcher's, set the start of the job on this machine's monotonic clock."""
    if _is_elsewhere():
        began = float(os.environ[LAUNCHER_NODE].split()[1])
        os.environ["HOLDFAST_ORIGIN_S"] = str(time.monotonic() - (time.time() - began))


def _launcher() -> Process | None:
    """Return the launcher; None if it is on another machine, where Open MPI's local daemon is monitored instead."""
    return None if _is_elsewhere() else Process.parse(os.environ.get(LAUNCHER, ""))


def _mpirun() -> Process | None:
    """Return the parent process, if it is mpirun: neither the launcher nor an unrelated process that adopted us."""
    parent, launcher = os.getppid(), os.environ.get(LAUNCHER)
    if _is_elsewhere():
        return Process.of(parent) if name_of(parent) == "prted" else None
    return Process.of(parent) if launcher and value_of(parent, LAUNCHER) == launcher else None


def _wait(pid: int, mpirun: Process | None, settings: Settings, rank: int) -> int | None:
    """Return the exit code of the worker ``pid``; if the launcher ends first, make the worker save and exit.

    None if mpirun ended first: the worker was then killed, which is no failure of its own.
    """
    watched = {"launcher": _launcher(), "mpirun": mpirun}
    opened = {name: process.open() for name, process in watched.items() if process is not None}
    handles = {name: handle for name, handle in opened.items() if handle is not None} | {"worker": os.pidfd_open(pid)}
    if "mpirun" in handles:
        outlive_parent()
    ended = opened.keys() - handles.keys() or _wait_and_publish(handles, settings, rank)
    if ended == {"launcher"}:
        handles.pop("launcher", None)
        _wake_watchers(settings)
        _request_stop(pid, settings)
        ended = _wait_for_stop(handles, settings, rank)
    if "worker" not in ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if "mpirun" in ended else os.waitstatus_to_exitcode(status)


def _wait_and_publish(handles: dict[str, int], settings: Settings, rank: int) -> set[str]:
    """Return which processes have ended. Until then, sync the worker's files to other machines."""
    if LAUNCHER_NODE not in os.environ or not settings.run_dir:
        return wait_for_end(handles)
    run_dir = Path(settings.run_dir)
    while not (ended := wait_for_end(handles, _PUBLISH_S)):
        for path in (beacon_path(run_dir, rank), records_path(run_dir, str(rank))):
            _publish(path)
    return ended


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
        stop_path(run_dir).touch()
        launcher_lost_path(run_dir).touch()
    os.kill(pid, signal.SIGTERM)


def _wake_watchers(settings: Settings) -> None:
    """Resume the other watchers on this machine, which may be stopped: their workers may be hung or have ended."""
    for pair in _pairs(settings):
        if pair.node in ("", this_node()):
            pair.watcher.send(signal.SIGCONT)


def _pairs(settings: Settings) -> list[WatchedWorker]:
    """Return all workers of this start, alive or not, with their watchers."""
    paths = Path(settings.run_dir).glob("process-*[0-9]") if settings.run_dir else ()
    return [pair for path in paths if (pair := WatchedWorker.read(path)) is not None]


def _wait_for_stop(handles: dict[str, int], settings: Settings, rank: int) -> set[str]:
    """Return whether worker or mpirun has ended within the grace period; an empty set if neither has."""
    grace_s = float(os.environ.get(GRACE_S, "30"))
    ended = wait_for_end(handles, grace_s)
    position = Beacon.read(beacon_path(Path(settings.run_dir), rank)) if settings.run_dir else None
    if ended or position is None or not position.waits:
        return ended
    return wait_for_end(handles, _LONGER * grace_s)  # it waits for a worker that is killed now, and can save then


def _is_last(settings: Settings) -> bool:
    """Return whether the launcher is gone, and this was the last worker of the job to end."""
    launcher = _launcher()
    if launcher is None or launcher.is_alive() or not settings.run_dir or LAUNCHER_NODE in os.environ:
        return False  # workers on other machines are not known here; mpirun ends after them
    return not any(pair.worker.is_alive() for pair in _pairs(settings))


def _end_mpirun(mpirun: Process) -> None:
    """End mpirun, from a separate process: mpirun kills this one when it is asked to end."""
    if os.fork() == 0:
        os.setsid()
        end_gently(mpirun)
        os._exit(0)


def _make_notifier(settings: Settings, rank: int, pid: int) -> Callable[[int], None]:
    """Return a function that records how the worker ended; the file is opened now, as the others wait for us then."""
    if not settings.run_dir:
        return lambda exit_code: None
    run_dir = Path(settings.run_dir)
    _note_pair(run_dir, rank, pid, os.getpid())
    log = _log_beside(settings, rank, f"watch-{rank}")

    def tell(exit_code: int) -> None:
        log.write(WorkerEnded(exit_code=exit_code, pid=pid))

    return tell


def _log_beside(settings: Settings, rank: int, name: str) -> Logger:
    """Return a logger that writes to ``name`` in the run directory, with the step from a worker's beacon."""
    run_dir = Path(settings.run_dir)

    def where() -> tuple[int, int]:
        position = Beacon.read(beacon_path(run_dir, rank))
        return rank, -1 if position is None else position.step

    return Logger(SystemClock(settings.origin_s), where, FileRecorder(records_path(run_dir, name)))


# -- the worker


def _wake_without_launcher(watcher: int) -> None:
    """Resume the watcher periodically once the launcher has ended: the watcher must then end this worker."""
    launcher = _launcher()
    handle = None if launcher is None else launcher.open()
    if handle is None:
        return

    def wake() -> None:
        wait_for_end({"launcher": handle})
        while True:
            os.kill(watcher, signal.SIGCONT)
            time.sleep(_WAKE_S)

    threading.Thread(target=wake, name="holdfast-wake", daemon=True).start()


def run_script(script: Path, args: list[str]) -> NoReturn:
    """Run ``script`` as if it had been started directly, and end the process as the script ended."""
    exit_code = 0
    try:
        settings, rank = _worker_name()
        _remember_notice(settings)
        _have_children_end_with_us()
        _redirect_output(rank)
        _show_life(settings, rank)
        _set_torchrun_variables(settings)
        sys.argv = [str(script), *args]
        sys.path[0] = str(script.resolve().parent)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code == STOPPED:
                _leave(STOPPED)
            if end.code:
                raise
        _check_trained()
    except BaseException as error:
        exit_code = _report_failure(error, script)
    _leave(exit_code)


def _remember_notice(settings: Settings) -> None:
    """Remember a SIGTERM before training, except for newcomers, which no worker depends on yet, and if the job stops."""
    from holdfast import notice

    is_newcomer = settings.rank >= 0 and str(settings.rank) not in settings.ranks.split(",")
    run_dir = Path(settings.run_dir)
    if settings.run_dir:
        notice.remember(lambda: is_newcomer or stop_path(run_dir).exists())


def _have_children_end_with_us() -> None:
    """Make processes that Python forks in the main thread die with this process, even if the watcher has died before.

    The watcher adopts and ends all other children. For a fork in another thread, the kernel would signal when that
    thread ends; and a ``subprocess`` runs no Python between fork and exec in which it could be set up.
    """
    worker, here = os.getpid(), threading.local()

    def before() -> None:
        here.is_main = threading.get_native_id() == worker

    def after_in_child() -> None:
        if getattr(here, "is_main", False):
            die_with_parent(signal.SIGKILL, worker)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def _redirect_output(rank: int) -> None:
    """Redirect the output of this process, also from C, to its own file."""
    folder = os.environ.get(LOG_DIR)
    if not folder:
        return
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = _open_output(sys.stdout), _open_output(sys.stderr)


def _open_output(stream: TextIO) -> TextIO:
    stream.flush()
    file = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
    # a SIGKILL loses at most an incomplete line
    return io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


class _Output(io.FileIO):
    """An output file in which a full disk leaves a gap, instead of raising in the script that prints."""

    def write(self, data: Buffer) -> int:
        """Write ``data``; data that cannot be written is dropped."""
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def _show_life(settings: Settings, rank: int) -> None:
    """Start the heartbeat before imports and the script: it distinguishes a slow worker from a hung one."""
    if not settings.run_dir:
        return
    run_dir = Path(settings.run_dir)
    try:
        _note_pair(run_dir, rank, os.getpid(), os.getppid())
        show_life(beacon_path(run_dir, rank), settings.pulse_every_s)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {run_dir}: {error.strerror}; free space there, or set TMPDIR to another directory"
        ) from error


def _set_torchrun_variables(settings: Settings) -> None:
    """Set the variables that torchrun sets; RANK counts this start's workers from 0 without gaps, spares last."""
    size, rank = os.environ.get("OMPI_COMM_WORLD_SIZE", "1"), str(mpi_rank())
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", rank), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", size)
    if settings.rank >= 0:
        ranks = [int(rank) for rank in settings.ranks.split(",")]
        size, rank = str(len(ranks)), str(ranks.index(settings.rank) if settings.rank in ranks else settings.rank)
        local = rank, size
    size = str(int(size) - settings.spares)  # spares are not counted: they take the ranks of others
    os.environ.update(RANK=rank, LOCAL_RANK=local[0], WORLD_SIZE=size, LOCAL_WORLD_SIZE=local[1])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _check_trained() -> None:
    """Let the session, if any, check whether the script left it too early; leave the process group, if any.

    Raises:
        ScriptError: if the script ended in the middle of training.
    """
    session = sys.modules.get("holdfast.session.session")
    if session is not None:
        session.at_exit()
    engine = sys.modules.get("holdfast.distributed.comm_thread")
    if engine is not None:
        engine.leave()


def _report_failure(error: BaseException, script: Path) -> int:
    failed = describe(error, script)
    settings, rank = _worker_name()
    if settings.run_dir:
        _log_beside(settings, rank, str(rank)).write(failed)
    sys.stdout.flush()
    sys.stderr.write(failed.traceback or f"{failed.message}\n")
    return failed.exit_code


def describe(error: BaseException, script: Path) -> ScriptFailed:
    """Return the record of ``error``, which ended ``script``; the caller sets time, rank and step.

    A :class:`~holdfast.errors.HoldfastError` is reported in one line; any other error with its traceback, without the
    frames above the script's own.
    """
    frames = _script_frames(error.__traceback__, script)
    if isinstance(error, SystemExit):
        message, text = f"{script.name} ended with sys.exit({error.code!r})", ""
    elif isinstance(error, KeyboardInterrupt):
        message, text = f"{script.name} was interrupted", ""
    elif isinstance(error, HoldfastError) and not isinstance(error, InternalError):
        where = _line_in(frames, script)
        message, text = f"{error}{where}", ""
    else:
        text = "".join(traceback.format_exception(type(error), error, frames))
        message = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    exit_code = 2 if isinstance(error, ConfigError) else 1
    return ScriptFailed(exit_code=exit_code, message=message, traceback=text)


def _script_frames(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """Drop the frames above the script's own; all of them if the script never ran."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames


def _line_in(frames: TracebackType | None, script: Path) -> str:
    """Return the line of ``script`` that raised, from the deepest of its frames, as ``" (train.py, line 12)"``."""
    line = 0
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(script):
            line = frames.tb_lineno
        frames = frames.tb_next
    return f" ({script.name}, line {line})" if line else ""


def _leave(exit_code: int) -> NoReturn:
    """Exit immediately: MPI_Finalize, which a normal exit runs, can hang forever once a worker has failed."""
    try:
        atexit._run_exitfuncs()  # exit handlers of the script; logging's flush is among them
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


if __name__ == "__main__":
    main()
