"""Processes that we started: who they are, whether they live, how they are ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1
_GRACE_S = 2.0
"""How long mpirun may take to clean up after a SIGTERM."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told apart from a later one that got the same number.

    Args:
        pid: Its number.
        started: When it was started, in clock ticks since the machine was.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the process that has the number ``pid`` now, None if there is none or it is a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        state, *fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold blanks
        return None if state in "ZX" else cls(pid, int(fields[18]))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the process that :meth:`__str__` wrote down, None if ``text`` is not one."""
        try:
            pid, started = text.split()
            return cls(int(pid), int(started))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.pid} {self.started}"

    def is_alive(self) -> bool:
        """Return whether it runs, or could run."""
        return Process.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal; return whether it was there to get it."""
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
        """Return a file descriptor that stands for it and becomes readable when it ends; None if it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_alive():  # looked at while the handle keeps its number from being given away
            return handle
        os.close(handle)
        return None


@dataclass(frozen=True, slots=True)
class Pair:
    """A worker, and the watcher beside it."""

    worker: Process
    watcher: Process

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return what was noted in ``path``, None if nothing was."""
        try:
            worker, watcher = (Process.parse(line) for line in path.read_text().splitlines())
        except (OSError, ValueError):
            return None
        return cls(worker, watcher) if worker is not None and watcher is not None else None

    def note(self, path: Path) -> None:
        """Write it down, all or nothing."""
        draft = path.with_suffix(".draft")
        draft.write_text(f"{self.worker}\n{self.watcher}\n")
        draft.replace(path)


def pair_path(run_dir: Path, rank: int) -> Path:
    """Return where the watcher of ``rank`` notes the two of them."""
    return run_dir / f"process-{rank}"


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have this process get the signal ``number`` when the process that started it dies.

    Args:
        number: SIGKILL, or SIGTERM for a program that should clean up.
        parent: Number of the parent, if known: if it is dead already, this process ends here.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() == 1 if parent is None else os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_LIBC = ctypes.CDLL(None)


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start ``command`` in a process group of its own, its output appended to ``log``.

    It does not end with us: the watchers of the workers see that we are gone, and have them save and end.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C is for us: the workers are to finish their step
        )


def end(processes: Sequence[subprocess.Popen[bytes]], pairs: Sequence[Pair]) -> None:
    """End what :func:`start` started and all workers below it; nothing of it runs when this returns."""
    for pair in pairs:  # the watchers first, so that none of them tells of a death that we caused
        pair.watcher.send(signal.SIGKILL)
        pair.worker.send(signal.SIGKILL)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
