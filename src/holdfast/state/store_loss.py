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
_TURN_WITHIN_S = 30.0


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
    """Hold an exclusive lock on a file; a worker that dies releases it.

    After :data:`_TURN_WITHIN_S` go on without it: its holder may be stopped, and what both save differs by its attempt.
    """
    path.touch(mode=0o600)
    ends_s = time.monotonic() + _TURN_WITHIN_S
    with path.open("ab") as file:
        while time.monotonic() < ends_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK_S)
        yield
