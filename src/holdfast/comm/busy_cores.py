"""Keeps a process that regroups off the cores on which failed processes are freed.

MPI polls while it waits, and yields its core after each poll. Where another process has work for that core, it keeps it
until the next tick of the clock, up to 4 ms later. To free the memory of a process with torch is such work, for about
10 ms, and a recovery is a dozen short messages: it would take as long as all of these waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

_BUSY_S = 0.03
"""Time after which a process has been freed, also on slower cores."""
_PER_CORE = 4
"""With more processes for each of the other cores, the messages take longer there than the waits that they avoid."""


class BusyCores:
    """A context in which the calling thread uses only other cores than those noted just before, if it may use others."""

    def __init__(self) -> None:
        self._cores: set[int] = set()
        self._processes = 0
        self._until_s = 0.0
        self._before: set[int] = set()

    def note(self, cores: Iterable[int], processes: int) -> None:
        """Note cores that are busy now; ``processes`` regroup."""
        now_s = time.monotonic()
        self._cores = {*cores, *(self._cores if now_s < self._until_s else ())}
        self._processes = processes
        self._until_s = now_s + _BUSY_S

    def __enter__(self) -> None:
        if not self._cores or time.monotonic() > self._until_s:
            return
        allowed = os.sched_getaffinity(0)
        other_cores = allowed - self._cores
        if other_cores != allowed and self._processes <= _PER_CORE * len(other_cores):
            with contextlib.suppress(OSError):  # the administrator has changed what is allowed
                os.sched_setaffinity(0, other_cores)
                self._before = allowed

    def __exit__(self, *_: object) -> None:
        if self._before:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._before)
            self._before = set()
