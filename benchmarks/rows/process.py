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
_PR_SET_CHILD_SUBREAPER = 36


class RowFailed(Exception):
    """A row gave no result; the text says why, in one line."""


def adopt_orphans() -> None:
    """Let descendants whose parent has ended become children of this process, so that they are ended and counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_s() -> float:
    """Return the processor time of all descendants that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_commands(commands: Sequence[Sequence[str]], folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run scripts of ``benchmarks/`` one after another; return what each wrote with ``--json``.

    Args:
        commands: The scripts with their options.
        folder: Receives their output, ``output.log``, and their results.
        limit_s: Deadline of all of them together, in seconds.

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
            code = _run([str(HERE / script), *options, "--json", str(result)], log, end_s)
            if code is None:
                raise RowFailed(f"{script} had not ended after {limit_s:g} s")
            if not result.exists():
                raise RowFailed(f"{script} ended with {code}: {_last_words(log)}")
            found.append(json.loads(result.read_text()))
    return found


def _run(words: list[str], log: IO[str], end_s: float) -> int | None:
    """Return the exit code of a Python script, None if it had to be ended."""
    # A session of its own, so that ^C on the terminal reaches it through this process only.
    process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(max(0.1, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
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
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
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
