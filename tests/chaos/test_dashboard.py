"""The dashboard of real jobs: its numbers, its actions, its token, and a launcher that dies and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from jobs import assert_landed, clean_env, read_report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = """
import time
import torch
from torch.utils.data import TensorDataset
import holdfast

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(TensorDataset(torch.ones(12_000, 2)), 4, epochs=1):
    time.sleep(0.02)
    for (x,) in step:
        loss = model(x).sum()
        step.backward(loss)
        step.log(**{"<b>loss</b>": loss})
print("the end")
"""
WAIT_S = 120


class Job:
    """A job with a dashboard, and one reader of its stream."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        (folder / "train.py").write_text(SCRIPT)
        (folder / "tmp").mkdir(exist_ok=True)
        self.folder, self.out = folder, folder / "out"
        words = ["-n", "3", "--fabric", "gloo", "--no-page", "--report", str(self.out), "--dashboard", str(port)]
        words += ["--checkpoint-dir", str(folder / "ck"), *(["--resume"] if port else []), str(folder / "train.py")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "run", *words],
            env=clean_env(TMPDIR=str(folder / "tmp")),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.told: list[tuple[float, dict]] = []
        found = next(
            (found for line in self.process.stderr if (found := re.search(r"(http://\S+/)\?token=(\S+)", line))), None
        )
        assert found is not None, "the launcher printed no URL"
        self.url, self.token = found.groups()
        self.port = int(self.url.rpartition(":")[2].strip("/"))
        (self.about,) = self.ask("api/runs")
        for target in (self._read_stream, self._read_stderr):
            threading.Thread(target=target, daemon=True).start()

    def _read_stderr(self):
        with self.process.stderr as lines:
            self.lines += lines

    def _read_stream(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.run}/stream", timeout=WAIT_S) as stream:  # noqa: S310
            for line in stream:
                if line.startswith(b"data: "):
                    self.told.append((time.monotonic(), json.loads(line[6:])))

    @property
    def run(self) -> str:
        return f"{self.url}api/runs/{self.about['id']}"

    def ask(self, path):
        with urllib.request.urlopen(self.url + path, timeout=WAIT_S) as answer:  # noqa: S310 - http of this machine
            return json.load(answer)

    def act(self, token=None, **body):
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.run}/actions", json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310
            return json.load(answer)["said"]

    def refusal(self, **body):
        with pytest.raises(urllib.error.HTTPError) as error:
            self.act(**body)
        return json.load(error.value)["error"]

    def wait(self, what, since=0):
        """Wait until a change after ``since`` fulfils a condition; return when it arrived, and the change."""
        ends_s = time.monotonic() + WAIT_S
        while time.monotonic() < ends_s:
            for at_s, told in self.told[since:]:
                if what(told):
                    return at_s, told
            assert self.process.poll() is None or since < len(self.told), "".join(self.lines)
            time.sleep(0.01)
        raise AssertionError(f"nothing within {WAIT_S} s; last: {self.told[-1:]}")

    def end(self):
        self.process.wait(WAIT_S)
        time.sleep(0.2)
        return read_report(self.out)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(*args):
        jobs.append(Job(tmp_path, *args))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait(WAIT_S)


def files_with(folder, text):
    """The files below a folder that contain a text."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path.name)
    return found


def processes_with(text):
    """The processes whose command line or environment contains a text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if process.name != str(os.getpid()) and text.encode() in (process / name).read_bytes():
                    found.append(f"{process.name} {name}")
    return found


def test_actions_land_and_the_numbers_at_the_end_are_those_of_the_report(start):
    job = start()
    job.wait(lambda told: told["progress"]["step"] >= 10)
    since = len(job.told)
    killed_s = time.monotonic()
    assert job.act(action="kill", rank=1) == "worker 1 is killed"
    shown_s, told = job.wait(lambda told: told.get("recoveries"), since)
    assert shown_s - killed_s < 1.0 + 2 * sum(told["recoveries"][0]["parts"].values()), "a busy machine recovers slowly"
    assert [lost["rank"] for lost in told["recoveries"][0]["lost"]] == [1]

    assert job.act(action="save").startswith("requested")
    job.wait(lambda told: told.get("checkpoints"), since)
    assert job.act(action="set", lr=0.05) == "requested: lr=0.05"
    assert job.refusal(action="kill", rank=1) == "no worker 1 is alive"
    assert job.refusal(action="scale", workers=0).startswith("WORKERS must be")
    assert "token" in job.refusal(action="stop", token="wrong")  # noqa: S106
    assert job.ask(f"api/runs/{job.about['id']}/log?rank=0")["lines"] == []
    assert [files_with(job.folder, job.token), processes_with(job.token)] == [[".dashboard-token"], []]

    job.wait(lambda told: any(row["kind"] == "change" and "lr" in row["text"] for row in told.get("events", ())), since)
    assert job.act(action="stop").startswith("the job stops")
    report = job.end()
    assert job.process.returncode == 4
    assert_landed(report, 1)
    assert [each["action"] for each in report["actions"]] == ["kill", "save", "set", "stop"]
    assert report["checkpoints"] == 2, "one on request, one at the stop"
    assert [change["name"] for change in report["changed"]] == ["save", "lr"]
    last = job.told[-1][1]
    assert last["run"]["exit_code"] == 4
    assert {name: last["goodput"][name] for name in report["goodput"]} == report["goodput"]
    assert last["progress"]["step"] == report["steps"]
    assert last["progress"]["steps_redone"] == report["steps_redone"]
    assert last["state"]["sentence"].startswith("Stopped on request")
    assert files_with(job.folder, job.token) == []
    assert not [line for line in job.lines if job.token in line], "it is printed once"


def test_a_launcher_that_dies_and_comes_back_has_the_same_address_and_token(start):
    first = start()
    first.wait(lambda told: told["progress"]["step"] >= 3)
    first.act(action="save")
    first.wait(lambda told: told.get("checkpoints"))
    first.process.send_signal(signal.SIGKILL)
    assert first.process.wait(WAIT_S) == -signal.SIGKILL

    again = start(first.port)
    assert (again.url, again.token) == (first.url, first.token)
    again.wait(lambda told: told["progress"]["step"] >= 10)
    again.act(action="stop")
    assert again.end()["outcome"] == "stopped"
