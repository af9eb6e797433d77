"""Names and durable changes in a local checkpoint directory.

::

    root/
    ├── step-00000020/                        complete: it has a manifest
    │   ├── manifest.json
    │   └── tensors-0f3a....safetensors       named after what is in it
    └── step-00000030.tmp-4711/               an attempt of process 4711
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from holdfast.errors import CheckpointCorrupt, CheckpointError

_STEP = re.compile(r"step-([0-9]{8,})")
_ATTEMPT = re.compile(r"step-([0-9]{8,})\.tmp-([0-9]+)")
_UNREADABLE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO}
_ADVICE = {
    errno.ENOSPC: "free some space, or choose a directory on a larger disk",
    errno.EDQUOT: "free some of your quota, or choose a directory elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another disk",
    errno.EACCES: "choose a directory that this user may read and write",
    errno.EPERM: "choose a directory that this user may read and write",
    errno.EROFS: "choose a directory on a disk that may be written",
    errno.EEXIST: "choose a directory, not a file",
    errno.ENOTDIR: "choose a directory, not a file",
}


def step_dir(root: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is, or would be."""
    return root / f"step-{step:08d}"


def attempt_dir(root: Path, step: int) -> Path:
    """Return where this process prepares the checkpoint of ``step``."""
    return root / f"step-{step:08d}.tmp-{os.getpid()}"


def step_of(name: str) -> int | None:
    """Return the step that a directory is named after, None if it is something else."""
    match = _STEP.fullmatch(name)
    if match is None or name != f"step-{int(match[1]):08d}":
        return None
    return int(match[1])


def others_attempts(root: Path, upto_step: int) -> list[Path]:
    """Return the directories in which other processes prepared steps up to ``upto_step``."""
    found = [(entry, _ATTEMPT.fullmatch(entry.name)) for entry in root.iterdir()]
    return sorted(e for e, match in found if match and int(match[1]) <= upto_step and int(match[2]) != os.getpid())


def is_ours(name: str) -> bool:
    """Whether a file in a step's directory was put there by a save, and not by somebody else."""
    return name.startswith(("tensors-", "manifest.json"))


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into a :class:`CheckpointError` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "see to it that the directory can be written")
        msg = f"cannot {doing} {path}: {error.strerror or error}. The checkpoints that were complete are untouched; {advice}"
        raise CheckpointError(msg) from error


def make_dir(path: Path) -> None:
    """Create a directory and the missing ones above it, durably."""
    if path.is_dir():
        return
    make_dir(path.parent)
    path.mkdir(exist_ok=True)
    sync_dir(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    _sync(path, os.O_RDONLY)


def sync_dir(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it; it is right if somebody else is doing so too."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():
            remove_tree(path)


def make_fresh_dir(path: Path) -> None:
    """Create an empty directory in the place of what an older attempt left there."""
    remove_tree(path)
    path.mkdir()


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a plain file to read.

    Raises:
        CheckpointCorrupt: if it is not there, is something else or the disk cannot read it.
        CheckpointError: if this process may not read it.
    """
    try:
        # Without O_NONBLOCK a pipe put in the place of the file would make us wait for ever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                msg = f"{path.name} is not a plain file"
                raise CheckpointCorrupt(msg)
            yield file
    except OSError as error:
        if error.errno in _UNREADABLE:
            msg = f"{path.name} cannot be read: {error.strerror}"
            raise CheckpointCorrupt(msg) from error
        msg = f"cannot read {path}: {error.strerror or error}; {_ADVICE.get(error.errno or 0, 'try again')}"
        raise CheckpointError(msg) from error
