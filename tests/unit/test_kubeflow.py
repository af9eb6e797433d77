"""Progress in the status of a TrainJob: content, token and rate, at a server that checks them; and where it fails."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import socket
import time
from pathlib import Path

import pytest
from some_records import some
from trainer_server import TrainerServer

from holdfast.observe.monitor.kubeflow import ProgressReporter, progress_reporter
from holdfast.records.queued import QueuedSink
from holdfast.records.types import JobRestarted, Recovered, RunStarted, StepCommitted


def started(steps=10, step=0):
    return some(RunStarted, step=step, workers=4, steps_planned=steps)


def committed(step, t_s, workers=4, **metrics):
    return StepCommitted(t_s=t_s, rank=0, step=step, epoch=0, samples=4, workers=workers, metrics=metrics)


def reporter(server, said, every_s=0.05):
    return queued(server.url, server.ca_cert, server.token, said, every_s)


def queued(url, ca_cert, token, said, every_s=0.02):
    return QueuedSink(ProgressReporter(url, ca_cert, token, every_s=every_s), said.append)


@contextlib.contextmanager
def reporting(server, said, **how):
    made = reporter(server, said, **how)
    try:
        yield made
    finally:
        made.close(9.0)


def values(status):
    return {each["name"]: each["value"] for each in status["metrics"]}


def test_a_report_has_progress_remaining_time_and_metrics(tmp_path):
    said = []
    with TrainerServer(tmp_path) as server, reporting(server, said) as report:
        report.write(started())
        server.await_taken(1)
        for step in range(3):
            report.write(committed(step, t_s=2.0 * step, loss=1 / (step + 1), accuracy=float("nan")))
        for rank in range(3):  # every survivor says so
            report.write(some(Recovered, t_s=4.0, rank=rank, step=2, lost=(3,), generation=2))
        report.write(committed(3, t_s=6.0, workers=3, loss=0.25))
        report.close(9.0)

    first, last = server.taken[0], server.taken[-1]
    assert (first["progressPercentage"], "estimatedRemainingSeconds" in first) == (0, False)
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (40, 12)
    assert values(last) == {"loss": "0.25", "step": "4", "workers": "3", "recoveries": "1"}
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(last["lastUpdatedTime"])
    assert datetime.timedelta() <= age < datetime.timedelta(minutes=1)
    assert said == []
    assert server.refused == 0


def test_a_report_fits_the_published_schema(tmp_path):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="install the dependency group dev")
    with TrainerServer(tmp_path) as server, reporting(server, []) as report:
        report.write(started())
        report.write(committed(0, t_s=0.0, **{f"{number}{'x' * 99}": 1.5 for number in range(300)}))
        report.write(committed(1, t_s=1.0, **{f"{number}{'x' * 99}": 1e300 for number in range(300)}))
        report.close(9.0)

    status = server.taken[-1]
    kept = models.TrainerV1alpha1TrainJobStatus.from_dict({"trainerStatus": status})
    assert kept.trainer_status is not None
    assert status.keys() == set(kept.to_dict()["trainerStatus"])
    assert len(status["metrics"]) == len(values(status)) == 256, "at most as many, and each name once"
    assert all(0 < len(text) <= 64 for each in status["metrics"] for text in each.values())


def test_a_restart_goes_back_to_the_checkpoint_and_a_stream_has_no_percentage(tmp_path):
    with TrainerServer(tmp_path) as server, reporting(server, []) as report:
        report.write(started())
        report.write(committed(7, t_s=7.0))
        report.write(JobRestarted(t_s=8.0, rank=-1, step=8, restart=1, workers=(0, 1), reason="lost"))
        report.write(started(step=5))
        report.close(9.0)
    with TrainerServer(tmp_path) as endless, reporting(endless, []) as report:
        report.write(started(steps=0))
        report.write(committed(7, t_s=7.0))
        report.close(9.0)

    assert (server.taken[-1]["progressPercentage"], values(server.taken[-1])["step"]) == (50, "5")
    assert "progressPercentage" not in endless.taken[-1]
    assert values(endless.taken[-1])["step"] == "8"


def test_steps_faster_than_the_rate_are_left_out(tmp_path):
    with TrainerServer(tmp_path) as server, reporting(server, [], every_s=0.3) as report:
        report.write(started(steps=1000))
        begin_s, step = time.monotonic(), 0
        while time.monotonic() < begin_s + 1.0:
            report.write(committed(step, t_s=time.monotonic(), loss=1.0))
            step += 1
            time.sleep(0.002)
        report.close(9.0)

    pauses = [after - before for before, after in itertools.pairwise(server.times_s[:-1])]
    assert step > 50
    assert 2 <= len(server.taken) <= 6
    assert min(pauses) >= 0.29, "the server's clock starts after the reporter's"
    assert values(server.taken[-1])["step"] == str(step), "the last report is the newest"


def test_a_token_that_is_replaced_is_read_again(tmp_path):
    said = []
    with TrainerServer(tmp_path) as server, reporting(server, said) as report:
        report.write(started())
        server.await_taken(1)
        server.token.write_text("second-token")
        server.tokens = {"second-token"}
        report.write(committed(0, t_s=1.0))
        server.await_taken(2)

    assert server.refused == 0
    assert said == []


def take_token_away(server, env, folder):
    server.token.unlink()


def replace_token(server, env, folder):
    server.token.write_text("stolen-secret")


def break_token(server, env, folder):
    server.token.write_text("stolen-secret\nX: y")


def change_path(server, env, folder):
    env["KUBEFLOW_TRAINER_SERVER_URL"] += "x"


def change_certificate(server, env, folder):
    with TrainerServer(folder / "other") as other:
        env["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(other.ca_cert)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (take_token_away, "No such file"),
        (replace_token, "answers 401 Unauthorized"),
        (break_token, "not one line of text"),
        (change_path, "answers 404"),
        (change_certificate, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_report_that_is_refused_is_one_line_without_the_token(spoil, why, tmp_path):
    said = []
    with TrainerServer(tmp_path) as server:
        env = dict(server.env)
        spoil(server, env, tmp_path)
        url, ca_cert, token = env.values()
        report = queued(url, Path(ca_cert), Path(token), said)
        for step in range(10):
            report.write(committed(step, t_s=1.0 * step))
            time.sleep(0.02)
        report.close(9.0)

    assert server.taken == []
    assert len(said) == 1
    assert re.fullmatch(r"progress is not reported to Kubeflow: .*; training is not affected", said[0])
    assert why in said[0]
    assert "stolen-secret" not in said[0]


def test_a_server_that_is_away_or_silent_holds_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        away = f"https://127.0.0.1:{probe.getsockname()[1]}/status"
    said = []
    with TrainerServer(tmp_path, silent=True) as server:
        for url in (away, server.url):
            report = queued(url, server.ca_cert, server.token, said)
            begin_s = time.monotonic()
            for step in range(100):
                report.write(committed(step, t_s=1.0 * step))
            wrote_s = time.monotonic() - begin_s
            report.close(9.0)
            assert wrote_s < 3, "a report to the silent server takes 5 s"
            assert time.monotonic() - begin_s < 4.9, "the end waits 3 s for the last report"

    assert [why for line in said for why in ("Connection refused", "does not answer") if why in line] == [
        "Connection refused",
        "does not answer",
    ]
    assert len(said) == 2


def test_only_a_whole_environment_with_tls_is_used(tmp_path):
    said = []
    with TrainerServer(tmp_path) as server:
        plain = server.env | {"KUBEFLOW_TRAINER_SERVER_URL": server.url.replace("https", "http")}
        missing = {name: value for name, value in server.env.items() if not name.endswith("TOKEN")}

        assert progress_reporter({}, said.append) is None
        assert progress_reporter(missing, said.append) is None
        assert said == []
        assert progress_reporter(plain, said.append) is None
        assert "KUBEFLOW_TRAINER_SERVER_URL must be https://HOST[:PORT]/PATH, got 'http://" in said[0]
        assert progress_reporter(server.env, said.append) is not None
