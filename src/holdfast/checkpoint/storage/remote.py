"""Checkpoints in an object store.

Formats write files in any order, so a part is first written into a local directory and then uploaded. A worker needs
as much space in ``TMPDIR`` as its part of a checkpoint has bytes, until the upload is complete. Loading needs none.

Every request has a deadline. Errors of the service become one line with advice.
"""

from __future__ import annotations

import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from holdfast.base.temporary import TemporaryFolder, sweep
from holdfast.checkpoint.blocks import BLOCK_BYTES, run
from holdfast.checkpoint.manifest import MAX_BYTES
from holdfast.checkpoint.storage.local import explained
from holdfast.checkpoint.storage.objects import ObjectService
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError

_Result = TypeVar("_Result")

_LIMIT_S = 120.0
"""Time limit for a response; large transfers get more, see below."""

_LEAST_BYTES_PER_S = 1 << 20
"""The slowest usable connection."""

_PART_BYTES = 8 << 20
_MAX_PARTS = 10_000
_UPLOADS = 4
"""Large files are uploaded in parts, this many at a time. S3 allows at most ``_MAX_PARTS`` parts per object."""

_STAGING = "holdfast-upload-"
"""Prefix of the temporary directories' names."""

_UNTOUCHED = "The checkpoints that were complete are untouched"


