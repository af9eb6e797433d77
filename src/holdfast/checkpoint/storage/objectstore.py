"""Objects in S3, and in what speaks its language, by way of the package obstore."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from obstore import Bytes
    from obstore.store import S3Store

_CONNECT_S = 5
_REQUEST_S = 30
_RETRIES = 4
_RETRY_S = 45
_BACKOFF_S = 0.2
_BACKOFF_BASE = 3
"""A request is begun again at most so many times, and not at all after so long; a short restart of the server is waited for,
some seconds in all."""

_PART_BYTES = 8 << 20
_MAX_PARTS = 10_000
_UPLOADS = 4
"""Large files are sent in parts, so many at a time. S3 takes no more of them for one object."""

_process: int | None = None
"""Which process used S3 first."""

_SHOW_CREDENTIALS = "`aws configure export-credentials --format env` prints those of a profile"
_ADVICE = {
    "NoSuchBucket": "there is no bucket {bucket!r} at {endpoint}; create it, or correct the URL",
    "AccessDenied": "these credentials may not do it ({code}); give some that may read, write, list and delete there",
    "InvalidAccessKeyId": "{endpoint} does not know this AWS_ACCESS_KEY_ID ({code}); correct it",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID ({code}); correct them",
    "ExpiredToken": "the credentials have expired ({code}); get new ones",
    "PermanentRedirect": "the bucket {bucket!r} is in another region ({code}); set AWS_DEFAULT_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket {bucket!r} is in another region ({code}); set AWS_DEFAULT_REGION to it",
}


class S3Objects:
    """See :class:`~holdfast.checkpoint.storage.objects.Objects`.

    Credentials and place are found in ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``,
    ``AWS_DEFAULT_REGION`` and ``AWS_ENDPOINT_URL``, or where the machine is one of AWS with a role, there.

    Args:
        bucket: Which must exist.
        folder: In it.

    Raises:
        ConfigError: if the URL is wrong, or the package missing.
    """

    def __init__(self, bucket: str, folder: str) -> None:
        self._bucket = bucket
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", bucket):
            msg = f"a place in S3 must have the form s3://bucket/folder, got s3://{bucket}/{folder}"
            raise ConfigError(msg)
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store as Store
        except ImportError as error:
            msg = f"checkpoints at s3://{bucket}/{folder} need the package obstore: pip install 'holdfast[cluster]'"
            raise ConfigError(msg) from error
        self._endpoint = _endpoint()
        try:
            self._opened: S3Store = Store(
                bucket,
                prefix=folder.strip("/") or None,
                config={"endpoint": self._endpoint} if self._endpoint else None,
                client_options={
                    "allow_http": self._endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=_CONNECT_S),
                    "timeout": timedelta(seconds=_REQUEST_S),
                },
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=_RETRY_S),
                    "backoff": {"init_backoff": timedelta(seconds=_BACKOFF_S), "base": _BACKOFF_BASE},
                },
            )
        except (BaseError, ValueError) as error:
            msg = f"checkpoints cannot be kept at s3://{bucket}/{folder}: {_line(error)}"
            raise ConfigError(msg) from error

    def children(self, folder: str) -> list[str]:
        """See :meth:`Objects.children`."""
        found = self._store().list_with_delimiter(folder or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [path.rpartition("/")[2] for path in paths if path.strip("/") != folder]

    def size(self, name: str) -> int:
        """See :meth:`Objects.size`."""
        return self._store().head(name)["size"]

    def get(self, name: str) -> bytes:
        """See :meth:`Objects.get`."""
        return bytes(self._store().get(name).bytes())

    def get_range(self, name: str, start: int, end: int) -> Bytes:
        """See :meth:`Objects.get_range`."""
        return self._store().get_range(name, start=start, end=end)

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`Objects.put`; one request, whatever the size: the object is replaced at once."""
        self._store().put(name, data, use_multipart=False)

    def upload(self, path: Path, name: str) -> None:
        """See :meth:`Objects.upload`."""
        part_bytes = max(_PART_BYTES, -(-path.stat().st_size // _MAX_PARTS))
        self._store().put(name, path, chunk_size=part_bytes, max_concurrency=_UPLOADS)

    def remove(self, name: str) -> None:
        """See :meth:`Objects.remove`."""
        below: Iterable[str] = [entry["path"] for entry in self._store().list(name).collect()]
        self._store().delete([name, *below])

    def _store(self) -> S3Store:
        _check_process()
        return self._opened

    def explain(self, error: Exception) -> str | None:
        """See :meth:`Objects.explain`."""
        text = str(error)
        status, code = _found(r"status code: (\d+)", text), _found(r"<Code>(\w+)</Code>", text)
        at = {"bucket": self._bucket, "endpoint": self._endpoint or "AWS", "code": code or status or "redirect"}
        if code in _ADVICE:
            return _ADVICE[code].format(**at)
        if isinstance(error, FileNotFoundError):
            return None
        if status in ("401", "403"):
            return _ADVICE["AccessDenied"].format(**at)
        if status in ("301", "307") or "Received redirect without LOCATION" in text:
            return _ADVICE["PermanentRedirect"].format(**at)
        if "169.254.169.254" in text or "/latest/api/token" in text:
            return f"there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY ({_SHOW_CREDENTIALS})"
        if "error sending request" in text or "timed out" in text or isinstance(error, TimeoutError):
            return "{endpoint} does not answer; look at AWS_ENDPOINT_URL, and at the network".format(**at)
        what = " ".join(filter(None, (status, code, _found(r"<Message>([^<]*)</Message>", text))))
        return f"{at['endpoint']} says: {what}" if what else _line(error)


def _check_process() -> None:
    """Make sure that the library's threads are in this process: it would wait for them for ever."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        msg = "S3 cannot be used in a process that was forked from one that used it; start processes by spawn"
        raise RuntimeError(msg)


def _endpoint() -> str:
    """Return the URL of the service, "" for that of AWS."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        url = os.environ.get(name, "")
        if url:
            if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
                msg = f"{name} must be an URL such as https://s3.example.org, got {url!r}"
                raise ConfigError(msg)
            return url.rstrip("/")
    return ""


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
