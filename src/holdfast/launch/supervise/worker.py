"""One worker: ``python -m holdfast.launch.supervise.worker SCRIPT [ARGS]...`` (or ``-m MODULE``), of mpirun or the launcher.

The process forks immediately. The child runs the script; the parent is its watcher, see
:mod:`holdfast.launch.supervise.watcher`. With a fork server, see :mod:`holdfast.launch.supervise.fork_server`, both are
forked from there.
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

from holdfast.base.phases import Phase
from holdfast.base.side_work import say
from holdfast.base.system_errors import is_limit, refusal, refusal_to_torch
from holdfast.config import Settings
from holdfast.engine.start_rank import LOOPBACK, mpi_rank
from holdfast.errors import STOPPED, ConfigError, HoldfastError
from holdfast.launch.health.stacks import stack_path, write_stacks_on_signal
from holdfast.launch.supervise.debug_handlers import handlers_path, serve_handlers
from holdfast.launch.supervise.gpus import for_slot
from holdfast.launch.supervise.processes import adopt_orphans, die_with_parent, open_log, wait_for_end
from holdfast.launch.supervise.script_failure import describe, device_loss, line_in
from holdfast.launch.supervise.slots import slot_at_start
from holdfast.launch.supervise.watcher import Starter, end_if_orphaned, mpirun_above, watch
from holdfast.launch.supervise.worker_context import (
    LOG_DIR,
    launcher_process,
    log_beside,
    note_pair,
    read_our_clock,
    worker_name,
)
from holdfast.launch.target import Target
from holdfast.records.beacon import is_busy, publish_exit, show_life
from holdfast.records.paths import beacon_path, stop_path
from holdfast.records.types import DeviceLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from holdfast.launch.supervise.processes import Process

_WAKE_S = 1.0
"""Interval at which a worker resumes its watcher after the launcher is gone, or checks whether exit handlers are busy."""


def main() -> NoReturn:
    """Fork, run the script in the child, watch it in the parent."""
    read_our_clock()
    end_if_orphaned(os.getppid())
    launcher, mpirun = launcher_process(), mpirun_above(os.getppid())
    if launcher is None or os.getppid() != launcher.pid:  # until the watcher monitors it
        die_with_parent(signal.SIGKILL)
    run_watched(sys.argv[1:], mpirun)  # before MPI and torch are loaded: neither survives a fork


def run_watched(words: Sequence[str], mpirun: Process | None, starter: Starter | None = None) -> NoReturn:
    """Fork; run the script or module that ``words`` name, in the child, and watch it in this process."""
    adopt_orphans()
    watcher = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        sys.exit(f"holdfast: a worker cannot begin: {refusal(error) or error}")
    if pid == 0:
        die_with_parent(signal.SIGKILL, watcher)
        if starter is not None:
            starter.close()
        _wake_without_launcher(watcher)
        run_script(words)
    watch(pid, mpirun, starter)


def _wake_without_launcher(watcher: int) -> None:
    """Resume the watcher periodically once the launcher has ended: the watcher must then end this worker."""
    launcher = launcher_process()
    handle = None if launcher is None else launcher.open()
    if handle is None:
        return

    def wake() -> None:
        wait_for_end({"launcher": handle})
        while True:
            os.kill(watcher, signal.SIGCONT)
            time.sleep(_WAKE_S)

    threading.Thread(target=wake, name="holdfast-wake", daemon=True).start()


def run_script(words: Sequence[str]) -> NoReturn:
    """Run ``SCRIPT [ARGS]...`` or ``-m MODULE [ARGS]...`` as Python would, and end the process as it ended."""
    exit_code = 0
    script = Path(words[0])
    try:
        settings, rank = worker_name()
        _remember_notice(settings)
        _have_children_end_with_us()
        _redirect_output(rank)
        _show_life(settings, rank)
        _serve_handlers(settings, rank)
        _set_torchrun_variables(settings)
        target = Target.of_words(words)
        script = target.script
        try:
            with _forks_apart():
                _run(target)
        except SystemExit as end:
            if end.code == STOPPED:
                _leave(STOPPED)
            if end.code:
                raise
        exit_code = _check_trained()
    except BaseException as error:
        if (lost := device_loss(error)) is not None:
            _end_without_device(lost, line_in(error.__traceback__, script))
        if (refused := refusal_to_torch(error)) is not None and _ranks_continue():
            # the others have the same script and other processes that load data, so this is no error of the script
            say(f"{refused.strerror}{line_in(error.__traceback__, script)}; this rank ends, and the others continue")
            os.kill(os.getpid(), signal.SIGKILL)
        exit_code = _report_failure(error, script)
    _leave(exit_code)


@contextlib.contextmanager
def _forks_apart() -> Iterator[None]:
    """End a process that the script has forked, and in which the script ends, as Python does: it is not the worker."""
    worker, failed = os.getpid(), None
    try:
        yield
    except BaseException as error:
        if os.getpid() == worker:
            raise
        failed = error
    if os.getpid() != worker:
        _end_fork(failed)


def _end_fork(failed: BaseException | None) -> NoReturn:
    exit_code = 1
    try:
        if failed is None or isinstance(failed, SystemExit):
            code = failed.code if failed is not None else 0
            exit_code = code if isinstance(code, int) else int(code is not None)
            if isinstance(code, str):
                sys.stderr.write(f"{code}\n")
        else:
            traceback.print_exception(failed)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code & 0xFF)


def _run(target: Target) -> None:
    sys.argv = [str(target.script), *target.args]
    if target.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target.module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(target.script.resolve().parent)
        runpy.run_path(str(target.script), run_name="__main__")


def _remember_notice(settings: Settings) -> None:
    """Remember a SIGTERM before training, except for newcomers, which no worker depends on yet, and if the job stops."""
    from holdfast.base import notice

    is_newcomer = settings.rank >= 0 and str(settings.rank) not in settings.ranks.split(",")
    run_dir = Path(settings.run_dir)
    if settings.run_dir:
        notice.remember(lambda: is_newcomer or stop_path(run_dir).exists())


def _have_children_end_with_us() -> None:
    """Make processes that Python forks in the main thread die with this process, even if the watcher has died before.

    The watcher adopts and ends all other children. For a fork in another thread, the kernel would signal when that
    thread ends; and a ``subprocess`` runs no Python between fork and exec in which it could be set up.
    """
    worker, thread_data = os.getpid(), threading.local()

    def before() -> None:
        thread_data.is_main = threading.get_native_id() == worker

    def after_in_child() -> None:
        if getattr(thread_data, "is_main", False):
            die_with_parent(signal.SIGKILL, worker)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def _redirect_output(rank: int) -> None:
    """Redirect the output of this process, also from C, to its own file."""
    folder = os.environ.get(LOG_DIR)
    if not folder:
        return
    log = open_log(Path(folder, f"rank-{rank}.log"))
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
        note_pair(run_dir, rank, os.getpid(), os.getppid())
        show_life(beacon_path(run_dir, rank), settings.pulse_every_s)
        write_stacks_on_signal(stack_path(run_dir, rank))
    except OSError as error:
        if is_limit(error):
            raise HoldfastError(f"cannot write to {run_dir}: {refusal(error)}") from error
        raise ConfigError(
            f"cannot write to {run_dir}: {error.strerror}; free space there, or set TMPDIR to another directory"
        ) from error


def _serve_handlers(settings: Settings, rank: int) -> None:
    """Serve torch's debug handlers, if the job asks for them."""
    if (
        settings.debug_handlers
        and settings.run_dir
        and (why := serve_handlers(handlers_path(Path(settings.run_dir), rank)))
    ):
        say(why)


