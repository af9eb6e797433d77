"""Objects in S3 and compatible services, through the package obstore."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from holdfast.checkpoint.storage.objects import ObjectService, found, line_of, options
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

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


class S3Service(ObjectService):
    """See :class:`~holdfast.checkpoint.storage.objects.ObjectService`.

    Credentials and endpoint come from ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``,
    ``AWS_DEFAULT_REGION`` and ``AWS_ENDPOINT_URL``, or from the role of an AWS machine.

    Args:
        url: ``s3://bucket/folder``; the bucket must exist.

    Raises:
        ConfigError: if the URL is invalid, or the package is missing.
    """

    def __init__(self, url: str) -> None:
        bucket, _, folder = url.partition("://")[2].partition("/")
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", bucket):
            raise ConfigError(f"an S3 URL must have the form s3://bucket/folder, got s3://{bucket}/{folder}")
        self._endpoint = _endpoint()
        super().__init__(f"s3://{bucket}/{folder}")

    def _open(self, folder: str) -> ObjectStore:
        from obstore.store import S3Store

        return S3Store(
            self._bucket,
            prefix=folder or None,
            config={"endpoint": self._endpoint} if self._endpoint else None,
            **options(allow_http=self._endpoint.startswith("http://")),
        )

    def explain(self, error: Exception) -> str | None:
        text = str(error)
        status, code = found(r"status code: (\d+)", text), found(r"<Code>(\w+)</Code>", text)
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
            return "{endpoint} does not answer; check AWS_ENDPOINT_URL and the network".format(**at)
        what = " ".join(filter(None, (status, code, found(r"<Message>([^<]*)</Message>", text))))
        return f"{at['endpoint']} says: {what}" if what else line_of(error)


def _endpoint() -> str:
    """Return the URL of the service, "" for AWS itself."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        url = os.environ.get(name, "")
        if url:
            if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
                raise ConfigError(f"{name} must be a URL such as https://s3.example.org, got {url!r}")
            return url.rstrip("/")
    return ""
