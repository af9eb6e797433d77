"""Survivors over Open MPI read the kernel's note that a worker ends, for real: before mpirun can know of it, or without it."""

import functools
import signal
import time
from pathlib import Path

import pytest
import train_paced
from running_job import Running

from holdfast.launch.supervise.processes import Process, children_of, name_of
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path

pytestmark = pytest.mark.chaos

PACED = Path(__file__).parents[1] / "support" / "train_paced.py"

paced_hash = functools.cache(lambda: train_paced.train(2, fabric="virtual"))
WITHOUT_NOTICE = """
import runpy, sys
import holdfast.comm.ulfm
holdfast.comm.ulfm.report_ended = lambda place: False  # MPI is told nothing
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def kill_behind_a_stopped_mpirun(folder, script):
    """Kill worker 1 while mpirun is stopped, and so knows of nothing; return the job, the pairs and mpirun."""
    slow = (word for rank in range(3) for word in ("--nap", rank, "all", 0.02, "quiet"))
    running = Running(folder, "-n", 3, "--fabric", "ulfm", script, *slow)
    pairs = [running.pair_at_step(rank, 2) for rank in range(3)]
    (pid,) = [child for child in children_of(running.job.pid) if name_of(child) in ("mpirun", "prterun")]
    mpirun = Process.of(pid)
    assert mpirun.send(signal.SIGSTOP)
    assert pairs[1].worker.send(signal.SIGKILL)
    return running, pairs, mpirun


def finish(running, pairs, mpirun):
    """Let mpirun continue, and check that the kill has landed and changed no bit."""
    assert mpirun.is_stopped()
    assert mpirun.send(signal.SIGCONT)
    report, ended = running.end()
    assert [ended[pair.worker.pid] for pair in pairs] == [0, -9, 0]
    assert report["replicas"]["state_sha256"] == paced_hash()


def step_of(running, rank):
    (path,) = [beacon_path(run_dir, rank) for run_dir in running.folder.glob("holdfast-*-*")]
    return Beacon.read(path).step


def test_survivors_recover_while_mpirun_cannot_know_of_the_death(tmp_path):
    running, pairs, mpirun = kill_behind_a_stopped_mpirun(tmp_path, PACED)
    reached = step_of(running, 0)

    running.pair_at_step(0, reached + 2)
    running.pair_at_step(2, reached + 2)

    finish(running, pairs, mpirun)


def test_without_the_notice_they_wait_for_mpirun_and_recover_then(tmp_path):
    """The negative control: the same kill, where MPI is told nothing."""
    script = tmp_path / "without_notice.py"
    script.write_text(WITHOUT_NOTICE.format(script=str(PACED)))
    running, pairs, mpirun = kill_behind_a_stopped_mpirun(tmp_path, script)
    time.sleep(0.5)  # more than the steps in progress take
    reached = step_of(running, 0)

    time.sleep(1.0)

    assert step_of(running, 0) == reached
    finish(running, pairs, mpirun)
