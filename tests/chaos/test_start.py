"""Workers die or get stuck before training begins: no start of a job waits for ever."""

import json
import signal
import subprocess
import sys
import time

import pytest
import reference
import start_strikes
from jobs import clean_env
from start_strikes import SCRIPT, files_in, find, processes_in

from holdfast.launch.processes import name_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

DEADLINE_S = 120.0


class Job:
    """A job of three workers that is being started."""

    def __init__(self, folder, fabric, *options, script=()):
        self.folder = folder
        self.report = folder / "report"
        self.temporary = folder / "t"
        self.temporary.mkdir()
        words = ("run", "-n", 3, "--fabric", fabric, "--no-page", "--report", self.report, *options, SCRIPT, *script)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *map(str, words)],
            env=clean_env(TMPDIR=str(self.temporary)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self.plan = start_strikes.Plan(0, fabric, "worker", 1, signal.SIGKILL, 0.0, 0.0, 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def until(self, is_so):
        ends_s = time.monotonic() + DEADLINE_S
        while not (found := is_so()):
            assert time.monotonic() < ends_s
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.005)
        return found

    def end(self):
        """Its records, once it has ended and nothing of it is left."""
        self.said, _ = self.process.communicate(timeout=DEADLINE_S)
        assert processes_in(self.temporary) == []
        assert files_in(self.temporary) == []
        return [json.loads(line) for line in (self.report / "events.jsonl").read_text().splitlines()]

    def check_bits(self):
        report = json.loads((self.report / "report.json").read_text())
        assert self.process.returncode == 0
        assert report["replicas"]["state_sha256"] == reference.train("mlp", "sgd")
        return report


def test_a_worker_that_dies_before_mpi_has_begun_is_done_without_at_once(tmp_path):
    with Job(tmp_path, "ulfm", script=("--note", tmp_path, "--hold", 1)) as job:
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
    with Job(tmp_path, fabric, "--start-timeout", 4, script=("--prepare", 0.5)) as job:
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
    with Job(tmp_path, "ulfm", "--start-timeout", 12, script=("--hold", 1)) as job:
        records = job.end()

    job.check_bits()
    assert "rank 1 is still importing or preparing in train_slow_start.py" in job.said
    (fenced,) = [r for r in records if r["event"] == "WorkerFenced"]
    assert (fenced["rank"], fenced["silent_s"] >= 12) == (1, True)
    assert "--start-timeout" in fenced["reason"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_mpirun_that_is_stopped_or_killed_before_training_is_started_again(tmp_path, number):
    with Job(tmp_path, "ulfm", "--start-timeout", 4) as job:
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
