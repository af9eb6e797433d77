"""Passes the metrics of a run on to Prometheus: by HTTP, or by a file for the textfile collector of node-exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.base.clock import Clock
from holdfast.errors import ConfigError
from holdfast.observe.monitor.metrics import METRICS, Metric, RunMetrics, Value
from holdfast.records.queued import NotTaken
from holdfast.records.types import Record

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_FILE_S = 5.0
"""The file is written this often."""


class MetricsExporter:
    """A sink of records whose metrics can be scraped, or are written to a file, or both.

    Args:
        started: Ranks of the initial job, without spares.
        clock: Its zero is when the run began.
        path: The file, replaced atomically every 5 s and at the end; None: none.
    """

    name = "prometheus"
    trouble = "metrics are not written"
    pause_s = 0.2

    def __init__(self, started: Sequence[int], clock: Clock, path: Path | None = None) -> None:
        from prometheus_client import CollectorRegistry

        self._clock, self._path = clock, path
        self._metrics = RunMetrics(started, time.time() - clock.now_s())
        self._lock = threading.Lock()
        self._server: WSGIServer | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._written_s = float("-inf")
        self.longest_s = _FILE_S

    def serve(self, host: str, port: int) -> str:
        """Serve the metrics from now on; return the URL.

        Raises:
            ConfigError: if the port cannot be opened.
        """
        from prometheus_client import start_http_server

        try:
            self._server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"--metrics-port {host}:{port} cannot be opened: {why}; choose another one") from error
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self._server.server_port}/metrics"

    def take(self, records: Sequence[Record]) -> None:
        """Take new records, and write the file if it is time to; NotTaken says why it could not be written."""
        with self._lock:
            for record in records:
                self._metrics.take(record)
        if time.monotonic() - self._written_s >= _FILE_S:
            self._written_s = time.monotonic()
            self._write()

    def close(self, end_s: float) -> None:
        """Write the file a last time; close the port."""
        with self._lock:
            self._metrics.close(end_s)
        try:
            self._write()
        finally:
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield each metric with its values, as ``prometheus_client`` asks for at each scrape."""
        with self._lock:
            values = self._metrics.values(self._clock.now_s())
        for metric in METRICS:
            if metric.name in values:
                yield _family(metric, values[metric.name])

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        if self._path is None:
            return
        try:
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            raise NotTaken(f"{self._path} cannot be written: {error.strerror}") from error


def _family(metric: Metric, value: Value) -> Any:
    """Return a metric and its values in the form of ``prometheus_client``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    family: Any = kinds[metric.kind](metric.name, metric.help, labels=[metric.label] if metric.label else [])
    by_label = value if isinstance(value, Mapping) else {"": value}
    for label, each in by_label.items():
        labels = [label] if metric.label else []
        if metric.kind == "histogram":
            observed: Any = each
            family.add_metric(labels, observed.buckets(), observed.sum)
        else:
            family.add_metric(labels, each)
    return family
