"""Spans of jobs with failures, as a collector in this process receives them."""

import gzip
import http.server
import threading
from contextlib import contextmanager

import pytest
from jobs import run_report

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="make loggers")
import itertools

from logged import LOGGED, LOGGED_JOB
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from holdfast.summary.goodput import RECOVERY_PARTS


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.found.append((self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def collector():
    """A collector; what it is sent, and its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.found = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.found, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def value_of(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(value_of(each) for each in value.array_value.values)
    return getattr(value, kind)


def attributes_of(thing):
    return {each.key: value_of(each.value) for each in thing.attributes}


def spans_of(found):
    return [
        span
        for _, _, request in found
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def children(spans, parent):
    return sorted((s for s in spans if s.parent_span_id == parent.span_id), key=lambda s: s.start_time_unix_nano)


def run(folder, target, env):
    """A job whose lead is killed, and then all workers, so that it is started again."""
    faults = ["--inject", "kill:rank=0,step=3", "--inject", "kill:rank=1,step=8"]
    places = ["--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", 2, "--log-to", target]
    return run_report(folder, "-n", 2, *LOGGED_JOB, *faults, *places, LOGGED, "--step-s", 0.05, env=env)


@pytest.mark.chaos
@pytest.mark.parametrize("way", ["target", "variables"])
def test_each_recovery_is_a_span_with_its_parts_as_children(tmp_path, way):
    with collector() as (found, url):
        if way == "target":
            report = run(tmp_path, f"otel:{url}", {"HOLDFAST_RUN_ID": "run-7"})
        else:
            variables = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
                "OTEL_SERVICE_NAME": "trainer",
            }
            report = run(tmp_path, "otel", variables)

    (path, headers, request), *_ = found
    resource = attributes_of(request.resource_spans[0].resource)
    assert path == "/v1/traces"
    if way == "target":
        assert (resource["holdfast.run.id"], resource["service.name"]) == ("run-7", "holdfast")
    else:
        kept = (tmp_path / "checkpoints" / ".holdfast-run-id").read_text().strip()
        assert (resource["holdfast.run.id"], resource["service.name"]) == (kept, "trainer")
        assert headers["authorization"] == "secret"

    spans = spans_of(found)
    (whole,) = [span for span in spans if span.name == "run"]
    first, second = children(spans, whole)
    assert {span.trace_id for span in spans} == {whole.trace_id}
    assert [span.name for span in (first, second)] == ["recovery", "recovery"]
    assert attributes_of(whole)["holdfast.outcome"] == "done"
    assert (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9 == pytest.approx(report["wall_s"], abs=1e-3)

    said = attributes_of(first)
    assert (said["holdfast.step"], said["holdfast.lost"], said["holdfast.decision"]) == (3, (0,), "redo")
    assert attributes_of(second)["holdfast.decision"] == "restart"
    for recovery in (first, second):
        parts = children(spans, recovery)
        assert parts
        assert {part.name for part in parts} <= set(RECOVERY_PARTS)
        assert parts[0].start_time_unix_nano == recovery.start_time_unix_nano
        assert parts[-1].end_time_unix_nano == recovery.end_time_unix_nano
        for one, following in itertools.pairwise(parts):
            assert one.end_time_unix_nano == following.start_time_unix_nano
    assert "restart" in {part.name for part in children(spans, second)}
    lasted_s = sum((s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for s in (first, second))
    parts_s = sum(report["goodput"]["badput_s"][name] for name in RECOVERY_PARTS if name != "step_redone")
    assert lasted_s == pytest.approx(parts_s, abs=1e-3)


@pytest.mark.chaos
def test_a_collector_that_is_not_there_changes_nothing(tmp_path):
    report = run(tmp_path, "otel:http://127.0.0.1:9", {})

    assert report["outcome"] == "done"
    assert report["restarts"] == 1
