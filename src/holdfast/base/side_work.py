"""Side work of a thread that lives depend on: what it only shows must never end what it is for.

Such a thread is the heartbeat, the loop of the launcher, or the communication thread. If it ended, healthy workers would
be taken for dead, or wait forever. An error of its side work is written to stderr, the first time.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

_STDERR = 2
_reported: set[tuple[str, str]] = set()


def run_aside(what: str, work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Return what ``work`` returns, or ``otherwise`` if it raises an ``Exception``, which is reported once.

    Args:
        what: The side work, as a noun phrase: it is reported once in each thread.
        work: Does it.
        otherwise: The result if it fails.
    """
    try:
        return work()
    except Exception as error:  # whatever it is, the thread has something more important to do
        _report(what, error)
        return otherwise


def say(line: str) -> None:
    """Write a line to stderr, after all that the script has printed; it may be closed, or a file on a full disk."""

    def write() -> None:
        sys.stdout.flush()
        sys.stderr.write(f"holdfast: {line}\n")
        sys.stderr.flush()

    run_aside("writing to stderr", write, None)


def _report(what: str, error: Exception) -> None:
    thread = threading.current_thread().name
    if (thread, what) in _reported:
        return
    _reported.add((thread, what))
    line = f"holdfast: {what} failed in {thread}, which continues: {type(error).__name__}: {error}"
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: there is no other place to report it
        if select.select([], [_STDERR], [], 0.0)[1]:  # a full pipe must not stop the thread
            os.write(_STDERR, (" ".join(line.split()) + "\n").encode(errors="backslashreplace"))
