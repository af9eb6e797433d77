"""Displays of a running job: metrics for Prometheus, progress for Kubeflow, the dashboard, and the page at its end."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.launch.displays import Display
from holdfast.launch.job import Job, check_writable
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.stopping import StopProcedure
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.observe.address import host_and_port
from holdfast.records.queued import QueuedSink

if TYPE_CHECKING:
    from holdfast.observe.monitor.dashboard import Dashboard

_TRAIN_JOB = "KUBEFLOW_TRAINER_SERVER_URL"


class MetricsDisplay(Display):
    """Metrics by HTTP, or in a file: ``--metrics-port`` and ``--metrics-file``."""

    def check(self, job: Job) -> None:
        path = job.metrics_file
        if not job.metrics_port and path is None:
            return
        if importlib.util.find_spec("prometheus_client") is None:
            flag = "--metrics-port" if job.metrics_port else "--metrics-file"
            raise ConfigError(f"{flag} needs prometheus-client: pip install 'holdfast[monitor]'")
        if job.metrics_port:
            host_and_port(job.metrics_port, "--metrics-port")
        if path is not None and (path.suffix != ".prom" or path.is_dir()):
            raise ConfigError(
                f"--metrics-file must be a file whose name ends in .prom, as node-exporter wants, got {path}"
            )
        if path is not None:
            check_writable(path.parent, "--metrics-file: the folder")

    def open(self, run: RunState) -> Sequence[QueuedSink]:
        job = run.job
        if job.node_rank != 0 or not (job.metrics_port or job.metrics_file is not None):
            return ()
        from holdfast.observe.monitor.exporter import MetricsExporter

        exporter = MetricsExporter(range(job.workers), run.clock, job.metrics_file)
        if job.metrics_port:
            run.view.print_line(f"metrics at {exporter.serve(*host_and_port(job.metrics_port, '--metrics-port'))}")
        return (QueuedSink(exporter, run.view.print_line),)


class KubeflowDisplay(Display):
    """Progress in the status of a TrainJob, if the job is one."""

    def open(self, run: RunState) -> Sequence[QueuedSink]:
        if run.job.node_rank != 0 or _TRAIN_JOB not in os.environ:
            return ()
        from holdfast.observe.monitor.kubeflow import progress_reporter

        reporter = progress_reporter(os.environ, run.view.print_line)
        return () if reporter is None else (QueuedSink(reporter, run.view.print_line),)


class DashboardDisplay(Display):
    """The page about the running job, on the launcher of the first node: ``--dashboard``."""

    def __init__(self) -> None:
        self._dashboard: Dashboard | None = None

    def check(self, job: Job) -> None:
        if job.dashboard:
            host_and_port(job.dashboard, "--dashboard")

    def open(self, run: RunState) -> Sequence[QueuedSink]:
        job = run.job
        if not job.dashboard or job.node_rank != 0:
            return ()
        from holdfast.observe.monitor.dashboard import Dashboard

        self._dashboard = Dashboard(job, run.paths, run.running, run.clock, run.view.print_line)
        return (QueuedSink(self._dashboard, run.view.print_line),)

    def watch(self, sinks: Sequence[QueuedSink]) -> None:
        if self._dashboard is not None:
            self._dashboard.watch(sinks)

    def answer(self, attempt: JobAttempt, run: RunState, bus: RecordBus, stopping: StopProcedure) -> None:
        if self._dashboard is not None:
            self._dashboard.answer(attempt, run, bus, stopping)

    def finish(self, exit_code: int, message: str) -> None:
        if self._dashboard is not None:
            self._dashboard.finish(exit_code, message)


class PageDisplay(Display):
    """The page of a job that has ended, ``index.html`` beside its report, if jinja2 and matplotlib are installed."""

    def write(self, job: Job) -> None:
        if job.page and job.report_dir is not None and _can_draw():
            from holdfast.observe.page.html import write_page

            write_page(job.report_dir)


def _can_draw() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("jinja2", "matplotlib"))
