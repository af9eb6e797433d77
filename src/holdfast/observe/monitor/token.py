"""The secret that a dashboard asks for: in a file that only its owner can read, and in a URL that is printed once."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Self

from holdfast.errors import ConfigError

NAME = ".dashboard-token"
"""Name of the file."""
_BYTES = 24


class Token:
    """A secret.

    Args:
        text: The secret.
        path: Its file.
        is_new: Whether the file was written just now.
    """

    def __init__(self, text: str, path: Path, *, is_new: bool = False) -> None:
        self._text, self._path, self.is_new = text, path, is_new

    def __repr__(self) -> str:
        """Return no secret."""
        return f"Token(path={str(self._path)!r})"

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Return the token in a folder: that of a launcher that died there, or else a new one.

        Raises:
            ConfigError: if its file cannot be written, or other users can read it.
        """
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                return cls(_read(path), path)
            with os.fdopen(file, "w") as new:
                new.write(text := secrets.token_urlsafe(_BYTES))
        except OSError as error:
            raise ConfigError(f"--dashboard: {path} cannot be used: {error.strerror}; remove it") from error
        return cls(text, path, is_new=True)

    def is_in(self, header: str) -> bool:
        """Return whether the value of an ``Authorization`` header has this token."""
        scheme, _, token = header.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._text.encode())

    def url(self, address: str) -> str:
        """Return the address with the token, for its owner's browser."""
        return f"{address}?token={self._text}"

    def remove(self) -> None:
        """Remove the file: the token is of no use any more."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> str:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(file) as old:
        about, text = os.fstat(old.fileno()), old.read(200)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"--dashboard: other users can read or change {path}; remove it")
    if len(text) < _BYTES or not text.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"--dashboard: {path} holds no token; remove it")
    return text
