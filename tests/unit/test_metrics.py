"""The metrics of a run: while it runs, at its end, by HTTP and in a file; and queries that name them."""

import json
import random
import re
import urllib.request
from pathlib import Path

import pytest
from usual_records import finished, recovered, started
from view_runs import steps

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.job import Job
from holdfast.observe.address import host_and_port
from holdfast.observe.displays import MetricsDisplay
from holdfast.observe.monitor.metrics import BUCKETS_S, METRICS, Observations, RunMetrics
from holdfast.observe.monitor.thinning import Thinning
from holdfast.records.queued import NotTaken
from holdfast.records.run_model import RunModel, model_of
from holdfast.records.types import (
    CheckpointSaved,
    CorruptionFound,
    FailureSeen,
    FaultFired,
    JobRestarted,
    Left,
    Recovered,
    SamplesLost,
    WorkerEnded,
)
from holdfast.summary.build import build_report

ROOT = Path(__file__).parents[2]
WALL_S = 40.0


def begun(t_s, ranks, step=0):
    return [started(rank, t_s=t_s, step=step, strategy="restart", steps_planned=100) for rank in ranks]


def recovery(t_s, step, back_to, redone, generation, lost, survivors, decision="load"):
    dead = [FaultFired(t_s=t_s, rank=rank, step=step, fault=rank, kind="kill", phase="forward") for rank in lost]
    seen = [FailureSeen(t_s=t_s + 0.15, rank=rank, step=step, phase="allreduce") for rank in survivors]
    how = {"lost": lost, "survivors": survivors, "decision": decision, "redone_steps": redone, "generation": generation}
    how |= {"step": back_to, "times_s": {"Agree": 0.1, "LoadCheckpoint": 0.05}}
    said = [recovered(rank, t_s=t_s + 0.3 + rank / 100, **how) for rank in survivors]
    ends = [WorkerEnded(t_s=t_s + 0.1, rank=rank, step=step, exit_code=-9, pid=7) for rank in lost]
    return [*dead, *seen, *said, *ends]


def run():
    """A run of 100 steps with a rollback, a newcomer, a leaver and a restart of the job."""
    saved = [CheckpointSaved(t_s=4.05, rank=0, step=20, path="", size_bytes=500, seconds=0.02)]
    first = [*begun(2.0, range(3)), *steps(0, 29, 2.0), *saved, *recovery(5.05, 30, 20, 11, 1, (2,), (0, 1))]
    back = steps(20, 49, 5.4)
    grown = {"step": 50, "survivors": (0, 1, 3), "decision": "grow", "generation": 2, "joined": (3,), "held_s": 0.04}
    joins = [recovered(rank, t_s=8.45 + rank / 100, **grown) for rank in (0, 1, 3)]
    joins += [*begun(8.49, [3], step=50), Left(t_s=9.0, rank=3, step=55)]
    joins += [WorkerEnded(t_s=9.1, rank=3, step=55, exit_code=0, pid=7)]
    more = [*steps(50, 69, 8.5), SamplesLost(t_s=9.1, rank=0, step=55, epoch=0, ids=(5, 6), buckets=(0,))]
    found = CorruptionFound(t_s=9.2, rank=0, step=56, what="range", where=(), ranks=(), policy="warn")
    ends = [WorkerEnded(t_s=10.55, rank=rank, step=70, exit_code=-9, pid=7) for rank in (0, 1)]
    ends += [FaultFired(t_s=10.52, rank=r, step=70, fault=r, kind="kill", phase="forward") for r in (0, 1)]
    again = JobRestarted(t_s=10.8, rank=-1, step=69, restart=1, workers=(0, 1), reason="all are lost")
    last = [*begun(14.0, (0, 1), step=20), *steps(20, 99, 14.0)]
    done = [finished(rank, t_s=22.2, step=100) for rank in (0, 1)]
    done += [WorkerEnded(t_s=22.5, rank=rank, step=100, exit_code=0, pid=7) for rank in (0, 1)]
    return [*first, *back, *joins, *more, found, *ends, again, *last, *done]


def as_read(seed):
    """The records in an order in which a launcher may read them: each at most 0.4 s late."""
    shaken = random.Random(seed)
    return sorted(run(), key=lambda record: record.t_s + shaken.uniform(0, 0.4))