class RemoteStorage:
    """See :class:`~holdfast.checkpoint.storage.Storage`. Any number of threads may use it.

    Args:
        url: ``s3://bucket/folder``, or one of ``gs://``, ``az://`` or ``memory://``.

    Raises:
        ConfigError: if its scheme is unknown, or needs a package that is not installed.
    """

    has_links = False

    def __init__(self, url: str) -> None:
        self.url = _without_password(url.rstrip("/"))
        self._service = _open(url)
        self._thread_local = threading.local()

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(self._call("list", folder, _children))
        except _NotThere:
            return []

    def read(self, path: str) -> bytes | None:
        with suppress(_NotThere):  # a size request cannot tell a missing bucket from a missing object; get() can
            size = self._call("read", path, _size)
            if size > MAX_BYTES:
                raise CheckpointCorrupt(f"{path} has {size} bytes, at most {MAX_BYTES} are allowed")
        try:
            return self._call("read", path, lambda store, name: bytes(store.get(name).bytes()))
        except _NotThere:
            return None

    @contextmanager
    def reader(self, path: str) -> Iterator[RemoteReader]:
        try:
            size = self._call("read", path, _size)
            yield RemoteReader(lambda start, end: self._read_range(path, start, end), size)
        except _NotThere as error:
            raise CheckpointCorrupt(f"{path.rpartition('/')[2]} cannot be read: it is not there") from error

    def _read_range(self, path: str, start: int, end: int) -> Any:
        return self._call(
            "read", path, lambda store, name: store.get_range(name, start=start, end=end), size_bytes=end - start
        )

    def prepare(self, folder: str) -> Path:
        """See :meth:`Storage.prepare`; returns a temporary directory of this thread, which writes one part at a time.

        It is removed by :meth:`store`, and when the thread removes the folder, puts a file into it, or prepares again.
        """
        self._drop_staging()
        staging = StagingDirectory()
        self._thread_local.staging = (folder, staging)
        return staging.path

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        """See :meth:`Storage.store`. The temporary directory is removed afterwards, even on failure."""
        prepared, staging = self._staging()
        if staging is None or prepared != folder:
            raise CheckpointError(f"store() of {folder!r} without prepare() in the same thread")
        local = staging.path
        try:
            with explained("send files from", local):
                total = sum((local / name).stat().st_size for name in names)
            run(lambda name: self._upload(local / name, f"{folder}/{name}"), names, total)
        finally:
            self._drop_staging()

    def _upload(self, local: Path, path: str) -> None:
        size_bytes = local.stat().st_size
        options = {"chunk_size": max(_PART_BYTES, -(-size_bytes // _MAX_PARTS)), "max_concurrency": _UPLOADS}
        self._call("write", path, lambda store, name: store.put(name, local, **options), size_bytes=size_bytes)
        stored_size = self._call("read", path, _size)
        if stored_size != size_bytes:
            raise CheckpointError(
                f"cannot write {self.url}/{path}: {size_bytes} bytes were sent, {stored_size} are there; check that storage"
            )

    def link(self, path: str, name: str) -> bool:
        return False

    def put(self, path: str, data: bytes) -> None:
        self._give_up_staging(path)
        self._call("write", path, lambda store, name: store.put(name, data, use_multipart=False), size_bytes=len(data))
        if self.read(path) != data:
            raise CheckpointError(
                f"the storage says that {self.url}/{path} was written, but it was not; choose another one"
            )

    def remove(self, path: str) -> None:
        self._give_up_staging(path)
        try:
            self._call("remove", path, _remove)
        except _NotThere:
            return

    def _give_up_staging(self, path: str) -> None:
        """Drop this thread's staging directory if the thread uses its folder in another way than by :meth:`store`."""
        folder, _ = self._staging()
        if folder and (f"{path}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{path}/")):
            self._drop_staging()

    def _drop_staging(self) -> None:
        _, staging = self._staging()
        self._thread_local.staging = ("", None)
        if staging is not None:
            staging.close()

    def _staging(self) -> tuple[str, StagingDirectory | None]:
        staging: tuple[str, StagingDirectory | None] = getattr(self._thread_local, "staging", ("", None))
        return staging

    def _call(self, doing: str, path: str, do: Callable[[Any, str], _Result], *, size_bytes: int = 0) -> _Result:
        """Return the result of an operation of obstore, given its store and the name of the object there.

        Raises:
            CheckpointError: if it fails, or takes too long; a :class:`_NotThere` if the object does not exist.
        """
        where = f"{self.url}/{path}".rstrip("/")
        try:
            limit_s = _LIMIT_S + size_bytes / _LEAST_BYTES_PER_S
            return within(limit_s, lambda: do(self._service.store(), self._service.path(path)))
        except Exception as error:
            why = self._service.explain(error)
            if why is None:
                raise _NotThere(f"cannot {doing} {where}: there is no such object, folder or bucket") from error
            raise CheckpointError(
                f"cannot {doing} {where}: {why}" + (f". {_UNTOUCHED}" if doing == "write" else "")
            ) from error


def _children(store: Any, path: str) -> list[str]:
    """Return the current names directly in a folder, never from a cache."""
    listing = store.list_with_delimiter(path or None)
    paths = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
    return [below.rpartition("/")[2] for below in paths if below.strip("/") != path]


def _size(store: Any, name: str) -> int:
    return int(store.head(name)["size"])


def _remove(store: Any, name: str) -> None:
    """Remove an object, and all objects in the folder of this name."""
    store.delete([name, *(entry["path"] for entry in store.list(name).collect())])


class StagingDirectory:
    """An empty directory in ``TMPDIR``, which is removed by :meth:`close`, or when this process ends.

    A worker may be killed while its directory holds gigabytes, so creating the next one removes those that no process
    uses any more.

    Raises:
        CheckpointError: if it cannot be created.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        with explained("make a temporary directory in", root):
            sweep(_STAGING, root)
            folder = TemporaryFolder.make(_STAGING, root)
            self.path = folder.path / "files"
            self.path.mkdir()
        self.close = weakref.finalize(self, folder.remove)


class _NotThere(CheckpointError):
    """The requested object does not exist."""


class RemoteReader:
    """An object of ``size_bytes``; ``read_range`` returns its bytes from a first position up to a last one, excluded."""

    num_names = 1
    part_bytes = BLOCK_BYTES
    """A whole block, because every request has a high latency."""

    def __init__(self, read_range: Callable[[int, int], Any], size_bytes: int) -> None:
        self._read_range = read_range
        self.size_bytes = size_bytes

    def read_into(self, offset: int, out: memoryview) -> int:
        end = min(offset + len(out), self.size_bytes)
        if end <= offset:
            return 0
        data = memoryview(self._read_range(offset, end))
        out[: len(data)] = data
        return len(data)


def within(limit_s: float, do: Callable[[], _Result]) -> _Result:
    """Return ``do()``; on a timeout, the call is left behind in its thread.

    Raises:
        TimeoutError: if it takes longer than ``limit_s`` seconds.
        Exception: any exception of ``do``.
    """
    answer: Future[_Result] = Future()

    def work() -> None:
        try:
            answer.set_result(do())
        except Exception as error:
            answer.set_exception(error)
        except BaseException as error:  # a panic of a Rust library; no caller would handle it
            answer.set_exception(RuntimeError(str(error)))

    threading.Thread(target=work, name="holdfast-checkpoint-ask", daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"there was no answer within {limit_s:g} s") from None


def _open(url: str) -> ObjectService:
    scheme = url.partition("://")[0]
    if scheme in ("s3", "s3a"):
        from holdfast.checkpoint.storage.objectstore import S3Service

        return S3Service(url)
    if scheme not in ("gs", "az", "memory"):
        raise ConfigError(
            f"checkpoints cannot be kept at {_without_password(url)}: give a directory, or a URL that begins with s3://, "
            "gs://, az:// or memory://; these need the package obstore: pip install 'holdfast[cluster]'"
        )
    return ObjectService(url)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^/@]*@", r"\1:***@", url)
