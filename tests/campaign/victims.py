"""Finds the processes of one job, and of no other: by a variable of their environment, and by what its launcher wrote."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from campaign.plan import AGENT, FORK_SERVER, LAUNCHER, MPIRUN, WATCHER, WORKER
from holdfast.launch.health.stacks import last_stack, stack_path
from holdfast.launch.supervise.processes import Process, WatchedWorker, children_of, name_of

if TYPE_CHECKING:
    from campaign.attacks.base import Running

MARK = "CAMPAIGN_JOB"
"""Variable of the environment by which the processes of a job are known."""
AGENTS = "agents"
"""File in the folder of a plan, with the PIDs of agents."""
LEARNS_S = 0.003
"""How often a victim that does not exist yet is looked for."""


class Processes:
    """The processes of a job.

    Args:
        launchers: PIDs of its launchers, one for each node.
        temporary: ``TMPDIR`` of the job, which other jobs may have, too.
        mark: Value of :data:`MARK` in the environment of all of its processes, and of no other.
    """

    def __init__(self, launchers: list[int], temporary: Path, mark: str) -> None:
        self.launchers = launchers
        self._as_started = [Process.of(pid) for pid in launchers]  # after its end a PID may be that of another process
        self._temporary = temporary
        self._mark = f"{MARK}={mark}".encode()

    def all(self) -> list[Process]:
        """All that run now."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(Process.of(int(entry.name)))
        return [process for process in found if process is not None]

    def find(self, victim: str) -> Process | None:
        """The process that is called so, None if it does not exist yet, or any longer."""
        role, _, number = victim.rpartition(" ") if victim[-1:].isdigit() else (victim, "", "0")
        if role == LAUNCHER:
            launcher = self._as_started[int(number)] if int(number) < len(self._as_started) else None
            return launcher if launcher is not None and launcher.is_alive() else None
        if role in (WORKER, WATCHER):
            return self._of_pair(role, int(number))
        below = [pid for launcher in self.launchers for pid in children_of(launcher)]
        if role == MPIRUN:
            return next((Process.of(pid) for pid in below if name_of(pid) in ("mpirun", "prterun")), None)
        if role == AGENT:
            return self._newest_agent()
        if role == FORK_SERVER:
            return next(
                (Process.of(pid) for pid in below if "holdfast.launch.supervise.fork_server" in command_of(pid)), None
            )
        msg = f"no process of a job is called {victim!r}"
        raise ValueError(msg)

    def wait_for(self, victim: str, running: Running) -> Process | None:
        """The process, as soon as it exists; None if the job ends first."""
        while (process := self.find(victim)) is None and not running.is_over():
            time.sleep(LEARNS_S)
        return process

    def _of_pair(self, role: str, rank: int) -> Process | None:
        """A worker or its watcher, by the file in which the watcher wrote down both; the newest of several runs."""
        for path in sorted(self._files(f"process-{rank}"), key=_changed_s, reverse=True):
            if (pair := WatchedWorker.read(path)) is not None:
                found = pair.worker if role == WORKER else pair.watcher
                return found if found.is_alive() else None
        return None

    def _newest_agent(self) -> Process | None:
        """The last agent that was started and has not ended; each writes its PID into a file beside ``TMPDIR``."""
        path = self._temporary.parent / AGENTS
        written = {int(word) for word in path.read_text().split()} if path.exists() else set()
        living = [process for process in self.all() if process.pid in written]
        return max(living, key=lambda process: process.started, default=None)

    def _files(self, name: str) -> list[Path]:
        """Files of this job's launchers, from their run directories."""
        return [path for pid in self.launchers for path in self._temporary.glob(f"holdfast-{pid}-*/{name}")]

    def describe(self) -> str:
        """What each process waits for; asks workers for their stacks, so it is only for those that are killed next."""
        lines = [f"{process.pid} {command_of(process.pid)[:90]}: {_waits_for(process.pid)}" for process in self.all()]
        for path in self._files("process-*"):
            pair, rank = WatchedWorker.read(path), path.name.rpartition("-")[2]
            if pair is not None and rank.isdecimal() and pair.worker.is_alive():
                stack = last_stack(stack_path(path.parent, int(rank)), pair.worker.send)
                lines.append(f"-- worker {rank}\n{stack}")
        return "\n".join(lines)

    def kill(self) -> None:
        """End them all."""
        ends_s = time.monotonic() + 20
        while (left := self.all()) and time.monotonic() < ends_s:
            for process in left:
                process.send(9)
            time.sleep(0.02)


def command_of(pid: int) -> str:
    """The command line of a process, "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _waits_for(pid: int) -> str:
    found = []
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):
            found.append(" < ".join(Path(f"/proc/{pid}/{name}").read_text().split("\n")[:4]))
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/status").read_text().partition("State:")[2].split("\n")[0].strip()
        found.insert(0, state)
    return ", ".join(found)


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
