"""Checkpoints in a local directory: fsync, rename and open."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.blocks import PART_BYTES
from holdfast.checkpoint.manifest import MAX_BYTES
from holdfast.errors import CheckpointCorrupt, CheckpointError
from holdfast.faults import points

_UNREADABLE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO}
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


class LocalStorage:
    """See :class:`~holdfast.checkpoint.storage.Storage`; the first save creates the directory ``root``, relative to ``base``."""

    has_links = True

    def __init__(self, root: Path, base: Path = Path()) -> None:
        self.url = str(root)
        self._root = (base / root).absolute()  # a script may change the working directory while a checkpoint is written

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))  # thousands of Path objects would take ten times as long
        except FileNotFoundError:
            return []
        except OSError as error:
            if folder and error.errno in (errno.ENOTDIR, errno.ELOOP):
                return []  # a stray file named like a step folder must not hide the other steps
            raise CheckpointError(
                f"cannot list the checkpoints in {self._root / folder}: {error.strerror}; give a directory that this user may read"
            ) from error

    def read(self, path: str) -> bytes | None:
        try:
            with self.reader(path) as reader:
                if reader.size_bytes > MAX_BYTES:
                    raise CheckpointCorrupt(f"{path} has {reader.size_bytes} bytes, at most {MAX_BYTES} are allowed")
                data = bytearray(reader.size_bytes)
                return bytes(data[: reader.read_into(0, memoryview(data))])
        except CheckpointCorrupt as error:
            # Not checked in advance, since other processes write and remove files. A dangling symlink counts as damage.
            gone = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
            if gone and not os.path.islink(self._root / path):
                return None
            raise

    @contextmanager
    def reader(self, path: str) -> Iterator[LocalReader]:
        whole = self._root / path
        try:
            # Without O_NONBLOCK, opening a pipe in place of the file would block forever.
            number = os.open(whole, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _explained_read(whole, error) from error
        try:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointCorrupt(f"{whole.name} is not a plain file")
            yield LocalReader(whole, number, status)
        finally:
            os.close(number)

    def prepare(self, folder: str) -> Path:
        """See :meth:`Storage.prepare`; it returns the folder itself, because nothing in it counts without a manifest."""
        path = self._root / folder
        with explained("write to", path):
            _make_dir(path)
        return path

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        path = self._root / folder
        with explained("write to", path):
            for name in names:
                _sync(path / name, os.O_RDONLY)
            _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def link(self, path: str, name: str) -> bool:
        try:
            os.link(self._root / path, self._root / name)
        except OSError:
            return False  # the file is gone, or this file system has no links: then the values are written
        return True

    def put(self, path: str, data: bytes) -> None:
        whole = self._root / path
        draft = whole.with_name(whole.name + ".tmp")
        with explained("write", whole):
            _make_dir(whole.parent)
            try:
                # Created exclusively, so that a symlink cannot redirect the write.
                draft.unlink(missing_ok=True)
                with draft.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                points.reach("checkpoint.rename")
                os.replace(draft, whole)
            except OSError:
                draft.unlink(missing_ok=True)
                raise
            _sync(whole.parent, os.O_RDONLY | os.O_DIRECTORY)
            self._check_put(whole, data)

    def _check_put(self, whole: Path, data: bytes) -> None:
        """Check that the file was written: some file systems acknowledge a rename and lose it."""
        try:
            content = whole.read_bytes()
        except FileNotFoundError:
            content = b""
        if content != data:
            raise CheckpointError(
                f"the file system says that {whole} was written, but it was not; choose a directory on another one"
            )

    def remove(self, path: str) -> None:
        whole = self._root / path
        with explained("remove", whole):
            _remove(whole)


class LocalReader:
    """An open local file."""

    part_bytes = PART_BYTES
    """Small chunks, which are digested while they are in the processor's cache."""

    def __init__(self, path: Path, number: int, status: os.stat_result) -> None:
        self._path = path
        self._number = number
        self.size_bytes = status.st_size
        self.num_names = status.st_nlink

    def read_into(self, offset: int, out: memoryview) -> int:
        done = 0
        try:
            while done < len(out) and (got := os.preadv(self._number, [out[done:]], offset + done)):
                done += got
        except OSError as error:
            raise _explained_read(self._path, error) from error
        return done


def _explained_read(path: Path, error: OSError) -> CheckpointError:
    """Distinguish a damaged file, which is named, from a directory that this user cannot access."""
    if error.errno in _UNREADABLE:
        return CheckpointCorrupt(f"{path.name} cannot be read: {error.strerror}")
    return CheckpointError(
        f"cannot read {path}: {error.strerror or error}; {_ADVICE.get(error.errno or 0, 'try again')}"
    )


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a :class:`CheckpointError` with advice."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "make sure that the directory is writable")
        raise CheckpointError(
            f"cannot {doing} {path}: {error.strerror or error}. The checkpoints that were complete are untouched; {advice}"
        ) from error


def _make_dir(path: Path) -> None:
    """Create a directory and its missing parents, durably."""
    if path.is_dir():
        return
    _make_dir(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except (FileNotFoundError, NotADirectoryError):  # it does not exist, or another process is removing it too
        if path.exists():
            _remove(path)
