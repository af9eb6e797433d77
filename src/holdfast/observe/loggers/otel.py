"""OpenTelemetry: the run is a span, each recovery is a span in it, and the parts of a recovery are its children.

Exported over HTTP with OTLP. Everything that the options of ``--log-to otel`` do not say comes from the variables that
OpenTelemetry defines, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS`` and ``OTEL_SERVICE_NAME``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from holdfast.base.clock import Clock
from holdfast.observe.loggers.recoveries import RecoverySpan, RecoveryTrace
from holdfast.records.queued import NotTaken
from holdfast.records.types import Finished, Record, RunStarted

RUN_ID_ATTRIBUTE = "holdfast.run.id"
"""Attribute of the resource: the id of the run, which stays the same when the job resumes."""
_PATH = "/v1/traces"
_FLUSH_S = 10.0


class RecoveryTracer:
    """A sink of records that exports the recoveries of a run as spans.

    Args:
        endpoint: URL of the collector, without the path ``/v1/traces``; "": as the variables say.
        run_id: Id of the run.
        epoch_s: Unix time of the records' zero.
        clock: Its zero is that of the records.
        exporter: Takes the spans instead of the collector; for tests.
    """

    name = "otel"
    trouble = "recoveries are not traced"
    pause_s = longest_s = 1.0

    def __init__(self, endpoint: str, run_id: str, epoch_s: float, clock: Clock, exporter: Any = None) -> None:
        self._endpoint, self._run_id, self._epoch_s, self._clock = endpoint, run_id, epoch_s, clock
        self._exporter = exporter
        self._trace = RecoveryTrace()
        self._provider: Any = None
        self._run: Any = None
        self._outcome = ""

    def take(self, records: Sequence[Record]) -> None:
        """Export the recoveries that are over."""
        if self._provider is None:
            self._begin()
        for record in records:
            self._trace.take(record)
            match record:
                case RunStarted():
                    self._run.set_attribute("holdfast.strategy", record.strategy)
                    self._run.set_attribute("holdfast.fabric", record.fabric)
                case Finished():
                    self._outcome = record.outcome
        self._export(self._trace.settle(self._clock.now_s()))

    def close(self, end_s: float) -> None:
        """Export what is left, and the run itself; NotTaken says that the collector did not take it."""
        if self._provider is None:
            return
        self._export(self._trace.close(end_s))
        self._run.set_attribute("holdfast.outcome", self._outcome or "failed")
        self._run.end(self._at(end_s))
        is_flushed = self._provider.force_flush(round(1e3 * _FLUSH_S))
        self._provider.shutdown()
        if not is_flushed:
            raise NotTaken(f"the collector has not taken all spans within {_FLUSH_S:g} s")

    def _begin(self) -> None:
        """Begin the span of the run."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        attributes: dict[str, Any] = {RUN_ID_ATTRIBUTE: self._run_id}
        if not (
            os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        ):
            attributes["service.name"] = "holdfast"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter or self._open_exporter()))
        self._tracer = self._provider.get_tracer("holdfast")
        self._run = self._tracer.start_span("run", start_time=self._at(0.0))

    def _open_exporter(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        if not self._endpoint:
            return OTLPSpanExporter()
        path = "" if self._endpoint.rstrip("/").endswith(_PATH) else _PATH
        return OTLPSpanExporter(endpoint=self._endpoint.rstrip("/") + path)

    def _export(self, recoveries: Sequence[RecoverySpan]) -> None:
        from opentelemetry.trace import set_span_in_context

        within = set_span_in_context(self._run)
        for each in recoveries:
            span = self._tracer.start_span(
                "recovery",
                within,
                attributes={**each.attributes, "holdfast.redone_s": each.redone_s},
                start_time=self._at(each.begin_s),
            )
            for part in each.parts:
                child = self._tracer.start_span(part.name, set_span_in_context(span), start_time=self._at(part.begin_s))
                child.end(self._at(part.end_s))
            span.end(self._at(each.end_s))

    def _at(self, t_s: float) -> int:
        """Return a moment of the run as Unix time in nanoseconds."""
        return round(1e9 * (self._epoch_s + t_s))
