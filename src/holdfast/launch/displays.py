"""Displays of a job, besides its view and its files: what they are asked to do, and how a launcher uses all of them.

They stand in outer rooms, which the launcher knows only by this table of names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from holdfast.base.registered import named
from holdfast.launch.job import Job
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.stopping import StopProcedure
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.records.queued import QueuedSink, close_all

BUILT_IN = {
    "metrics": "holdfast.observe.displays:MetricsDisplay",
    "debug-bundles": "holdfast.tools.debug.bundle_writer:BundleDisplay",
    "kubeflow": "holdfast.observe.displays:KubeflowDisplay",
    "loggers": "holdfast.observe.loggers.log_to:LoggerDisplay",
    "dashboard": "holdfast.observe.displays:DashboardDisplay",
    "page": "holdfast.observe.displays:PageDisplay",
}
"""Name: module and class, in the order in which their sinks receive records. Each launch imports all of these modules,
so they import what draws, serves or logs only when a job asks for it."""


class Display:
    """Shows one job, or passes on what happens in it, if the job asks for that; this class does nothing."""

    def check(self, job: Job) -> None:
        """Raise a ConfigError that says what to change, if the job cannot be shown as it asks for."""

    def prepare(self, job: Job) -> None:
        """Take hold of what earlier starts of the job left in their folders, which are removed next."""

    def open(self, run: RunState) -> Sequence[QueuedSink]:
        """Return the sinks of the records of a job that is about to start; the first node's launcher receives those of all.

        Raises:
            ConfigError: if a sink that was asked for cannot be opened; none stays open then.
        """
        return ()

    def watch(self, sinks: Sequence[QueuedSink]) -> None:
        """Note the sinks of all displays, once all are open."""

    def answer(self, attempt: JobAttempt, run: RunState, bus: RecordBus, stopping: StopProcedure) -> None:
        """Carry out what users have requested; called by the launcher's loop, which nothing here may hold up."""

    def finish(self, exit_code: int, message: str) -> None:
        """Note how the job ends, before its sinks are closed."""

    def write(self, job: Job) -> None:
        """Write files about a job that has ended beside its report.

        Raises:
            ConfigError: if that is not possible; an OSError may be raised as well.
        """

    def close(self) -> None:
        """Release what :meth:`prepare` has taken hold of."""


def make_displays() -> list[Display]:
    """Return all displays of one job."""
    return [named(place)() for place in BUILT_IN.values()]


def open_displays(displays: Sequence[Display], run: RunState) -> None:
    """Open the sinks of all displays; if one cannot be opened, those before it are closed again."""
    sinks: list[QueuedSink] = []
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: close_all(sinks, run.clock.now_s()))
        for display in displays:
            sinks += display.open(run)
        for display in displays:
            display.watch(sinks)
        undo.pop_all()
    run.sinks.extend(sinks)
