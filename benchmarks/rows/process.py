"""Runs the commands of a row in a process of their own, with a deadline, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parents[1]
END_S = 15.0
"""How long a command may take to end once it was interrupted, in seconds; namespaces and folders are removed then."""
POLL_S = 0.05
SAMPLE_S = 1.0
"""How often the processor time of living descendants is read, in seconds: a scan of ``/proc``, some 3 ms."""
_PR_SET_CHILD_SUBREAPER = 36


class RowFailed(Exception):
    """A row gave no result; the text says why, in one line."""


def adopt_orphans() -> None:
    """Let descendants whose parent has ended become children of this process, so that they are ended and counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_s() -> float:
    """Return the processor time of all descendants that have ended and were waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class SampledTime:
    """The processor time of all descendants of this process, sampled while they live.

    The kernel adds the time of a process to that of its parent only when the parent waits for it. Daemons that ignore
    ``SIGCHLD``, as Ray's do, lose the time of their workers so; it would count as the work of others.
    """

    def __init__(self) -> None:
        self._ticks: dict[tuple[int, int], int] = {}  # by process id and start, since ids are used again

    def sample(self) -> None:
        """Read what each living descendant has used so far."""
        stats = _read_stats()
        for pid in _below(os.getpid(), {pid: int(fields[1]) for pid, fields in stats.items()}):
            fields = stats[pid]
            self._ticks[pid, int(fields[19])] = int(fields[11]) + int(fields[12])

    def seconds(self) -> float:
        """Return the processor time of all descendants as last seen, in seconds."""
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")


def run_commands(
    commands: Sequence[Sequence[str]], folder: Path, limit_s: float, sampled: SampledTime
) -> list[dict[str, Any]]:
    """Run scripts of ``benchmarks/`` one after another; return what each wrote with ``--json``.

    Args:
        commands: The scripts with their options.
        folder: Receives their output, ``output.log``, and their results.
        limit_s: Deadline of all of them together, in seconds.
        sampled: Receives the processor time of their processes.

    Raises:
        RowFailed: if one gives no result, or not in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + limit_s
    found = []
    with (folder / "output.log").open("w+") as log:
        for number, (script, *options) in enumerate(commands):
            result = folder / f"{number}.json"
            result.unlink(missing_ok=True)
            code = _run([str(HERE / script), *options, "--json", str(result)], log, end_s, sampled)
            if code is None:
                raise RowFailed(f"{script} had not ended after {limit_s:g} s")
            if not result.exists():
                raise RowFailed(f"{script} ended with {code}: {_last_words(log)}")
            found.append(json.loads(result.read_text()))
    return found


def _run(words: list[str], log: IO[str], end_s: float, sampled: SampledTime) -> int | None:
    """Return the exit code of a Python script, None if it had to be ended."""
    # A session of its own, so that ^C on the terminal reaches it through this process only.
    process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, start_new_session=True)
    code: int | None = None
    try:
        while code is None and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(SAMPLE_S, left_s))
            sampled.sample()
    finally:
        if code is None:
            process.send_signal(signal.SIGINT)  # Python's `finally` removes what it has made
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        end_descendants()
        process.wait()
    return code


def end_descendants() -> None:
    """Kill every descendant of this process that still runs, and collect them all."""
    ends_s = time.monotonic() + END_S
    while living := _descendants(os.getpid()):
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _collect()
        if time.monotonic() > ends_s:
            raise RowFailed(f"processes {', '.join(map(str, sorted(living)))} of it do not end")
        time.sleep(POLL_S)
    _collect()


def _collect() -> None:
    """Wait for children that have ended, so that their processor time is counted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int) -> set[int]:
    """Return the processes below ``root`` that have not ended."""
    return _below(root, {pid: int(fields[1]) for pid, fields in _read_stats().items() if fields[0] != "Z"})


def _read_stats() -> dict[int, list[str]]:
    """Return by process what ``/proc/PID/stat`` says from the third field on, which is the state."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    return stats


def _below(root: int, parents: dict[int, int]) -> set[int]:
    """Return the processes below ``root``, given the parent of each process."""
    found: set[int] = set()
    grown = {root}
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown and pid not in found}
        found |= grown
    return found


def _last_words(log: IO[str]) -> str:
    """Return the last line of the output that says something."""
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["no output"])[-1][:300]
