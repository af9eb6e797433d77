"""Live view of a running job in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from holdfast.report.formatting import clean

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Progress of a run: committed steps, of ``planned`` (0: unknown); the PID of each live worker; metrics."""

    step: int = 0
    planned: int = 0
    alive: Mapping[int, int]
    metrics: Mapping[str, float]


class RunView:
    """Displays a run; this class displays nothing. ``show`` is called periodically, the other methods on events."""

    def output(self, rank: int, line: str) -> None:
        """Display a line that worker ``rank`` printed."""

    def print_line(self, line: str) -> None:
        """Display an event."""

    def show(self, status: RunStatus) -> None:
        """Display the progress."""

    def close(self) -> None:
        """Restore the terminal; nothing is displayed afterwards."""


class PlainView(RunView):
    """One line per event, for logs and pipes; the workers' output goes to ``output``."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stdout

    def output(self, rank: int, line: str) -> None:
        """Print the line with the worker's rank."""
        print(f"[{rank}] {line}", file=self._output, flush=True)

    def print_line(self, line: str) -> None:
        """Print the line on stderr."""
        print(f"holdfast: {clean(line)}", file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for


class LiveView(RunView):
    """A progress bar, the workers and the last event at the bottom of stderr; output scrolls above, or goes to ``output``."""

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
        """Print the line above the bar and keep it visible."""
        from rich.text import Text

        self._last = clean(line)
        self._console.print(Text(f"holdfast: {self._last}", style="yellow"), soft_wrap=True)

    def show(self, status: RunStatus) -> None:
        """Redraw the bar."""
        self._live.start()  # has no effect the second time
        self._live.update(_panel(status, self._last), refresh=True)

    def close(self) -> None:
        """Remove the bar."""
        self._live.stop()


def make_view(output: TextIO | None = None) -> RunView:
    """Return the live view if stderr is a terminal, otherwise one line per event."""
    return LiveView(output) if sys.stderr.isatty() else PlainView(output)


def _panel(status: RunStatus, last: str) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    metrics = "  ".join(f"{clean(name)} {value:.4g}" for name, value in status.metrics.items())
    progress = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=status.planned or None, completed=status.step, width=40, pulse=not status.planned)
    of = f"/{status.planned}" if status.planned else ""
    progress.add_row(Text("step "), bar, Text(f"{status.step}{of}  {metrics}"))
    pids = "  ".join(f"{rank} (pid {pid})" for rank, pid in sorted(status.alive.items()))
    lines = (Text(f"alive  {pids}", style="green"), Text(f"last   {last}", style="yellow"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(progress, *lines)
