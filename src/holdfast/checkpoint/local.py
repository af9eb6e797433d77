"""Checkpoints in a local directory: what fsync, rename and open have to do with it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import points
from holdfast.errors import CheckpointCorrupt, CheckpointError

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


class LocalStorage:
    """See :class:`~holdfast.checkpoint.storage.Storage`.

    Args:
        root: The directory; made by the first save.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root)

    def names(self, folder: str) -> list[str]:
        """See :meth:`Storage.names`."""
        try:
            return sorted(entry.name for entry in (self._root / folder).iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            msg = f"cannot list the checkpoints in {self._root / folder}: {error.strerror}; give a directory that this user may read"
            raise CheckpointError(msg) from error

    def read(self, path: str) -> bytes | None:
        """See :meth:`Storage.read`."""
        if not os.path.lexists(self._root / path):
            return None
        with self.reader(path) as reader:
            data = bytearray(reader.size_bytes)
            return bytes(data[: reader.read_into(0, memoryview(data))])

    @contextmanager
    def reader(self, path: str) -> Iterator[LocalReader]:
        """See :meth:`Storage.reader`."""
        whole = self._root / path
        try:
            # Without O_NONBLOCK a pipe put in the place of the file would make us wait for ever.
            number = os.open(whole, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(number)
                if not stat.S_ISREG(status.st_mode):
                    msg = f"{whole.name} is not a plain file"
                    raise CheckpointCorrupt(msg)
                yield LocalReader(number, status.st_size)
            finally:
                os.close(number)
        except OSError as error:
            if error.errno in _UNREADABLE:
                msg = f"{whole.name} cannot be read: {error.strerror}"
                raise CheckpointCorrupt(msg) from error
            msg = f"cannot read {whole}: {error.strerror or error}; {_ADVICE.get(error.errno or 0, 'try again')}"
            raise CheckpointError(msg) from error

    def prepare(self, folder: str) -> Path:
        """See :meth:`Storage.prepare`; it is the folder itself, because nothing in it counts without a manifest."""
        path = self._root / folder
        with explained("write to", path):
            _make_dir(path)
        return path

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        """See :meth:`Storage.store`."""
        path = self._root / folder
        with explained("write to", path):
            for name in names:
                _sync(path / name, os.O_RDONLY)
            _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def put(self, path: str, data: bytes) -> None:
        """See :meth:`Storage.put`."""
        whole = self._root / path
        draft = whole.with_name(whole.name + ".tmp")
        with explained("write", whole):
            _make_dir(whole.parent)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            points.reach("checkpoint.rename")
            os.replace(draft, whole)
            _sync(whole.parent, os.O_RDONLY | os.O_DIRECTORY)
            self._check_put(whole, data)

    def _check_put(self, whole: Path, data: bytes) -> None:
        """Make sure that the file system did what it said: some answer a rename and forget it."""
        try:
            found = whole.read_bytes()
        except FileNotFoundError:
            found = b""
        if found != data:
            msg = f"the file system says that {whole} was written, and it was not; choose a directory on another one"
            raise CheckpointError(msg)

    def remove(self, path: str) -> None:
        """See :meth:`Storage.remove`."""
        whole = self._root / path
        with explained("remove", whole):
            _remove(whole)


class LocalReader:
    """An open local file."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self._number = number
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self._size_bytes

    def read_into(self, offset: int, out: memoryview) -> int:
        """See :meth:`Reader.read_into`."""
        done = 0
        while done < len(out):
            got = os.preadv(self._number, [out[done:]], offset + done)
            if not got:
                break
            done += got
        return done


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into a :class:`CheckpointError` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "see to it that the directory can be written")
        msg = f"cannot {doing} {path}: {error.strerror or error}. The checkpoints that were complete are untouched; {advice}"
        raise CheckpointError(msg) from error


def _make_dir(path: Path) -> None:
    """Create a directory and the missing ones above it, durably."""
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
    except FileNotFoundError:  # somebody else is removing it too
        if path.exists():
            _remove(path)
