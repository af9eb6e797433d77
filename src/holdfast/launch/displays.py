"""Displays of a job, besides its view and its files: what they are asked to do, and how a launcher uses all of them.

They stand in outer rooms, which the launcher knows only by this table of names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.base.clock import Clock
from holdfast.base.registered import named
from holdfast.launch.attempt import JobAttempt
from holdfast.launch.control import RunningJob
from holdfast.launch.job import Job
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.stopping import StopProcedure
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayedJob:
    """A job that is about to start, as displays need it.

    Args:
        job: The job.
        paths: Its directories.
        running: The job as requests to it need it.
        clock: Its zero is when the run began.
        say: Displays a line.
        is_late: Whether the job had begun before this launcher arrived, so that an earlier launcher of this node showed it.
    """

    job: Job
    paths: RunPaths
    running: RunningJob
    clock: Clock
    say: Callable[[str], None]
    is_late: bool = False


class Display:
    """Shows one job, or passes on what happens in it, if the job asks for that; this class does nothing."""

    def check(self, job: Job) -> None:
        """Raise a ConfigError that says what to change, if the job cannot be shown as it asks for."""

    def prepare(self, job: Job) -> None:
        """Take hold of what earlier starts of the job left in their folders, which are removed next."""

    def open(self, displayed: DisplayedJob) -> Sequence[QueuedSink]:
        """Return the sinks of the job's records. The launcher of the first node receives the records of all nodes.

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


class Displays:
    """All displays of one job."""

    def __init__(self) -> None:
        self._displays: list[Display] = [named(place)() for place in BUILT_IN.values()]

    def check(self, job: Job) -> None:
        """See :meth:`Display.check`."""
        for display in self._displays:
            display.check(job)

    def prepare(self, job: Job) -> None:
        """See :meth:`Display.prepare`."""
        for display in self._displays:
            display.prepare(job)

    def open(self, displayed: DisplayedJob) -> tuple[QueuedSink, ...]:
        """Return the sinks of all displays; if one cannot be opened, those before it are closed again."""
        sinks: list[QueuedSink] = []
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: close_all(sinks, displayed.clock.now_s()))
            for display in self._displays:
                sinks += display.open(displayed)
            for display in self._displays:
                display.watch(sinks)
            undo.pop_all()
        return tuple(sinks)

    def answer(self, attempt: JobAttempt, run: RunState, bus: RecordBus, stopping: StopProcedure) -> None:
        """See :meth:`Display.answer`."""
        for display in self._displays:
            display.answer(attempt, run, bus, stopping)

    def finish(self, exit_code: int, message: str) -> None:
        """See :meth:`Display.finish`."""
        for display in self._displays:
            display.finish(exit_code, message)

    def write(self, job: Job) -> None:
        """See :meth:`Display.write`."""
        for display in self._displays:
            display.write(job)

    def close(self) -> None:
        """See :meth:`Display.close`."""
        for display in self._displays:
            display.close()
