"""Saying that this process waits for others: whoever watches from outside blames those who do not.

A process has one place where it waits at a time, so this is a thing of the process. Unless somebody wants to hear of it,
it costs less than a microsecond.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_NAP_S = 2e-5
_LOOK_AFTER = 10
"""Naps between two looks for deaths: about a millisecond."""
_PATIENCE = 200
"""How often a worker that has a core of its own looks before it naps."""


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


def patience(processes: int) -> int:
    """Return how often to look, among so many processes, before it is time to nap.

    With a core for everybody, waiting takes none from those who compute, unless this thread waits beside one.
    """
    alone = threading.current_thread() is threading.main_thread()
    return _PATIENCE if alone and processes <= len(os.sched_getaffinity(0)) else 1


def wait_until(is_so: Callable[[], object], look: Callable[[], None], patience: int) -> None:
    """Return when ``is_so`` returns something true.

    Args:
        is_so: Looks at memory that others write.
        look: Called every millisecond or so; raises if nobody will write it any more.
        patience: How often to look before it is time to nap.
    """
    while not is_so():
        patience -= 1
        if patience > 0:
            time.sleep(0)
        else:
            time.sleep(_NAP_S)
            if patience % _LOOK_AFTER == 0:
                look()
