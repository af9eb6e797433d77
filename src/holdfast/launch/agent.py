"""Running something on another machine, by what Open MPI uses for that too: ``ssh``, or a program like it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.launch.processes import Pair, Process

SSH = ("ssh", "-o", "BatchMode=yes")
"""Without a password or a question, for there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command on another machine printed, and its exit code; None if it did not end in time."""

    exit_code: int | None
    said: str


class Agent:
    """Starts commands on other machines, as ``WORDS HOST COMMAND``; those for the hosts in ``here`` on this one."""

    def __init__(self, words: Sequence[str], here: Collection[str] = ()) -> None:
        self._words = tuple(words)
        self._here = frozenset(here)
        self._running: list[subprocess.Popen[bytes]] = []

    def ask(self, commands: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        """Run a command for ``sh`` on each host, all at once and within ``timeout_s``; return the answers by host."""
        ends_s = time.monotonic() + timeout_s
        started = {host: self._start(host, command, subprocess.PIPE) for host, command in commands.items()}
        return {host: _answer(process, ends_s) for host, process in started.items()}

    def tell(self, host: str, command: str) -> None:
        """Run a command on a host, and do not wait for it."""
        self._running = [process for process in self._running if process.poll() is None]
        self._running.append(self._start(host, command, subprocess.DEVNULL))

    def close(self) -> None:
        """End what has not ended."""
        for process in self._running:
            _end(process)

    def _start(self, host: str, command: str, output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # The shell there may be any.
            ["sh", "-c", command] if host in self._here else [*self._words, host, f"sh -c {shlex.quote(command)}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _answer(process: subprocess.Popen[bytes], ends_s: float) -> Answer:
    try:
        said, _ = process.communicate(timeout=max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        return Answer(None, "")
    return Answer(process.returncode, said.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session, and the number is taken until we have waited
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def kill_command(process: Process, number: signal.Signals) -> str:
    """Return what sends a signal to a process of the machine where it is run, and to no later one with its number."""
    started = f'"$(sed "s/.*) //" /proc/{process.pid}/stat 2>/dev/null | cut -d" " -f20)"'
    return f"test {started} = {process.started} && kill -s {number.name.removeprefix('SIG')} {process.pid}"


@dataclass(frozen=True, slots=True)
class RemoteProcess(Process):
    """A process of another machine, which the agent reaches."""

    host: str
    agent: Agent

    def is_alive(self) -> bool:
        """Return True: as long as its watcher has not written down how it ended nobody here knows better."""
        return True

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal, which takes a while, and may not get there."""
        self.agent.tell(self.host, kill_command(self, number))
        return True


def reached(pair: Pair, host: str, agent: Agent) -> Pair:
    """Return a pair of another machine so that it can be sent signals."""
    worker, watcher = (RemoteProcess(p.pid, p.started, host, agent) for p in (pair.worker, pair.watcher))
    return Pair(worker, watcher, pair.node)
