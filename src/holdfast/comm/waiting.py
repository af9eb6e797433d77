"""Saying that this process waits for others: whoever watches from outside blames those who do not.

A process has one place where it waits at a time, so this is a thing of the process. Without a listener
it costs less than a microsecond.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_NAP_S = 2e-5
"""The first nap; the system makes some 75 microseconds of it."""
_LOOK_AFTER_S = 2e-4
"""So long naps together, as they are asked for, between two looks for deaths: about a millisecond."""


class Patience(NamedTuple):
    """How to wait."""

    looks: int
    """How often to look before it is time to nap."""
    longest_nap_s: float
    """Each nap is an eighth longer than the one before, up to this, seconds."""


AMONG_FEW = Patience(200, _NAP_S)
"""With a core for everybody, waiting takes none from those who compute."""
AMONG_MANY = Patience(1, 5e-4)
"""Everyone who wakes up takes the core from somebody who computes, and what is in its cache: the longer the wait, the fewer times."""


class Waiting:
    """A context in which this process waits for others; may be entered again within itself."""

    def __init__(self) -> None:
        self._depth = 0
        self._tell: Callable[[bool], None] | None = None

    def tell(self, hear: Callable[[bool], None] | None) -> None:
        """Call ``hear(True)`` when waiting begins and ``hear(False)`` when it is over, from now on; None calls nobody."""
        self._tell = hear

    def __enter__(self) -> None:
        self._depth += 1
        if self._tell is not None and self._depth == 1:
            self._tell(True)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._tell is not None and self._depth == 0:
            self._tell(False)


waiting = Waiting()
"""Of this process."""


def patience(processes: int) -> Patience:
    """Return how to wait among so many processes; a thread beside the main one may wait beside one that computes."""
    alone = threading.current_thread() is threading.main_thread()
    return AMONG_FEW if alone and processes <= len(os.sched_getaffinity(0)) else AMONG_MANY


def wait_until(is_so: Callable[[], object], look: Callable[[], None], patience: Patience) -> None:
    """Return when ``is_so``, which looks at memory that others write, returns something true.

    ``look`` is called every millisecond or so; it raises if that memory will not be written any more.
    """
    looks, longest_nap_s = patience
    nap_s, since_look_s = _NAP_S, 0.0
    while not is_so():
        looks -= 1
        if looks > 0:
            time.sleep(0)
            continue
        time.sleep(nap_s)
        since_look_s += nap_s
        nap_s = min(1.125 * nap_s, longest_nap_s)
        if since_look_s >= _LOOK_AFTER_S:
            look()
            since_look_s = 0.0
