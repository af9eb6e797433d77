"""When the launcher is gone, and the store with it, and a worker dies, too: nobody can agree on anything any more.

What each survivor has is a state of the run all the same: that before the step in progress. Nobody will go on from another
one, so one of them saves it, whoever is first, and all stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.records.paths import gone_path

_TOLD_WITHIN_S = 5.0
_LOOK_S = 0.01


def launcher_is_gone(run_dir: str) -> bool:
    """Return whether the watcher says so, who sees it a little later than a worker sees that the store is lost.

    A store may be lost to this worker alone, while others go on.
    """
    ends_s = time.monotonic() + _TOLD_WITHIN_S
    while run_dir and not gone_path(Path(run_dir)).exists():
        if time.monotonic() > ends_s:
            return False
        time.sleep(_LOOK_S)
    return bool(run_dir)


@contextlib.contextmanager
def turn(run_dir: str) -> Iterator[None]:
    """Let one worker after the other do something; who dies has had its turn."""
    with gone_path(Path(run_dir)).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
