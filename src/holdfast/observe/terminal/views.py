"""Views of a running job in the terminal: a live one, and one of lines for logs and pipes."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from holdfast.base.formatting import clean, count, rough, speed, timer
from holdfast.launch.run_view import RunStatus, RunView
from holdfast.observe.terminal.bar import bar_line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live


EVERY_S = 30.0
"""Seconds between two lines about the progress, without a terminal."""


class PlainView(RunView):
    """One line per event, and one about the progress every :data:`EVERY_S` seconds, for logs and pipes.

    The workers' output goes to ``output``.
    """

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._due_s = time.monotonic() + EVERY_S

    def output(self, rank: int, line: str) -> None:
        """Print the line with the worker's rank."""
        print(f"[{rank}] {line}", file=self._output, flush=True)

    def print_line(self, line: str) -> None:
        """Print the line on stderr."""
        print(f"holdfast: {clean(line)}", file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for

    def show(self, status: RunStatus) -> None:
        """Print a line about the progress, if the next one is due."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + EVERY_S
            self.print_line(progress_line(status))


class LiveView(RunView):
    """Progress, workers and the last event at the bottom of stderr; output scrolls above, or goes to ``output``."""

    def __init__(self, output: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._output = output or sys.stdout
        self._last = "starting"
        # no refresh thread: the launcher forks
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True)

    def output(self, rank: int, line: str) -> None:
        """Print the line with the worker's rank."""
        from rich.text import Text

        if self._output.isatty():
            self._console.print(Text(f"[{rank}] {line}"), soft_wrap=True)
        else:
            print(f"[{rank}] {line}", file=self._output, flush=True)

    def print_line(self, line: str) -> None:
        """Print the line above the panel and keep it visible."""
        from rich.text import Text

        self._last = clean(line)
        self._console.print(Text(f"holdfast: {self._last}", style="yellow"), soft_wrap=True)

    def show(self, status: RunStatus) -> None:
        """Redraw the panel."""
        self._live.start()  # has no effect the second time
        self._live.update(_panel(status, self._last, self._console.width), refresh=True)

    def close(self) -> None:
        """Remove the panel."""
        self._live.stop()


def make_view(output: TextIO | None = None) -> RunView:
    """Return the live view if stderr is a terminal that can move its cursor, otherwise one line per event."""
    is_live = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return LiveView(output) if is_live else PlainView(output)


def progress_line(status: RunStatus) -> str:
    """Return the progress in one line."""
    if status.waits_for:
        return f"after {rough(status.elapsed_s)}: {status.waits_for}"
    of = f" of {status.planned}" if status.planned else ""
    workers = f"{status.workers_alive} of {count(status.workers, 'worker')}" if status.workers else ""
    return ", ".join(
        filter(None, (f"step {status.step}{of} after {rough(status.elapsed_s)}", *_speed(status), workers))
    )


def _speed(status: RunStatus) -> list[str]:
    """Return speed, remaining time and metrics, as far as they are known."""
    left = f"about {rough(max(1.0, status.left_s))} left" if status.left_s else ""
    metrics = [f"{clean(name)} {value:.4g}" for name, value in status.metrics.items()]
    return [text for text in (speed(status.steps_per_s), left, *metrics) if text]


def _panel(status: RunStatus, last: str, width: int = 80) -> Group:
    """Return what the terminal shows, for a screen of so many columns."""
    from rich.console import Group
    from rich.text import Text

    workers = f"{status.workers_alive} of {status.workers}  " if status.workers else ""
    pids = "  ".join(f"{rank} (pid {pid})" for rank, pid in sorted(status.alive.items()))
    elapsed = timer(status.elapsed_s)
    now, colour = (status.waits_for, "cyan") if status.waits_for else ("  ".join(_speed(status)), "")
    lines = [Text(f"last    {last}", style="yellow")]
    if workers or pids:
        lines.insert(0, Text(f"workers {workers}{pids}", style="green"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    lines.insert(0, Text(f"{elapsed}  {now}", style=colour))  # the one that may be folded instead
    if status.waits_for:
        return Group(*lines)
    steps = f"{status.step}/{status.planned}" if status.planned else str(status.step)
    share = min(1.0, status.step / status.planned) if status.planned else None
    return Group(bar_line("step", share, steps, width), *lines)