def _set_torchrun_variables(settings: Settings) -> None:
    """Set the variables that torchrun sets, and the GPU; RANK counts this start's workers from 0, spares last."""
    size, rank = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")), mpi_rank()
    if settings.rank >= 0:
        ranks = [int(rank) for rank in settings.ranks.split(",")]
        size, rank = len(ranks), ranks.index(settings.rank) if settings.rank in ranks else settings.rank
    slot, slots = slot_at_start(rank, size, is_numbered=settings.rank >= 0)
    members = size - settings.spares  # spares are not counted: they take the ranks of others
    places = {"RANK": rank, "LOCAL_RANK": slot, "WORLD_SIZE": members, "LOCAL_WORLD_SIZE": slots}
    os.environ.update({name: str(place) for name, place in places.items()} | for_slot(slot))
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", "29500")


def _check_trained() -> int:
    """Let the session, if any, check whether the script left it too early; leave the process group, if any.

    Returns:
        The exit code: that of a script that has ended in order, though it may have been stopped.

    Raises:
        ScriptError: if the script ended in the middle of training.
    """
    session = sys.modules.get("holdfast.session.session")
    if session is not None:
        session.at_exit()
    engine = sys.modules.get("holdfast.distributed.comm_thread")
    if engine is not None:
        engine.leave()
    return 0 if session is None else int(sys.modules["holdfast.session.script_end"].exit_code())


