"""Processes that we start: identity, liveness, and how to end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from holdfast.base.phases import Phase
from holdfast.base.temporary import write_private
from holdfast.records.life_lock import is_over, stat_of

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = Phase.TEAR_DOWN.value.fixed_s
"""Time that mpirun may take to clean up after a SIGTERM."""
_CHILDREN_END_S = 1.0
"""Time to wait for killed children to end: blocked I/O may keep one alive forever."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process; its start time, in clock ticks, distinguishes it from a later process with the same PID."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the process that has this ``pid`` now, None if there is none or it is a zombie."""
        state, started = _state_of(pid)
        return None if state in "ZX" else cls(pid, started)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the text that :meth:`__str__` returned; None if it is not such a text."""
        try:
            pid, started = text.split()
            return cls(int(pid), int(started))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.pid} {self.started}"

    def is_alive(self) -> bool:
        """Return whether the process runs, or could run."""
        return Process.of(self.pid) == self

    def is_ending(self) -> bool:
        """Return whether the process has ended, or the kernel has begun to end it."""
        state, fields = stat_of(self.pid)
        return is_over(state, fields) or int(fields[18]) != self.started

    def signal_of_end(self) -> int | None:
        """Return the signal that ends the process, as soon as no thread of it runs any more; None before.

        0 if it ends with an exit code, or if that is not known: it is gone already, or the system does not tell.
        """
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
        except OSError:
            return 0
        if not all(is_over(*stat_of(f"{self.pid}/task/{thread}")) for thread in threads):
            return None
        _, fields = stat_of(self.pid)
        if not fields or int(fields[18]) != self.started:
            return 0
        status = int(fields[48])
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal or a debugger."""
        state, started = _state_of(self.pid)
        return started == self.started and state in "Tt"

    def send(self, number: int) -> bool:
        """Send a signal; return whether the process existed."""
        handle = self.open()
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def open(self) -> int | None:
        """Return a pidfd, which becomes readable when the process ends; None if it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_alive():  # checked while the pidfd keeps the PID from being reused
            return handle
        os.close(handle)
        return None


def _state_of(pid: int) -> tuple[str, int]:
    """Return the state of a process, as in ``/proc/PID/stat``, and its start time; "X" if there is none."""
    state, fields = stat_of(pid)
    return state, int(fields[18]) if fields else -1


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """A worker and its watcher, with the name of their machine; "" if it can only be that of the launcher."""

    worker: Process
    watcher: Process
    node: str = ""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a pair from a file; None if there is none."""
        try:
            *processes, node = path.read_text().split("\n")
            worker, watcher = map(Process.parse, processes)
        except (OSError, ValueError):
            return None
        return cls(worker, watcher, node) if worker is not None and watcher is not None else None

    @property
    def is_here(self) -> bool:
        """Whether both are on this machine."""
        return self.node in ("", this_node())

    def note(self, path: Path) -> None:
        """Write the pair to a file; worker and watcher both do so, because either may be stopped."""
        write_private(path, f"{self.worker}\n{self.watcher}\n{self.node}")


def this_node() -> str:
    """Return the node name of this machine."""
    return os.uname().nodename


def pair_path(run_dir: Path, rank: int) -> Path:
    """Return the file in which the watcher of ``rank`` records the pair."""
    return run_dir / f"process-{rank}"


def pairs_in(run_dir: Path) -> dict[int, WatchedWorker]:
    """Return all workers of a start of the job, alive or not, with their watchers, by rank."""
    paths = {int(rank): path for path in run_dir.glob("process-*") if (rank := path.name[8:]).isdecimal()}
    return {rank: pair for rank, path in sorted(paths.items()) if (pair := WatchedWorker.read(path)) is not None}


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Request signal ``number`` for this process when its parent dies; if ``parent`` is given and dead, exit now."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)  # then look: a parent that died before it sends no signal
    if os.getppid() == 1 if parent is None else os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0)


_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make this process the parent of the orphans of its children (subreaper)."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Return the PIDs of a process's children, including zombies; none if it has ended or the system has no list."""
    lists = []
    try:
        paths = list(Path("/proc", str(pid), "task").glob("*/children"))
    except OSError:  # the process has ended since glob looked whether the directory exists
        return []
    for path in paths:
        try:
            lists.append(path.read_text())
        except OSError:  # the thread has ended
            continue
    return [int(number) for text in lists for number in text.split()]


def descendants_of(pid: int) -> list[Process]:
    """Return the children of a process, their children, and so on."""
    below = [child for number in children_of(pid) if (child := Process.of(number)) is not None]
    return below + [further for child in below for further in descendants_of(child.pid)]


