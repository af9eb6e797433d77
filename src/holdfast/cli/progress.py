"""Progress of a command that takes a while: a bar with the remaining time on stderr, or a line every 30 s."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.base.formatting import clean, rough, timer

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

EVERY_S = 30.0
"""Seconds between two lines, without a terminal."""
_KNOWN_AFTER_S = 2.0
"""The remaining time is estimated only after so much work, and after this share of it."""
_KNOWN_AFTER = 0.03
_MOST_BY_TIME = 0.99
"""The share that time alone makes complete."""


class Reporter:
    """What a command does, and how much of it is done. Its methods may be called from any thread.

    Args:
        text: What is done first.
    """

    def __init__(self, text: str) -> None:
        self.text = clean(text)
        self.begun_s = self._counts_since_s = time.monotonic()
        self._lock = threading.Lock()
        self._total = self._done = 0.0
        self._left: tuple[float, float] | None = None  # when the remaining time was given, and how long it was

    def __call__(self, text: str) -> None:
        """Take what is done now."""
        self.text = clean(text)
        self.changed()

    def expect(self, total: float) -> None:
        """Take how much work follows, in any unit; what was done before does not count."""
        with self._lock:
            self._total, self._done = float(total), 0.0
            self._counts_since_s = time.monotonic()

    def advance(self, amount: float = 1.0) -> None:
        """Take how much more was done."""
        with self._lock:
            self._done += amount
        self.changed()

    def at(self, share: float, left_s: float | None = None) -> None:
        """Take the share of all work that is done, and the remaining seconds if they are known."""
        with self._lock:
            self._total, self._done = 1.0, max(0.0, share)
            self._left = None if left_s is None else (time.monotonic(), left_s)
        self.changed()

    def at_task(self, text: str, share: float, left_s: float) -> None:
        """Take what is done now, and how far the work is, as :meth:`at` does."""
        self.text = clean(text)
        self.at(share, left_s)

    @property
    def share(self) -> float | None:
        """Share that is done, from 0 to 1; None if the total is unknown."""
        if self._total <= 0:
            return None
        share = min(1.0, self._done / self._total)
        if self._left is None or self._left[1] <= 0:
            return share
        given_s, left_s = (
            self._left
        )  # the share goes on as the remaining time goes down, but is never complete by itself
        passed = (1 - share) * (time.monotonic() - given_s) / left_s
        return max(share, min(_MOST_BY_TIME, share + passed))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.begun_s

    @property
    def left_s(self) -> float | None:
        """Estimated remaining seconds; None if too little is done."""
        if self._left is not None:
            given_s, left_s = self._left
            return max(0.0, left_s - (time.monotonic() - given_s))
        share, elapsed_s = self.share, time.monotonic() - self._counts_since_s
        if share is None or share < _KNOWN_AFTER or elapsed_s < _KNOWN_AFTER_S:
            return None
        return elapsed_s * (1 - share) / share

    def line(self) -> str:
        """Return the state in one line."""
        parts = [self.text, f"{100 * self.share:.0f} %" if self.share is not None else "", rough(self.elapsed_s)]
        left = f"about {rough(max(1.0, self.left_s))} left" if self.left_s else ""
        return ", ".join(part for part in (*parts, left) if part)

    def changed(self) -> None:
        """Display the change, if it is time to."""

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        print(clean(text), file=sys.stderr, flush=True)


class _LineProgress(Reporter):
    """Prints a line every :data:`EVERY_S` seconds."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._due_s = self.begun_s + EVERY_S

    def changed(self) -> None:
        with self._lock:
            if time.monotonic() < self._due_s:
                return
            self._due_s = time.monotonic() + EVERY_S
        self.print_line(self.line())


class _BarProgress(Reporter):
    """Draws a line with a bar, again and again; a thread of the display does so."""

    live: Live

    def print_line(self, text: str) -> None:
        from rich.text import Text

        self.live.console.print(Text(clean(text)), soft_wrap=True)

    def __rich__(self) -> Table:
        from holdfast.observe.terminal.bar import bar_line

        left = f"  {rough(max(1.0, self.left_s))} left" if self.left_s else ""
        return bar_line(self.text, self.share, f"{timer(self.elapsed_s)}{left}", self.live.console.width)


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[Reporter]:
    """Show progress on stderr, and yield what takes it; a bar on a terminal, which is removed at the end.

    A warning that is issued meanwhile is a line that stays.

    Args:
        text: What is done first.
        quiet: Show nothing, as for output that programs read.
    """
    with warnings.catch_warnings(), _shown(text, quiet) as reporter:
        warnings.showwarning = lambda message, *details: reporter.print_line(f"warning: {message}")
        yield reporter


@contextmanager
def _shown(text: str, quiet: bool) -> Iterator[Reporter]:
    if quiet or not sys.stderr.isatty():
        yield Reporter(text) if quiet else _LineProgress(text)
        return
    from rich.console import Console
    from rich.live import Live

    bar = _BarProgress(text)
    bar.live = Live(
        console=Console(file=sys.stderr, highlight=False),
        refresh_per_second=4,
        transient=True,
        get_renderable=lambda: bar,
    )
    with bar.live:
        yield bar