def _ranks_continue() -> bool:
    """Return whether other ranks of a ``torch.distributed`` script continue when this one ends by a signal."""
    backend = sys.modules.get("holdfast.distributed")
    try:
        return backend is not None and len(backend.alive()) > 1
    except ValueError:  # the script has no process group of this backend
        return False


def _end_without_device(lost: DeviceLost, where: str) -> NoReturn:
    """Record that the device is lost, and end this worker like a killed one: exit handlers might use the device."""
    settings, rank = worker_name()
    if settings.run_dir:
        log_beside(settings, rank, str(rank)).write(lost)
    sys.stdout.flush()
    sys.stderr.write(f"{lost.message}{where}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _report_failure(error: BaseException, script: Path) -> int:
    failed = describe(error, script)
    settings, rank = worker_name()
    if settings.run_dir:
        try:
            log_beside(settings, rank, str(rank)).write(failed)
        except (HoldfastError, OSError) as lost:  # the launcher learns only that the script failed
            say(refusal(lost) or str(lost))
    sys.stdout.flush()
    sys.stderr.write(failed.traceback or f"{failed.message}\n")
    return failed.exit_code


def _leave(exit_code: int) -> NoReturn:
    """Exit immediately: MPI_Finalize, which a normal exit runs, can hang forever once a worker has failed."""
    _exit_in_time(exit_code)
    try:
        atexit._run_exitfuncs()  # exit handlers of the script; logging's flush is among them
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def _exit_in_time(exit_code: int) -> None:
    """Show that the script has ended, and exit from a thread if its exit handlers do not: the job waits for that."""
    publish_exit()
    limit_s = 0.0
    with contextlib.suppress(ConfigError):  # reported already
        limit_s = Phase.FINALIZING.limit_s({"--hang-timeout": worker_name()[0].hang_timeout_s})
    if limit_s:
        # what the handlers were to do is not done, so a script that had succeeded has failed
        line = f"holdfast: exit handlers have not ended within {limit_s:g} s; the process ends without them\n"
        args = (limit_s, line, exit_code or 1)
        with contextlib.suppress(RuntimeError, MemoryError):  # no thread is to be had: the handlers have no limit here
            threading.Thread(target=_end_after, args=args, name="holdfast-exit", daemon=True).start()


def _end_after(limit_s: float, line: str, exit_code: int) -> None:
    """End this process with a line, once ``limit_s`` seconds have passed in which it was not busy."""
    left_s, before_s = limit_s, time.monotonic()
    while left_s > 0:
        time.sleep(min(left_s, _WAKE_S))
        now_s = time.monotonic()
        left_s -= 0.0 if is_busy() else now_s - before_s
        before_s = now_s
    try:
        _write_at_once(line)
    finally:
        os._exit(exit_code)


def _write_at_once(line: str) -> None:
    """Write to stderr without waiting: its lock may be held by a thread that hangs, and a pipe may be full."""
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        os.write(fd, line.encode())


if __name__ == "__main__":
    main()
