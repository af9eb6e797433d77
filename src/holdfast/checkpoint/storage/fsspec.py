"""Objects wherever fsspec can put them: ``memory://``, ``gs://``, ``abfs://``, ``sftp://`` and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError

_OBJECT_STORES = {"abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "memory", "oci", "oss", "s3", "s3a"}
"""What fsspec calls the stores that have no folders, and where a write is complete or not there. Everywhere else folders
must be made, and a small file comes into being by renaming it."""

_TRIES = 3


class FsspecObjects:
    """See :class:`~holdfast.checkpoint.storage.objects.Objects`.

    Credentials are where fsspec looks for them: the variables and files of each service, or ``FSSPEC_*`` variables.

    Args:
        url: Of the folder that holds all.

    Raises:
        ConfigError: if fsspec does not know it, or misses a package.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            msg = f"checkpoints at {url} need the package fsspec: pip install fsspec"
            raise ConfigError(msg) from error
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:
            msg = f"checkpoints cannot be kept at {url}: {_line(error)}"
            raise ConfigError(msg) from error
        except Exception as error:
            msg = f"checkpoints cannot be kept at {url}: {_line(error)}; give a directory, s3://bucket/folder, or another URL that fsspec knows"
            raise ConfigError(msg) from error
        self._root = str(root).rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._has_folders = not protocols & _OBJECT_STORES

    def children(self, folder: str) -> list[str]:
        """See :meth:`Objects.children`."""
        path = self._path(folder)
        self._fs.invalidate_cache()
        found = [str(name).strip("/") for name in self._fs.ls(path, detail=False)]
        return [name.rpartition("/")[2] for name in found if name != path.strip("/")]

    def size(self, name: str) -> int:
        """See :meth:`Objects.size`."""
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(name))
        if info["type"] != "file":
            raise FileNotFoundError(name)
        return int(info["size"])

    def get(self, name: str) -> bytes:
        """See :meth:`Objects.get`."""
        return bytes(self._fs.cat_file(self._path(name)))

    def get_range(self, name: str, start: int, end: int) -> Any:
        """See :meth:`Objects.get_range`."""
        return self._fs.cat_file(self._path(name), start=start, end=end)

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`Objects.put`."""
        path = self._path(name)
        if not self._has_folders:
            self._fs.pipe_file(path, data)
            return
        self._make_parent(path)
        self._fs.pipe_file(path + ".tmp", data)
        self._fs.mv(path + ".tmp", path)

    def upload(self, path: Path, name: str) -> None:
        """See :meth:`Objects.upload`."""
        target = self._path(name)
        if self._has_folders:
            self._make_parent(target)
        self._fs.put_file(str(path), target)

    def remove(self, name: str) -> None:
        """See :meth:`Objects.remove`."""
        path = self._path(name)
        for tries_left in reversed(range(_TRIES)):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                # Perhaps only of something in it, that somebody else removed meanwhile.
                if not tries_left or not self._fs.exists(path):
                    raise
            else:
                return

    def explain(self, error: Exception) -> str | None:
        """See :meth:`Objects.explain`."""
        match error:
            case FileNotFoundError():
                return None
            case PermissionError():
                return f"no permission ({_line(error)}); give credentials that may read, write, list and delete there"
            case TimeoutError() | ConnectionError():
                return f"{_line(error)}; look at the network and at that storage"
            case _:
                return f"{type(error).__name__}: {_line(error)}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root or "/"

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
