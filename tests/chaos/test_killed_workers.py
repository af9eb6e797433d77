"""Survivors over Gloo learn of a kill from the life lock, for real: here the launcher tells them nothing of its records."""

import json
import signal
import time
from pathlib import Path

import pytest
import train_paced
from running_job import DEADLINE_S, Running

from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path

pytestmark = pytest.mark.chaos

PACED = Path(__file__).parents[1] / "support" / "train_paced.py"
LAUNCHER = """
from holdfast.cli import main
from holdfast.launch.killed_workers import KilledWorkers
from holdfast.launch.nodes import NodeGroup
NodeGroup.died = lambda self, rank, why: None
{more}
main()
"""
WITHOUT_LOCKS = "KilledWorkers.watch = lambda self, rank, worker: None"


def kill(folder, more=""):
    """Kill worker 1 of 3; return the job and its pairs. ``more`` is run in the launcher first."""
    slow = (word for rank in range(3) for word in ("--nap", rank, "all", 0.02, "quiet"))
    launcher = ("-c", LAUNCHER.format(more=more))
    running = Running(folder, "-n", 3, "--fabric", "gloo", PACED, *slow, launcher=launcher)
    pairs = [running.pair_at_step(rank, 2) for rank in range(3)]
    assert pairs[1].worker.send(signal.SIGKILL)
    return running, pairs


def step_of(running, rank):
    (path,) = [beacon_path(run_dir, rank) for run_dir in running.folder.glob("holdfast-*-*")]
    return Beacon.read(path).step


def test_survivors_recover_by_the_life_lock_alone(tmp_path):
    running, pairs = kill(tmp_path)

    _, err = running.job.communicate(timeout=DEADLINE_S)

    assert running.job.returncode == 0, err
    events = [json.loads(line) for line in (tmp_path / "report" / "events.jsonl").read_text().splitlines()]
    ended = {event["pid"]: event["exit_code"] for event in events if event["event"] == "WorkerEnded"}
    assert [ended[pair.worker.pid] for pair in pairs] == [0, -9, 0]
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["replicas"]["state_sha256"] == train_paced.train(2, fabric="virtual")


def test_without_it_they_would_wait(tmp_path):
    """The negative control: the same kill, where the launcher watches no lock."""
    running, pairs = kill(tmp_path, WITHOUT_LOCKS)
    time.sleep(0.5)  # more than the steps in progress take
    reached = step_of(running, 0)

    time.sleep(1.0)

    assert step_of(running, 0) == reached
    running.job.kill()
    for pair in pairs:
        pair.worker.send(signal.SIGKILL)
    running.job.communicate(timeout=DEADLINE_S)