@pytest.mark.parametrize("seed", range(5))
def test_what_metrics_say_at_the_end(seed):
    metrics = RunMetrics(range(3), epoch_s=1e9)
    for record in as_read(seed):
        metrics.take(record)
        metrics.values(record.t_s)
    metrics.close(WALL_S)
    values = metrics.values(99.0)

    assert values.keys() == {metric.name for metric in METRICS}
    counts = ("steps", "samples_lost", "steps_redone", "restarts", "joins", "leaves")
    assert [values[f"holdfast_{name}_total"] for name in counts] == [100, 2, 62, 1, 1, 1]
    assert (values["holdfast_failures_total"], values["holdfast_corruptions_total"]) == ({"kill": 3}, {"range": 1})
    assert (len(values["holdfast_checkpoint_held_seconds"]), values["holdfast_checkpoint_step"]) == (1, 20)
    now = ("workers_alive", "workers_wanted", "running", "run_seconds")
    assert [values[f"holdfast_{name}"] for name in now] == [0, 3, 0, WALL_S]
    badput_s = values["holdfast_badput_seconds_total"]
    assert values["holdfast_useful_seconds"] + sum(badput_s.values()) == pytest.approx(WALL_S)
    for part, seconds in values["holdfast_recovery_seconds"].items():
        assert seconds.sum == pytest.approx(badput_s[part], abs=1e-5)


def test_a_model_that_keeps_few_records_tells_the_same_story():
    whole, thin = model_of(run(), range(3)), RunModel(range(3), Thinning())
    for record in sorted(run(), key=lambda record: record.t_s):
        thin.apply(record)

    assert len(whole.failures) == 3
    for name in ("failures", "joined", "redone_steps", "alive"):
        assert getattr(thin, name) == getattr(whole, name)
    assert len(thin.commits) < len(whole.commits) / 4


def test_while_the_run_lasts_no_counter_decreases_and_workers_come_and_go():
    metrics, before, alive = RunMetrics(range(3), epoch_s=1e9), {}, []
    for record in as_read(7):
        metrics.take(record)
        values = metrics.values(record.t_s)
        alive.append(values["holdfast_workers_alive"])
        for metric in METRICS:
            if metric.kind == "counter":
                now = values[metric.name] if metric.label else {"": values[metric.name]}
                assert all(now[label] >= number for label, number in before.get(metric.name, {}).items()), metric.name
                before[metric.name] = dict(now)

    assert {0, 2, 3} <= set(alive) <= {0, 1, 2, 3}
    assert before["holdfast_steps_total"][""] > 90


def test_of_many_steps_few_records_are_kept():
    metrics = RunMetrics(range(1), epoch_s=0.0)
    saved = [
        CheckpointSaved(t_s=float(t_s), rank=0, step=10 * t_s, path="", size_bytes=1, seconds=0.5)
        for t_s in range(1000)
    ]
    for record in [*begun(0.0, [0]), *steps(0, 9_999, 0.0), *saved]:
        metrics.take(record)
    metrics.close(2_000.0)

    values = metrics.values(0.0)
    assert values["holdfast_steps_total"] == 10_000
    held_s = values["holdfast_checkpoint_held_seconds"]
    assert (len(held_s), held_s.sum) == (1000, pytest.approx(500.0))
    assert len(metrics._model.commits) < 10


def test_observations_are_counted_by_bucket():
    observed = Observations([0.0005, 0.001, 0.0011, 1000.0, 2000.0])

    assert (len(observed), observed.sum) == (5, pytest.approx(3000.0026))
    assert observed.buckets() == [
        ("0.001", 2), *((str(bound), 3) for bound in BUCKETS_S[1:-1]), ("1000.0", 4), ("+Inf", 5)
    ]  # fmt: skip


def test_of_what_many_survivors_say_few_records_are_kept():
    ranks = tuple(range(1, 500))
    death = recovery(0.6, 5, 5, 1, 1, (0,), ranks, "redo")
    records = [*begun(0.0, range(500)), *steps(0, 4, 0.0), *death, *steps(5, 9, 6.0)]
    metrics = RunMetrics(range(500), epoch_s=0.0)
    for record in records:
        metrics.take(record)
    metrics.close(10.0)
    report = build_report(records, started=range(500), wall_s=10.0, seed=0)
    values = metrics.values(0.0)

    model = metrics._model
    assert len(model.commits) + len(model.of(FailureSeen)) + len(model.of(Recovered)) < 30
    assert values["holdfast_failures_total"] == {"kill": 1}
    observed = values["holdfast_outage_seconds"]
    assert (len(observed), observed.sum) == (1, pytest.approx(report["failures"][0]["recover_s"]))
    assert values["holdfast_steps_redone_total"] == report["steps_redone"] == 1
    assert values["holdfast_badput_seconds_total"] == pytest.approx(report["goodput"]["badput_s"], abs=1e-5)


class Stopped:
    """A clock 100 s after the begin of the run."""

    def now_s(self):
        return 100.0


def exporter(**how):
    pytest.importorskip("prometheus_client", reason="install the dependency group dev")
    from holdfast.observe.monitor.exporter import MetricsExporter

    return MetricsExporter(range(3), Stopped(), **how)


