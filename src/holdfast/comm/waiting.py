"""Reports that this process waits for other workers: a health monitor suspects the ones that do not wait.

A process waits in one place at a time, so the state is global. Without a listener the cost is below a microsecond.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_NAP_S = 2e-5
"""Requested length of the first sleep, seconds; the system takes about 75 microseconds for it."""
_LOOK_AFTER_S = 2e-4
"""Total requested sleep between two checks for failures, seconds; about a millisecond in practice."""
_SHARE, _LONG_NAP_S = 1 / 64, 2e-3
"""In a long wait a sleep may take this share of it, up to this many seconds: a worker that waits for one that hangs, saves
or evaluates then takes 3 % of a core instead of 8."""


class WaitPolicy(NamedTuple):
    """How to wait."""

    looks: int
    """Number of polls before the first sleep."""
    longest_nap_s: float
    """Each sleep is an eighth longer than the one before, up to this many seconds, or more in a long wait."""


AMONG_FEW = WaitPolicy(200, _NAP_S)
"""For one core per process: polling takes no CPU time from workers that compute."""
AMONG_MANY = WaitPolicy(1, 5e-4)
"""For more processes than cores: a wake-up takes a core and its cache from a computing worker, so sleeps get longer."""


class WaitContext:
    """A re-entrant context during which this process waits for other workers."""

    def __init__(self) -> None:
        self._depth = 0
        self._callback: Callable[[bool], None] | None = None
        self._here = threading.local()

    def on_wait(self, callback: Callable[[bool], None] | None) -> None:
        """From now on call ``callback(True)`` when waiting begins and ``callback(False)`` when it ends; None removes it."""
        self._callback = callback

    def ignore_this_thread(self) -> None:
        """From now on this thread may wait without being reported, while another thread of the process computes."""
        self._here.is_ignored = True

    def __enter__(self) -> None:
        if hasattr(self._here, "is_ignored"):
            return
        self._depth += 1
        if self._callback is not None and self._depth == 1:
            self._callback(True)

    def __exit__(self, *_: object) -> None:
        if hasattr(self._here, "is_ignored"):
            return
        self._depth -= 1
        if self._callback is not None and self._depth == 0:
            self._callback(False)


waiting = WaitContext()
"""The instance of this process."""


def patience(processes: int) -> WaitPolicy:
    """Return how to wait among ``processes`` processes; a background thread competes with a computing main thread."""
    alone = threading.current_thread() is threading.main_thread()
    return AMONG_FEW if alone and processes <= len(os.sched_getaffinity(0)) else AMONG_MANY


def wait_until(is_so: Callable[[], object], look: Callable[[], None], patience: WaitPolicy) -> None:
    """Poll ``is_so``, which reads memory that other processes write, until it returns something true.

    ``look`` is called about every millisecond, every two in a long wait; it raises if that memory will never be written.
    """
    looks, longest_nap_s = patience
    nap_s, slept_s, since_look_s = _NAP_S, 0.0, 0.0
    while not is_so():
        looks -= 1
        if looks > 0:
            time.sleep(0)
            continue
        time.sleep(nap_s)
        slept_s += nap_s
        since_look_s += nap_s
        nap_s = min(1.125 * nap_s, max(longest_nap_s, min(_SHARE * slept_s, _LONG_NAP_S)))
        if since_look_s >= _LOOK_AFTER_S:
            look()
            since_look_s = 0.0
