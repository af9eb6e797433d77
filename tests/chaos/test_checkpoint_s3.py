"""Runs and writers that are killed while their checkpoints are in S3: what was complete there stays complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from jobs import ROOT, run_report
from s3 import running_server
from warm import WARM

from holdfast.checkpoint import load, load_newest, newest_intact, open_storage, steps, write_tensors

pytestmark = pytest.mark.chaos

EXAMPLE = ROOT / "examples" / "01_survive_a_kill.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("moto")) as server, pytest.MonkeyPatch.context() as patch:
        server.use(patch)
        yield server


@pytest.fixture
def bucket(server):
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    server.make_bucket(name)
    return name


@pytest.mark.timeout(300)
def test_a_job_that_dies_is_resumed_from_s3_and_ends_with_the_bits_of_the_undisturbed_one(server, bucket, tmp_path):
    url = f"s3://{bucket}/runs/a"
    kept = ("-n", 2, "--checkpoint-dir", url, "--checkpoint-every", 40)

    undisturbed = run_report(tmp_path / "undisturbed", "-n", 2, EXAMPLE)
    died = run_report(
        tmp_path / "died",
        *kept,
        *("--max-restarts", 0, "--inject", "kill:rank=0,step=100", "--inject", "kill:rank=1,step=100"),
        EXAMPLE,
        exit_code=1,
        env=server.env,
    )
    there = steps(url)
    resumed = run_report(tmp_path / "resumed", *kept, "--resume", EXAMPLE, env=server.env)

    assert there == [40, 80]
    assert f"--checkpoint-dir {url} " in died["_stderr"]
    assert resumed["replicas"]["sha256"] == undisturbed["replicas"]["sha256"]
    assert resumed["replicas"]["identical"]
    assert [e["step"] for e in resumed["_events"] if e["event"] == "CheckpointSaved"] == [120]
    assert steps(url) == [40, 80, 120]
    assert newest_intact(url) == 120
    assert all(key.startswith("runs/a/step-") for key in server.keys(bucket))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_training_goes_on_when_the_storage_is_lost(tmp_path):
    with running_server(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        server.make_bucket("lost")
        options = ("-n", 2, "--checkpoint-dir", "s3://lost/run", "--checkpoint-every", 20)
        run = pool.submit(run_report, tmp_path, *options, EXAMPLE, env=server.env)
        wait_for(lambda: any(key.endswith("manifest.json") for key in server.keys("lost")), lambda: not run.done())
        server.kill()
        report = run.result(timeout=150)

    assert report["outcome"] == "done"
    assert report["replicas"]["identical"]
    said = [line for line in report["_stdout"].splitlines() if "is not complete: cannot" in line]
    assert said
    assert all(f"{server.url} does not answer; check AWS_ENDPOINT_URL and the network" in line for line in said)


def wait_for(condition, goes_on):
    end_s = time.monotonic() + 90
    while not condition():
        assert goes_on()
        assert time.monotonic() < end_s
        time.sleep(0.02)


WRITER = """
import os, signal, sys, torch
from holdfast.checkpoint import write_tensors
from holdfast.faults import points
points.arm(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == sys.argv[3] else None)
write_tensors(sys.argv[1], 20, {"w": torch.full((int(sys.argv[2]),), 2.0)}, {"value": 2}).commit(0)
"""


# Removes the old step before it writes the new one. It passes the same points.
BROKEN_WRITER = WRITER.replace(
    "write_tensors(sys", "from holdfast.checkpoint.save import remove; remove(sys.argv[1], 20)\nwrite_tensors(sys"
)


def save(url, step, value):
    write_tensors(url, step, {"w": torch.full((1000,), float(value))}, {"value": value}).commit(0)


def start_writer(url, scratch, size=1000, writer=WRITER, dies_at=""):
    environment = os.environ | {"TMPDIR": str(scratch), WARM: ""}
    return subprocess.Popen([sys.executable, "-c", writer, url, str(size), dies_at], env=environment)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def crash_writer_at(point, url, scratch, writer=WRITER):
    """Run a writer over steps 10 and 20, both of the value 1, which must die at ``point``."""
    save(url, 10, 1)
    save(url, 20, 1)
    with start_writer(url, scratch, writer=writer, dies_at=point) as process:
        assert process.wait(60) == -signal.SIGKILL, "the fault never landed"


def loaded_value(url):
    """Return the newest intact step and the value in it; every element must be that value."""
    loaded = load_newest(url, lambda step, error: pytest.fail(f"step {step} is damaged: {error}"))
    assert loaded.state["w"].tolist() == [float(loaded.info["value"])] * 1000
    return loaded.step, loaded.info["value"]


@pytest.mark.parametrize("point", ["checkpoint.manifest", "checkpoint.committed"])
def test_a_writer_killed_while_it_saves_a_step_again_leaves_the_old_or_the_new_one(bucket, scratch, point):
    url = f"s3://{bucket}/run"

    crash_writer_at(point, url, scratch)

    assert loaded_value(url) == (20, 2 if point == "checkpoint.committed" else 1)


def test_negative_control_a_writer_that_removes_the_old_step_first_loses_it(bucket, scratch):
    url = f"s3://{bucket}/run"

    crash_writer_at("checkpoint.manifest", url, scratch, BROKEN_WRITER)

    assert loaded_value(url) == (10, 1)


def test_a_writer_killed_in_the_middle_of_an_upload_leaves_what_was_there(server, bucket, scratch):
    url = f"s3://{bucket}/run"
    save(url, 10, 1)
    before = server.keys(bucket)

    with start_writer(url, scratch, size=20_000_000) as writer:
        wait_for(lambda: server.uploads(bucket), lambda: writer.poll() is None)
        writer.kill()
    sizes = [file.stat().st_size for file in scratch.glob("*/files/*")]
    found = steps(url), newest_intact(url), server.keys(bucket)
    save(url, 20, 3)

    assert writer.returncode == -signal.SIGKILL
    assert [size > 80_000_000 for size in sizes] == [True]
    assert found == ([10], 10, before)
    assert load(url, 20).info["value"] == 3
    assert list(scratch.iterdir()) == []  # the next writer on this machine has removed what the dead one left
    assert open_storage(url).names("") == ["step-00000010", "step-00000020"]