def scraped(url):
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - http of this machine
        return answer.read().decode()


def test_prometheus_and_node_exporter_read_the_same(tmp_path):
    path = tmp_path / "job.prom"
    sink = exporter(path=path)
    url = sink.serve("127.0.0.1", 0)
    sink.take(run())
    assert "holdfast_running 1.0" in path.read_text()
    text = scraped(url)
    sink.close(WALL_S)

    assert "# TYPE holdfast_steps_total counter" in text
    final = path.read_text()
    for line in (
        "holdfast_running 0.0",
        "holdfast_steps_total 100.0",
        'holdfast_failures_total{kind="kill"} 3.0',
        'holdfast_recovery_seconds_count{part="restart"} 1.0',
        'holdfast_outage_seconds_bucket{le="+Inf"} 2.0',
        'holdfast_training_metric{name="loss"} 0.01',
    ):
        assert line in final.splitlines(), final
    assert [file.name for file in tmp_path.iterdir()] == ["job.prom"], "the draft has replaced the file"
    with pytest.raises(OSError, match="refused"):
        scraped(url)


def test_a_port_in_use_and_a_file_that_cannot_be_written_are_said(tmp_path):
    sink = exporter(path=tmp_path / "none" / "job.prom")
    url = sink.serve("127.0.0.1", 0)
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=rf"--metrics-port 127.0.0.1:{port} cannot be opened: .*; choose another one"):
        exporter().serve("127.0.0.1", port)
    with pytest.raises(NotTaken, match=r"job\.prom cannot be written: No such file or directory"):
        sink.take([])
    with pytest.raises(NotTaken):
        sink.close(1.0)


def test_a_port_alone_is_of_this_machine():
    given = ("9400", "10.0.0.5:0", "[::1]:80", "node7:9")
    addresses = [("127.0.0.1", 9400), ("10.0.0.5", 0), ("::1", 80), ("node7", 9)]

    assert [host_and_port(one, "--metrics-port") for one in given] == addresses


@pytest.mark.parametrize("given", ["", "x", ":9", "9400:", "host:65536", "-1", "1.5", "host:x", "²"])
def test_other_addresses_are_refused(given):
    with pytest.raises(ConfigError, match=r"--metrics-port must be \[HOST:\]PORT with a port from 0 to 65535, got '"):
        host_and_port(given, "--metrics-port")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics_file": Path("m.txt")}, "--metrics-file must be a file whose name ends in .prom, .* got m.txt"),
        ({"metrics_file": Path("/dev/null/m.prom")}, "--metrics-file: the folder /dev/null cannot be written: "),
        ({"metrics_port": "x"}, "--metrics-port must be "),
    ],
)
def test_options_are_checked_before_anything_starts(options, message):
    pytest.importorskip("prometheus_client", reason="install the dependency group dev")
    with pytest.raises(ConfigError, match=message):
        MetricsDisplay().check(Job(script=Path("s.py"), settings=Settings(), **options))


def test_without_prometheus_client_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--metrics-port needs prometheus-client: pip install 'holdfast\[monitor\]'"):
        MetricsDisplay().check(Job(script=Path("s.py"), settings=Settings(), metrics_port="9400"))


def series():
    """The names that Prometheus has for the metrics."""
    names = {metric.name for metric in METRICS if metric.kind != "histogram"}
    return names | {f"{m.name}_{of}" for m in METRICS if m.kind == "histogram" for of in ("bucket", "sum", "count")}


def queries():
    """The queries of the dashboard and of the alerts, with the labels that they use."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "holdfast.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (each["query"]["query"] for each in dashboard["templating"]["list"] if isinstance(each["query"], dict))
    yield from re.findall(r"^ +expr: (.+)$", (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(), flags=re.M)


def test_queries_name_metrics_and_labels_that_exist():
    found = list(queries())
    labels = {metric.label for metric in METRICS} | {"job", "instance", "le"}

    assert len(found) > 30
    assert {name for query in found for name in re.findall(r"holdfast_\w+", query)} <= series()
    assert {
        label for query in found for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")
    } <= labels
    assert "holdfast_recovery_seconds" not in series(), "a histogram has no series of its own name"


def test_all_metrics_but_these_are_in_the_dashboard_or_in_an_alert():
    used = " ".join(queries())

    assert {metric.name for metric in METRICS if metric.name not in used} == {
        "holdfast_useful_seconds",
        "holdfast_steps_redone_total",
        "holdfast_leaves_total",
        "holdfast_checkpoint_step",
    }


def test_names_follow_the_conventions():
    for metric in METRICS:
        assert re.fullmatch(r"holdfast_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
