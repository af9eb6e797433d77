"""A local directory for files that are on their way to another machine.

A worker may be killed while it holds gigabytes in one. So each is locked by the process that uses it, and whoever makes
the next one removes those that nobody locks any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from holdfast.checkpoint.storage.local import explained
from holdfast.errors import CheckpointError

_PREFIX = "holdfast-upload-"
_TRIES = 10


class Staging:
    """An empty directory below ``TMPDIR``, which is removed by :meth:`close`, or else when this process ends.

    Raises:
        CheckpointError: if there can be none.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        with explained("make a temporary directory in", root):
            _sweep(root)
            self.path, number = _make(root)
        self.close = weakref.finalize(self, _remove, self.path, number, os.getpid())


def _make(root: Path) -> tuple[Path, int]:
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        number = _lock(path)
        if number is not None:
            return path, number
        # Another worker's sweep was faster than the lock.
    msg = f"cannot make a temporary directory in {root}: others remove it at once; set TMPDIR to another directory"
    raise CheckpointError(msg)


def _sweep(root: Path) -> None:
    """Remove the directories of processes that were killed."""
    for path in root.glob(f"{_PREFIX}*"):
        number = _lock(path)
        if number is not None:
            _remove(path, number, os.getpid())


def _lock(path: Path) -> int | None:
    """Return an open directory that nobody else locks, None if somebody does, or if it is gone or not ours."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(number)
        is_ours = status.st_uid == os.getuid() and os.path.samestat(status, path.stat())
    except OSError:  # it is locked, or was removed meanwhile
        is_ours = False
    if not is_ours:
        os.close(number)
        return None
    return number


def _remove(path: Path, number: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked meanwhile
        shutil.rmtree(path, ignore_errors=True)
    os.close(number)
