"""The view of a running job: what a launcher tells it. The terminal's are in :mod:`holdfast.observe.terminal.views`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.base.side_work import run_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Progress of a run.

    Args:
        step: Committed steps.
        planned: Steps of the run; 0: unknown.
        alive: The PID of each live worker of this node.
        metrics: Those of the newest step.
        workers: Workers that the job has while none is lost, spares included; 0: unknown.
        workers_alive: Live workers of all nodes.
        elapsed_s: Seconds since the run began.
        steps_per_s: Speed of the newest steps; None: unknown.
        left_s: Estimated seconds until the last step; None: unknown.
        waits_for: What a job that does not train yet waits for; "" while it trains.
    """

    step: int = 0
    planned: int = 0
    alive: Mapping[int, int]
    metrics: Mapping[str, float]
    workers: int = 0
    workers_alive: int = 0
    elapsed_s: float = 0.0
    steps_per_s: float | None = None
    left_s: float | None = None
    waits_for: str = ""


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


class SteadyView(RunView):
    """Another view, whose errors do not reach the launcher."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def output(self, rank: int, line: str) -> None:
        run_aside("showing the output of workers", lambda: self._view.output(rank, line), None)

    def print_line(self, line: str) -> None:
        run_aside("showing events", lambda: self._view.print_line(line), None)

    def show(self, status: RunStatus) -> None:
        run_aside("showing the progress", lambda: self._view.show(status), None)

    def close(self) -> None:
        run_aside("restoring the terminal", self._view.close, None)
