"""The last lines of a file that may be long and may grow, and files that other programs may have replaced."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from holdfast.observe.monitor.feed import Refused

_MOST_BYTES = 1 << 18


def open_plain(path: Path) -> BinaryIO:
    """Return an open file; raise ``OSError`` if it is missing or no file: opening a pipe would wait without end."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return os.fdopen(number, "rb")


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file: at most so many, and of its last 256 KiB.

    Raises:
        Refused: if it is not there, or no file.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise Refused(f"there is no {path.name}: the worker is on another node, or has not started yet") from None
    with os.fdopen(file, "rb") as opened:
        about = os.fstat(opened.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise Refused(f"{path.name} is no file")
        skipped = max(0, about.st_size - _MOST_BYTES)
        opened.seek(skipped)
        tail = opened.read(_MOST_BYTES).decode(errors="replace").split("\n")
    tail = tail[1:] if skipped else tail  # the first may be incomplete
    if tail and not tail[-1]:
        tail.pop()
    return tail[len(tail) - lines :] if 0 < lines < len(tail) else tail if lines else []
