"""Objects in Google Cloud Storage, Azure and memory, through the package obstore; ``objectstore.py`` has what is specific to S3."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import MemoryStore, ObjectStore

_CONNECT_S = 5
_REQUEST_S = 30
_RETRIES = 4
_RETRY_S = 45
_BACKOFF_S = 0.2
_BACKOFF_BASE = 3
"""Limits of retries: their number, and the total time. They cover a short restart of the server, of
some seconds in all."""

_process: int | None = None
"""The process that used obstore first."""

_memories: dict[str, MemoryStore] = {}
"""The objects of this process, by host of the ``memory://`` URL."""


class ObjectService:
    """Where objects are, and what the errors of obstore mean there.

    obstore finds credentials in the variables ``GOOGLE_*`` and ``AZURE_*``, in Google's default credentials, or in the
    role of the machine.

    Args:
        url: ``gs://bucket/folder``, ``az://container/folder`` or ``memory://name/folder``.

    Raises:
        ConfigError: if the URL is invalid, or the package is missing.
    """

    def __init__(self, url: str) -> None:
        self._scheme, _, place = url.partition("://")
        self._bucket, _, folder = place.partition("/")
        self._prefix = ""
        try:
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise ConfigError(
                f"checkpoints at {url} need the package obstore: pip install 'holdfast[cluster]'"
            ) from error
        try:
            self._opened = self._open(folder.strip("/"))
        except (BaseError, ValueError) as error:
            raise ConfigError(f"checkpoints cannot be kept at {url}: {line_of(error)}") from error

    def path(self, name: str) -> str:
        """Return the name of an object in the store of obstore."""
        return f"{self._prefix}/{name}".strip("/")

    def store(self) -> ObjectStore:
        """Return the store, unless this is a forked process, in which the library would wait forever for its threads."""
        global _process
        _process = _process or os.getpid()
        if _process != os.getpid():
            raise RuntimeError(
                "obstore cannot be used in a process that was forked from one that used it; start processes with spawn"
            )
        return self._opened

    def explain(self, error: Exception) -> str | None:
        """Return an explanation of an error of obstore, with advice; None if the object merely does not exist."""
        message, status = line_of(error), found(r"status code: (\d+)", str(error))
        if isinstance(error, FileNotFoundError) or status == "404":
            return None
        if status in ("401", "403"):
            return f"no permission ({message}); give credentials that may read, write, list and delete there"
        if isinstance(error, TimeoutError) or "error sending request" in str(error):
            return f"{message}; check the network and that storage"
        return f"{type(error).__name__}: {message}"

    def _open(self, folder: str) -> ObjectStore:
        from obstore.store import AzureStore, GCSStore, MemoryStore

        if self._scheme == "memory":
            self._prefix = folder
            return _memories.setdefault(self._bucket, MemoryStore())
        kind = GCSStore if self._scheme == "gs" else AzureStore
        return kind(self._bucket, prefix=folder or None, **options(allow_http=True))  # if the endpoint uses http


def options(**more: bool) -> dict[str, Any]:
    """Return obstore's timeouts and retries; ``more`` are further client options."""
    limits = {"connect_timeout": timedelta(seconds=_CONNECT_S), "timeout": timedelta(seconds=_REQUEST_S)}
    retries = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=_RETRY_S),
        "backoff": {"init_backoff": timedelta(seconds=_BACKOFF_S), "base": _BACKOFF_BASE},
    }
    return {"client_options": limits | more, "retry_config": retries}


def line_of(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def found(pattern: str, text: str) -> str:
    """Return the first group of a pattern in a text, "" if there is no match."""
    match = re.search(pattern, text)
    return match[1] if match else ""
