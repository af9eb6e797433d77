"""What receives the records of a job besides its files and the view, each on a thread of its own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.base.clock import Clock
from holdfast.errors import ConfigError
from holdfast.launch.job import Job, check_writable
from holdfast.observe.loggers.log_to import check_targets
from holdfast.records.queued import QueuedSink, SlowSink
from holdfast.tools.debug.running import OFF, BundleWriter, check_bundles

_TRAIN_JOB = "KUBEFLOW_TRAINER_SERVER_URL"


def check_sinks(job: Job) -> None:
    """Raise a ConfigError that says what to change, if records cannot be passed on as the job asks for."""
    check_targets(job)
    check_bundles(job)
    if job.dashboard:
        host_and_port(job.dashboard, "--dashboard")
    path = job.metrics_file
    if not job.metrics_port and path is None:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        flag = "--metrics-port" if job.metrics_port else "--metrics-file"
        raise ConfigError(f"{flag} needs prometheus-client: pip install 'holdfast[monitor]'")
    if job.metrics_port:
        host_and_port(job.metrics_port, "--metrics-port")
    if path is not None and (path.suffix != ".prom" or path.is_dir()):
        raise ConfigError(f"--metrics-file must be a file whose name ends in .prom, as node-exporter wants, got {path}")
    if path is not None:
        check_writable(path.parent, "--metrics-file: the folder")


def host_and_port(given: str, option: str) -> tuple[str, int]:
    """Return host and port of an option; a port alone is of the loopback interface.

    Raises:
        ConfigError: if it is not of the form ``[HOST:]PORT``, with a port from 0 to 65535.
    """
    host, colon, port = given.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535) or (colon and not host):
        raise ConfigError(f"{option} must be [HOST:]PORT with a port from 0 to 65535, got {given!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def open_sinks(job: Job, clock: Clock, say: Callable[[str], None]) -> tuple[QueuedSink, ...]:
    """Return the sinks of a job, on the launcher of the first node: it receives the records of all nodes.

    Args:
        job: The job.
        clock: Its zero is when the run began.
        say: Displays a line.

    Raises:
        ConfigError: if a sink that was asked for cannot be opened.
    """
    if job.node_rank != 0:
        return ()
    sinks: list[SlowSink] = []
    if job.debug_bundles not in ("", OFF):
        sinks.append(BundleWriter(Path(job.debug_bundles).absolute()))
    if _TRAIN_JOB in os.environ:
        from holdfast.observe.monitor.kubeflow import progress_reporter

        if (reporter := progress_reporter(os.environ, say)) is not None:
            sinks.append(reporter)
    if job.metrics_port or job.metrics_file is not None:  # last: nothing that may be refused follows its port
        from holdfast.observe.monitor.exporter import MetricsExporter

        exporter = MetricsExporter(range(job.workers), clock, job.metrics_file)
        if job.metrics_port:
            say(f"metrics at {exporter.serve(*host_and_port(job.metrics_port, '--metrics-port'))}")
        sinks.insert(0, exporter)
    return tuple(QueuedSink(sink, say) for sink in sinks)
