"""The source of time, which a test can replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now_s(self) -> float:
        """Return the time in seconds since a fixed moment."""
        ...


class SystemClock:
    """The system's monotonic clock, which all processes of a host share.

    Args:
        origin_s: Reading of ``time.monotonic()`` that counts as zero.
    """

    def __init__(self, origin_s: float = 0.0) -> None:
        self._origin_s = origin_s

    def now_s(self) -> float:
        """Return the seconds since the origin."""
        return time.monotonic() - self._origin_s
