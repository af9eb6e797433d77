"""Workers die or get stuck before training begins: no start of a job waits for ever."""

import signal
import time

import pytest
import start_strikes
from start_strikes import StartingJob, find

from holdfast.launch.supervise.processes import name_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]


def test_a_worker_that_dies_before_mpi_has_begun_is_done_without_at_once(tmp_path):
    with StartingJob(tmp_path, "ulfm", script=("--note", tmp_path, "--hold", 1)) as job:
        job.until((tmp_path / "runs-1").exists)
        worker = find(job.plan, job.process.pid)
        time.sleep(1.5)  # the others are in MPI_Init
        assert worker.send(signal.SIGKILL)
        records = job.end()

    report = job.check_bits()
    assert report["restarts"] == 1
    (restart,) = [r for r in records if r["event"] == "JobRestarted"]
    assert restart["workers"] == [0, 2]
    assert restart["reason"] == "rank 1 was killed by SIGKILL before all workers were connected"
    assert {(r["rank"], r["exit_code"]) for r in records if r["event"] == "WorkerEnded"} >= {(1, -9), (0, 0), (2, 0)}


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_a_worker_that_is_stopped_before_it_imports_anything_is_ended_and_done_without(tmp_path, fabric):
    with StartingJob(tmp_path, fabric, "--start-timeout", 4, script=("--prepare", 0.5)) as job:
        assert job.until(lambda: find(job.plan, job.process.pid)).send(signal.SIGSTOP)
        records = job.end()

    report = job.check_bits()
    assert report["restarts"] == (1 if fabric == "ulfm" else 0)
    (fenced,) = [r for r in records if r["event"] == "WorkerFenced"]
    assert fenced["rank"] == 1
    assert fenced["silent_s"] >= 4
    assert "is stopped for" in fenced["reason"]
    assert {(r["rank"], r["exit_code"]) for r in records if r["event"] == "WorkerEnded"} >= {(1, -9), (0, 0), (2, 0)}


@pytest.mark.soak
def test_a_script_that_keeps_the_others_waiting_is_named_and_its_worker_ended(tmp_path):
    with StartingJob(tmp_path, "ulfm", "--start-timeout", 12, script=("--hold", 1)) as job:
        records = job.end()

    job.check_bits()
    assert "rank 1 is still importing or preparing in train_slow_start.py" in job.said
    (fenced,) = [r for r in records if r["event"] == "WorkerFenced"]
    assert (fenced["rank"], fenced["silent_s"] >= 12) == (1, True)
    assert "--start-timeout" in fenced["reason"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_mpirun_that_is_stopped_or_killed_before_training_is_started_again(tmp_path, number):
    with StartingJob(tmp_path, "ulfm", "--start-timeout", 4) as job:
        plan = start_strikes.Plan(0, "ulfm", "mpirun", 0, number, 0.0, 0.0, 0)
        mpirun = job.until(lambda: find(plan, job.process.pid))
        job.until(lambda: name_of(mpirun.pid) == "prterun")
        assert mpirun.send(number)
        records = job.end()

    assert job.check_bits()["restarts"] == 1
    (restart,) = [r for r in records if r["event"] == "JobRestarted"]
    assert "mpirun" in restart["reason"]
    assert restart["workers"] == [0, 1, 2], "none of them is to blame"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_a_strike_before_the_first_step_ends_right_or_says_why_not_and_leaves_nothing(seed):
    print(start_strikes.run(start_strikes.Plan.of(seed)))