def end_children() -> None:
    """Kill the children of this process, and the orphans that it adopts, until none is left."""
    ends_s = time.monotonic() + _CHILDREN_END_S
    while (left := children_of(os.getpid())) and time.monotonic() < ends_s:
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # a child, so its PID is not reused before we wait for it
        for pid in left:
            handle = os.pidfd_open(pid)
            if wait_for_end({"child": handle}, ends_s - time.monotonic()):
                os.waitpid(pid, 0)
            os.close(handle)


def end_at_once(spared: Collection[int] = ()) -> NoReturn:
    """Kill this process and all its descendants by SIGKILL, as in a power failure: none saves or reports anything.

    All are stopped before the first is killed, so that none observes another's death; ``spared`` children continue.
    """
    stopped: set[Process] = set()
    while new := _below_us(spared) - stopped:
        for process in new:
            process.send(signal.SIGSTOP)
        stopped |= new
    for process in stopped:
        process.send(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _below_us(spared: Collection[int]) -> set[Process]:
    children = [Process.of(number) for number in children_of(os.getpid()) if number not in spared]
    return {process for child in children if child is not None for process in (child, *descendants_of(child.pid))}


def wait_for_end(handles: Mapping[str, int], timeout_s: float | None = None) -> set[str]:
    """Wait until a process has ended, at most ``timeout_s`` (None: forever); return the names of those that have ended.

    ``handles`` maps names to file descriptors from :meth:`Process.open`.
    """
    looks = select.poll()
    for handle in handles.values():
        looks.register(handle, select.POLLIN)
    ready = {number for number, _ in looks.poll(None if timeout_s is None else max(0.0, 1000 * timeout_s))}
    return {name for name, handle in handles.items() if handle in ready}


def name_of(pid: int) -> str:
    """Return the name of a process, "" if it has ended."""
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""


def value_of(pid: int, variable: str) -> str | None:
    """Return the value of a variable at the start of a process; None if it was not set or cannot be read."""
    start = f"{variable}=".encode()
    try:
        words = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return None
    return next((word[len(start) :].decode(errors="replace") for word in words if word.startswith(start)), None)


def end_gently(process: Process) -> None:
    """Wait briefly for a process to end, send SIGTERM, and finally SIGKILL."""
    handle = process.open()
    if handle is None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if wait_for_end({"it": handle}, _GRACE_S):
            break
        process.send(number)
    os.close(handle)


def start(
    command: Sequence[str], env: Mapping[str, str], log: Path, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own process group, with its output appended to ``log``.

    It inherits the descriptors ``files``. It does not die with this process: the workers' watchers detect the death of
    the launcher, and make the workers save and exit.
    """
    with os.fdopen(open_log(log), "ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C is for the launcher: workers must finish their step
            pass_fds=files,
        )


def open_log(path: Path) -> int:
    """Open a file of output to append to it, mode 0600; its folder is made again if a user removed it with the report."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def end_without_files(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the processes from :func:`start` and the workers below them, from a process that may open no file.

    Watchers and workers are in the group of the process that was started for them. Other processes of the workers end
    with these. Mpirun cannot remove its files.
    """
    for process in processes:
        if process.poll() is None:  # so the number is still that of its group
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CHILDREN_END_S)


def end(
    processes: Sequence[subprocess.Popen[bytes]], pairs: Sequence[WatchedWorker], forked_by: int | None = None
) -> None:
    """Kill the processes from :func:`start`, the workers below them, and their children.

    Returns once all have ended, or a second after the last SIGKILL: blocked I/O may keep a process alive forever.

    Watchers and workers that have not recorded themselves, and are not in ``pairs``, are found below ``processes``, and
    below the fork server ``forked_by``, which goes on.
    """
    workers = [pair.worker.pid for pair in pairs if pair.worker.is_alive()]
    running = [process.pid for process in processes if process.poll() is None]
    servers = [] if forked_by is None else [forked_by]
    below = [child for pid in (*running, *workers, *servers) for child in descendants_of(pid)]
    for pair in pairs:  # watchers first, so that none records a death that we caused
        pair.watcher.send(signal.SIGKILL)
        pair.worker.send(signal.SIGKILL)
    for child in below:  # their watcher would have killed them
        child.send(signal.SIGKILL)
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped process does not handle the signal before
    ends_s = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    ends_s = time.monotonic() + _CHILDREN_END_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends_s - time.monotonic()))
