"""Survivors over Gloo learn of a kill from the life lock, for real: here the launcher tells them nothing of its records."""

import signal
import time
from pathlib import Path

import pytest
import reference
import train_paced
from running_job import DEADLINE_S, Running

from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path

pytestmark = pytest.mark.chaos

PACED = Path(__file__).parents[1] / "support" / "train_paced.py"
LAUNCHER = """
from holdfast.cli import main
from holdfast.launch.health.deaths import KilledWorkers
from holdfast.launch.health.deaths import DeathRegister
DeathRegister.note_end = lambda self, rank, cause="": None
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

    report, ended = running.end()

    assert [ended[pair.worker.pid] for pair in pairs] == [0, -9, 0]
    assert report["replicas"]["state_sha256"] == train_paced.train(2, fabric="virtual")


def test_without_it_they_would_wait(tmp_path):
    """The negative control: the same kill, where the launcher watches no lock."""
    running, pairs = kill(tmp_path, WITHOUT_LOCKS)
    try:
        wait_until_step_stays(running, 0)
        assert running.job.poll() is None
        assert step_of(running, 0) < reference.STEPS - 1
    finally:
        running.job.kill()
        for pair in pairs:
            pair.worker.send(signal.SIGKILL)
        running.job.communicate(timeout=DEADLINE_S)


def wait_until_step_stays(running, rank):
    """Wait until the step of a worker is the same in 50 looks in a row, over more time than many steps take."""
    ends_s, steps = time.monotonic() + DEADLINE_S, []
    while steps[-50:] != [step_of(running, rank)] * 50:
        assert time.monotonic() < ends_s, f"it goes on, to step {steps[-1]}"
        time.sleep(0.02)
        steps.append(step_of(running, rank))
