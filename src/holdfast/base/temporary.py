"""Temporary folders that outlive a killed process, and removal of those that are no longer in use.

A name proves nothing: users have folders called ``holdfast-...`` too. A folder is removed only if it carries the marker
that :meth:`TemporaryFolder.make` wrote, belongs to this user and to this boot of the machine, and its lock is free. The lock is
an ``flock`` on the folder. It works across PID namespaces, child processes inherit it, and ``systemd-tmpfiles`` skips locked folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

MARKER = ".holdfast-temporary"
"""File in each folder: JSON with the pid of its creator, the start time of that process in clock ticks, and the boot id."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MODE = 0o700


class TemporaryFolder:
    """A folder that is locked for as long as this process, or a child process that inherits :attr:`lock`, is alive.

    Args:
        path: The folder.
        lock: File descriptor that holds the lock.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        self._owner = os.getpid()

    @classmethod
    def make(cls, prefix: str, parent: Path) -> Self:
        """Create a folder in ``parent``, mode 0700, empty except for the marker.

        Raises:
            OSError: if it cannot be created.
        """
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: no process can remove the folder either
            fcntl.flock(lock, fcntl.LOCK_SH)
        folder = cls(path, lock)
        try:
            (path / MARKER).touch(mode=0o600)
            (path / MARKER).write_text(json.dumps(_this_process()))
        except OSError:
            folder.remove()
            raise
        return folder

    def was_removed(self) -> bool:
        """Return whether the folder was removed or replaced by another one."""
        if is_missing(self.path):
            return True
        with contextlib.suppress(OSError):
            return not os.path.samestat(os.fstat(self.lock), self.path.stat())
        return False

    def remove(self) -> None:
        """Remove the folder and release the lock; a forked child only closes its own copy of the lock."""
        is_ours = os.getpid() == self._owner and not self.was_removed()
        if is_ours:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
        if is_ours:
            _remove_with_few_files(self.path)


def _remove_with_few_files(path: Path) -> None:
    """Remove what :func:`shutil.rmtree` could not, as it opens two files for each level: this opens one at a time."""
    for folder, folders, names in os.walk(path, topdown=False):
        for name in (*names, *folders):
            place = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # as for rmtree: what stays is removed by a later start
                os.rmdir(place) if os.path.isdir(place) and not os.path.islink(place) else os.unlink(place)
    with contextlib.suppress(OSError):
        path.rmdir()


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically; other processes may write it, too."""
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.replace(path)


def is_missing(path: Path) -> bool:
    """Return whether a path does not exist. A path that cannot be checked, as during a network outage, counts as existing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def sweep(prefix: str, parent: Path, before: Callable[[Path], None] = lambda path: None) -> None:
    """Remove the folders in ``parent`` that :meth:`TemporaryFolder.make` created and that no running process uses.

    Args:
        prefix: Of their names.
        parent: Where they are.
        before: Called with each folder before it is removed, to remove what belongs to it elsewhere.
    """
    for path in parent.glob(f"{prefix}*"):
        lock = _lock_abandoned(path)
        if lock is not None:
            before(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock_abandoned(path: Path) -> int | None:
    """Return the exclusive lock of a folder that may be removed, or None if it must stay."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # it is locked, or another process has just removed it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_ours(path, os.fstat(lock)):
            return lock
    os.close(lock)
    return None


def _is_ours(path: Path, found: os.stat_result) -> bool:
    if (
        found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o777 != _MODE
        or not os.path.samestat(found, path.stat())
    ):
        return False
    try:
        made_by = json.loads((path / MARKER).read_bytes())
        pid, started, boot = made_by["pid"], made_by["started"], made_by["boot"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    # The lock of another machine that shares the folder may be invisible here, so a machine removes only its own folders.
    return bool(boot and boot == _boot_id() and started != _start_time(pid))


def _this_process() -> dict[str, int | str | None]:
    return {"pid": os.getpid(), "started": _start_time(os.getpid()), "boot": _boot_id()}


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _start_time(pid: object) -> int | None:
    """Return the start time of process ``pid`` of this namespace, in clock ticks since boot; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rindex(")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return None
