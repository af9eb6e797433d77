"""Where time comes from, so that a test can bring its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow."""

    def now_s(self) -> float:
        """Return the time in seconds since a fixed moment."""
        ...


class SystemClock:
    """The machine's monotonic clock, which all processes of one host share.

    Args:
        origin_s: Reading of ``time.monotonic()`` that counts as zero.
    """

    def __init__(self, origin_s: float = 0.0) -> None:
        self._origin_s = origin_s

    def now_s(self) -> float:
        """Return the seconds since the origin."""
        return time.monotonic() - self._origin_s


class VirtualClock:
    """Time that stands still until somebody moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the seconds that the clock was moved to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            msg = f"seconds must be at least 0, got {seconds}"
            raise ValueError(msg)
        self._now_s += seconds
