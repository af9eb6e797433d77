"""One job at a time writes checkpoints to a directory: two would replace each other's."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.launch.job import Job, is_remote


@contextlib.contextmanager
def checkpoints_locked(job: Job) -> Iterator[None]:
    """Keep other jobs from the directory of the checkpoints of ``job`` within the context.

    The launcher of the first node holds the lock, so it ends with that. Jobs on other machines see it on file systems whose
    locks work between machines. Object storage has none.

    Raises:
        ConfigError: if another job holds the lock.
    """
    place = job.settings.checkpoint_dir
    folder = Path(place.removeprefix("file://"))
    is_local = bool(place) and not is_remote(place) and job.node_rank == 0
    is_new = is_local and not folder.exists()
    lock = _open(folder) if is_local else -1
    try:
        if lock >= 0 and not _take(lock):
            raise ConfigError(
                f"--checkpoint-dir {place} is in use by another job; wait for its end, or choose another directory"
            )
        yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # there are checkpoints in it
                folder.rmdir()
        if lock >= 0:
            os.close(lock)


def _open(folder: Path) -> int:
    """Return a descriptor of the directory; -1 if it cannot be opened, of which whatever writes there complains."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1


def _take(lock: int) -> bool:
    """Take the lock; return whether no other process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks of directories
        pass
    return True
