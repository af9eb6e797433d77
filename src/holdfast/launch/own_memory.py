"""The launcher's own memory: it stays the same however many workers a job loses.

What belongs to a worker, such as its connection to the membership store, is many small objects, some of which refer to
each other. Python looks for those that have grown old only after tens of thousands of new ones, and the C library keeps
the pages that they were in. In a launcher, which makes few objects, that would be after hundreds of deaths.
"""

from __future__ import annotations

import ctypes
import gc

_LIBC = ctypes.CDLL(None)
_ARENA_MAX = -8
"""``M_ARENA_MAX`` of mallopt(3)."""


def share_one_heap() -> None:
    """Let all threads that are started from now on allocate from one heap: each of many would keep what it has freed."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_ARENA_MAX, 1)


def exempt_present_objects() -> None:
    """Leave out what exists now, such as modules, from all later collections: they take a millisecond instead of twenty."""
    gc.freeze()


def release_memory() -> None:
    """Collect objects that are no longer used, and give free pages back to the system."""
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):  # other C libraries keep less
        _LIBC.malloc_trim(0)
