"""Metrics of real jobs whose workers are killed: scraped while they run, by a real Prometheus too, and at their end."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import ROOT, assert_landed, run_report

pytest.importorskip("prometheus_client", reason="install the dependency group dev")
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = """
import time
import torch
from torch.utils.data import TensorDataset
import holdfast

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(TensorDataset(torch.ones(120, 2)), 4, epochs=1):
    time.sleep(0.05)
    for (x,) in step:
        step.backward(model(x).sum())
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def read(url):
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - http of this machine
        return answer.read().decode()


@contextmanager
def scraping(port, found):
    """Scrape a job again and again; ``found`` has the texts."""
    ended = threading.Event()

    def scrape():
        while not ended.wait(0.1):
            try:
                found.append(read(f"http://127.0.0.1:{port}/metrics"))
            except OSError:
                continue  # not yet, or no longer

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def numbers(text):
    """The samples of a text by name, by label for those that have one."""
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            label = labels.get("cause") or labels.get("kind") or labels.get("part") or ""
            if "le" not in labels:
                found.setdefault(name, {})[label] = value
    return found


def run(folder, port, *options):
    """A job whose rank 1 is killed, then its last worker, so that it is started again."""
    words = ["-n", 2, "--fabric", "gloo", "--slices", 2, "--no-page", "--metrics-port", port, *options]
    words += ["--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", 3]
    words += ["--inject", "kill:rank=1,step=4", "--inject", "kill:rank=0,step=20", folder / "train.py"]
    (folder / "train.py").write_text(SCRIPT)
    return run_report(folder, *words, timeout=300)


def test_while_a_job_runs_and_at_its_end_the_numbers_are_those_of_the_report(tmp_path):
    path, port, found = tmp_path / "job.prom", free_port(), []
    with scraping(port, found):
        report = run(tmp_path, port, "--metrics-file", path)
    assert_landed(report, 1)
    assert report["restarts"] == 1
    end = numbers(path.read_text())

    assert [sink["dropped"] for sink in report["sinks"]] == [0]
    expected = {
        "holdfast_steps_total": report["steps"],
        "holdfast_samples_total": report["samples"]["committed"],
        "holdfast_steps_redone_total": report["steps_redone"],
        "holdfast_restarts_total": report["restarts"],
        "holdfast_checkpoint_held_seconds_count": report["checkpoints"],
        "holdfast_running": 0,
        "holdfast_workers_alive": 0,
    }
    assert {name: end[name][""] for name in expected} == expected
    assert end["holdfast_run_seconds"][""] == pytest.approx(report["wall_s"], abs=1e-5)
    assert end["holdfast_goodput_ratio"][""] == pytest.approx(report["goodput"]["ratio"], abs=1e-5)
    assert end["holdfast_badput_seconds_total"] == pytest.approx(report["goodput"]["badput_s"], abs=1e-5)
    assert end["holdfast_failures_total"] == Counter(failure["kind"] for failure in report["failures"])
    outages = {each["recovery"]: each["recover_s"] for each in report["failures"]}
    assert end["holdfast_outage_seconds_sum"][""] == pytest.approx(sum(outages.values()), abs=1e-5)
    spent = report["goodput"]["badput_s"]
    assert min(spent["start_up"], spent["restart"], spent["step_redone"]) > 0

    scraped = [numbers(text) for text in found]
    running = [each["holdfast_running"][""] for each in scraped]
    assert running[0] == 1
    assert running == sorted(running, reverse=True), "a last scrape may find that the job has just ended"
    assert any(each["holdfast_workers_alive"][""] == 2 for each in scraped)
    steps = [each["holdfast_steps_total"][""] for each in scraped]
    assert 0 == steps[0] < steps[-1] == max(steps)


@contextmanager
def prometheus(folder, target):
    """A Prometheus that scrapes ``target`` every second, with the alert rules; its address."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus: apt-get install prometheus")
    port, config = free_port(), folder / "prometheus.yml"
    rules = ROOT / "deploy" / "prometheus" / "alerts.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{json.dumps(str(rules))}]\n"
        f"scrape_configs: [{{job_name: training, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    words = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/-/ready", folder / "prometheus.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(url, log):
    deadline = time.monotonic() + 60
    while True:
        try:
            return read(url)
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


def ask(url, query):
    """What Prometheus answers to a query, as a list of labels and value."""
    answer = json.loads(read(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    assert answer["status"] == "success", query
    return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]


def test_a_real_prometheus_scrapes_a_job_and_answers_the_dashboard(tmp_path):
    target = free_port()
    with prometheus(tmp_path, target) as url:
        report = run(tmp_path, target)
        assert report["restarts"] == 1
        ((labels, steps),) = ask(url, "max_over_time(holdfast_steps_total[10m])")
        assert labels == {"instance": f"127.0.0.1:{target}", "job": "training"}
        assert 0 < steps <= report["steps"]
        assert ask(url, 'max_over_time(holdfast_failures_total{kind="kill"}[10m])')[0][1] >= 1
        dashboard = json.loads((ROOT / "deploy" / "grafana" / "holdfast.json").read_text())
        for query in (target["expr"] for panel in dashboard["panels"] for target in panel["targets"]):
            known = query.replace("$job", ".*").replace("$instance", ".*")
            ask(url, re.sub(r"\$__(rate_interval|range)", "5m", known))
        rules = json.loads(read(f"{url}/api/v1/rules"))["data"]["groups"][0]["rules"]
        assert len(rules) == 10
        assert {rule["health"] for rule in rules} == {"ok"}


def test_promtool_accepts_the_alerts_and_the_metrics(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    from holdfast.observe.monitor.exporter import MetricsExporter

    class Stopped:
        def now_s(self):
            return 1.0

    path = Path(tmp_path) / "job.prom"
    MetricsExporter(range(2), Stopped(), path).close(1.0)
    for words, text in (
        (["check", "rules", ROOT / "deploy" / "prometheus" / "alerts.yml"], ""),
        (["check", "metrics"], path.read_text()),
    ):
        done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
