"""Saving the state when launcher and membership store are lost and a worker fails as well: no agreement is possible any more.

Each survivor still has a valid state of the run, the one before the step in progress. No worker can continue from it,
so the first survivor to get the lock saves it, and all exit.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.records.paths import launcher_lost_path

_TOLD_WITHIN_S = 5.0
_LOOK_S = 0.01


def launcher_died(run_dir: str) -> bool:
    """Return whether the watcher process reports the launcher gone; it notices slightly later than a worker loses the store.

    The store may be lost to this worker alone, while other workers continue.
    """
    ends_s = time.monotonic() + _TOLD_WITHIN_S
    while run_dir and not launcher_lost_path(Path(run_dir)).exists():
        if time.monotonic() > ends_s:
            return False
        time.sleep(_LOOK_S)
    return bool(run_dir)


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; a worker that dies releases it."""
    path.touch(mode=0o600)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
