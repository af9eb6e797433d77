"""A job in a real terminal: it says what it waits for, loses a worker in its first second, and is shown by other commands."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from jobs import assert_landed, holdfast, read_report
from terminals import Terminal

pytestmark = pytest.mark.chaos

SCRIPT = """
import time, torch, holdfast
from torch.utils.data import TensorDataset
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in session.steps(data, batch_size=4, epochs=1000):
    for x, y in step:
        time.sleep(0.05)
        step.backward(((model(x) - y) ** 2).mean())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def first_pid(folder, rank, seconds=90):
    """The PID of a worker, as soon as it has one."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for path in folder.glob(f"holdfast-*/process-{rank}"):
            if words := path.read_text().split():
                return int(words[0])
        time.sleep(0.005)
    raise AssertionError(f"rank {rank} did not start within {seconds} s")


def test_a_worker_dies_in_its_first_second_and_every_command_shows_the_job(tmp_path, script):
    out, env = tmp_path / "out", {"TMPDIR": str(tmp_path)}
    words = ("run", "-n", 3, "--fabric", "gloo", "--checkpoint-dir", tmp_path / "saved", "--report", out, script)
    with Terminal(*words, columns=60, cwd=tmp_path, env=env) as run:
        assert run.wait_for("waiting for 3 of 3 workers: ")
        os.kill(first_pid(tmp_path, 1), signal.SIGKILL)
        assert run.wait_for(" steps/s  about ")
        shown = holdfast("status", "--json", env=env)
        with Terminal("top", "--every", 0.2, env=env, columns=40) as top:
            assert top.wait_for("training")
            top.press(b"x")  # no key of ours
            top.press(b"q")
            assert top.end() == 0
            assert top.is_as_before()
            assert top.widest() <= 40
        once = holdfast("top", env=env)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 4
        assert run.is_as_before()

    for part in ("rank 1 died: killed by SIGKILL", "workers 2 of 3", "/16000", "loss "):
        assert part in run.text
    state = json.loads(shown.stdout)
    assert (state["run"]["script"], state["run"]["live"], state["progress"]["planned"]) == ("train.py", True, 16000)
    assert [row["state"] for row in state["workers"]] == ["training", "lost", "training"]
    assert once.returncode == 0
    assert "killed by SIGKILL" in once.stdout
    assert_landed(read_report(out), 1)
    ended = holdfast("status", out)
    assert ended.returncode == 4
    assert "Stopped on request after " in ended.stdout


def test_a_node_that_never_comes_is_named_and_the_launcher_is_shown_meanwhile(tmp_path, script):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = ("--nnodes", 2, "--node-rank", 0, "--rdzv", f"holdfast://127.0.0.1:{port}")
    words = ("run", "-n", 1, "--fabric", "gloo", *nodes)
    env = {"TMPDIR": str(tmp_path)}
    with Terminal(*words, "--rdzv-timeout", 120, script, cwd=tmp_path, env=env, columns=30) as run:
        assert run.wait_for("waiting for node 1:")
        shown = holdfast("status", env=env)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert run.is_as_before()

    assert shown.returncode == 0
    assert "waiting for node 1: rendezvous, 1 of 2 nodes" in shown.stdout
    assert run.text.rstrip().endswith("holdfast: interrupted before the job began")
    assert not list(Path(tmp_path).glob("holdfast-*"))
