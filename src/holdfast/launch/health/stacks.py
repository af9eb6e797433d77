"""Stacks of workers, without pausing a worker that goes on.

Two ways exist, and each is used where it is safe:

* ``py-spy dump --nonblocking``, if it is installed, reads the memory of a worker from outside. Without that option it
  would pause the worker, which may hold the GIL or a lock of a device driver; so the option is always given. A stack
  may be torn, as the worker runs on.
* Each worker registers Python's ``faulthandler`` for :data:`SIGNAL`. It needs no GIL, so it answers in a worker that is
  stuck in C. It reads the frames of other threads while these run, which may crash the worker. So it is used only for a
  worker that is killed right afterwards.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from holdfast.launch.supervise.processes import Process

SIGNAL = signal.SIGRTMIN + 9
"""The signal on which a worker writes its stacks; a realtime signal, which scripts hardly use."""
MOST_CHARS = 8192
"""Characters of a stack that are kept: those of the threads that come first."""
_ANSWER_S = 0.05
"""How long a worker that is about to be killed may take to write its stacks, in seconds."""
_POLL_S = 0.002
_SPY_S = 10.0
"""Time limit of py-spy; it usually takes 50 ms."""
_STOPPED_S = 0.3
"""How long py-spy may take to read the stacks of a stopped worker; it usually takes 50 ms."""
OFF = "off"
"""Value of ``--debug-bundles`` with which not even stacks are taken."""
_MOST_STACKS = 8
"""A run takes no more stacks than this: the first failures explain the most."""
NO_PY_SPY = "py-spy is not installed (pip install py-spy)"

_open: list[TextIO] = []


def stack_path(run_dir: Path, rank: int) -> Path:
    """Return the file to which a worker writes its stacks on :data:`SIGNAL`."""
    return run_dir / f"stack-{rank}.txt"


def write_stacks_on_signal(path: Path) -> None:
    """Register this process to write the stacks of all its threads to ``path`` on :data:`SIGNAL`; does nothing if it cannot."""
    draft = path.with_suffix(".draft")
    with suppress(OSError):
        draft.touch(mode=0o600)
        file = draft.open("w")
        _open.append(file)  # faulthandler keeps only its descriptor
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        draft.replace(path)  # before, the signal would kill this process: the file says that it no longer does


def last_stack(path: Path, send: Callable[[int], object]) -> str:
    """Return the stacks of a worker that is killed next, "" if it writes none within 50 ms.

    Args:
        path: The file that the worker registered.
        send: Sends it a signal.
    """
    before = _size(path)
    if before < 0:  # it never registered, and the signal would kill it before its end is recorded
        return ""
    send(SIGNAL)
    ends_s, seen = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < ends_s:
        time.sleep(_POLL_S)
        size = _size(path)
        if size > before and size == seen:
            break
        seen = size
    try:
        threads = path.read_bytes()[before:].decode(errors="replace").strip().split("\n\n")
    except OSError:
        return ""
    return "\n\n".join(reversed(threads))[:MOST_CHARS]  # faulthandler writes the main thread last


def py_spy() -> str | None:
    """Return the path of py-spy, beside this Python or in PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def spy_command(program: str, pid: int) -> list[str]:
    """Return the command that prints the stacks of a process without pausing it."""
    return [program, "dump", "--nonblocking", "--pid", str(pid)]


def stack_from_outside(pid: int, limit_s: float = _SPY_S) -> str:
    """Return the stacks of a process, which is not paused, or in parentheses why there is none within ``limit_s``."""
    program = py_spy()
    if program is None:
        return f"({NO_PY_SPY})"
    try:
        done = subprocess.run(
            spy_command(program, pid), capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(py-spy failed: {error})"
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return done.stdout[:MOST_CHARS] if done.returncode == 0 and done.stdout else f"(py-spy failed: {reason})"


def innermost(stack: str, script: str) -> str:
    """Return where in the script a stack is, as ``"train.py, line 12"``; "" if no frame is of the script.

    Args:
        stack: As faulthandler or py-spy wrote it, the innermost frame of a thread first.
        script: The path of the script, or its name.
    """
    name = Path(script).name
    for line in stack.splitlines():
        if f'{name}", line ' in line:  # faulthandler: File "/a/train.py", line 12 in main
            return f"{name}, line {line.rpartition(', line ')[2].split()[0]}"
        if f"{name}:" in line:  # py-spy: main (train.py:12)
            number = line.rpartition(f"{name}:")[2].rstrip(")")
            if number.isdecimal():
                return f"{name}, line {number}"
    return ""


class LastStacks:
    """Stacks of workers that are about to be killed because they hang.

    Args:
        run_dir: The directory of the run.
        is_off: Take none.
    """

    def __init__(self, run_dir: Path, *, is_off: bool) -> None:
        self._run_dir = run_dir
        self._left = 0 if is_off else _MOST_STACKS

    def take(self, rank: int, worker: Process) -> str:
        """Return the stacks of a worker; "" if it does not write them within 50 ms, or is stopped and py-spy is missing."""
        if self._left <= 0:
            return ""
        self._left -= 1
        if worker.is_stopped():  # it must not be resumed, not even to write its stacks
            stack = stack_from_outside(worker.pid, _STOPPED_S)
            return "" if stack.startswith("(") else stack
        return last_stack(stack_path(self._run_dir, rank), worker.send)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
