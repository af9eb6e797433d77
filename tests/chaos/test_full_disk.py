"""The temporary directory or the report's folder is full: training continues, and how it ended is still told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reference
from jobs import clean_env, exit_codes, read_report
from small_disk import fill, small_disk

from holdfast.launch.supervise.processes import WatchedWorker, pair_path
from holdfast.records.beacon import Beacon

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_reference.py"
DEADLINE_S = 100.0


def start(tmp_path, fabric, *options, pause=0.2, **env):
    words = ("run", "-n", 3, "--fabric", fabric, *options, "--no-page", SCRIPT, "mlp", "sgd", "--pause", pause)
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, words)],
        env=clean_env(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )


def until_step(disk, rank, step, job):
    """Wait until a worker is in this step; return the run's folder."""
    ends_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_s and job.poll() is None:
        for path in disk.glob(f"holdfast-*/beacon-{rank}"):
            position = Beacon.read(path)
            if position is not None and position.step >= step:
                return path.parent
        time.sleep(0.02)
    pytest.fail(f"step {step} was not reached; exit {job.poll()}: {job.communicate(timeout=20)[0]}")


@pytest.mark.parametrize(("fabric", "for_good"), [("ulfm", True), ("gloo", False)])
def test_a_worker_dies_while_the_temporary_directory_is_full(tmp_path, fabric, for_good):
    report = tmp_path / "report"
    with small_disk(tmp_path / "t") as disk:
        job = start(tmp_path, fabric, "--report", report, TMPDIR=str(disk))
        try:
            run_dir = until_step(disk, 0, 2, job)
            filler = fill(disk)
            until_step(disk, 0, 4, job)
            pair = WatchedWorker.read(pair_path(run_dir, 1))
            assert pair.worker.send(signal.SIGKILL)
            until_step(disk, 0, 7, job)
            if not for_good:
                filler.unlink()
            said, _ = job.communicate(timeout=DEADLINE_S)
        finally:
            job.kill()
            job.wait()

    assert job.returncode == 0, said
    told = read_report(report)
    assert exit_codes(told) == {0: 0, 1: -9, 2: 0}
    assert told["replicas"]["state_sha256"] == reference.train("mlp", "sgd")
    assert told["restarts"] == 0


def test_a_report_that_cannot_be_written_is_said_and_the_summary_is_on_the_terminal(tmp_path):
    with small_disk(tmp_path / "report", size="256k") as disk:
        job = start(tmp_path, "gloo", "--report", disk, TMPDIR=str(tmp_path), pause=0.05)
        try:
            until_step(tmp_path, 0, 2, job)
            fill(disk)
            said, _ = job.communicate(timeout=DEADLINE_S)
        finally:
            job.kill()
            job.wait()

    assert job.returncode == 1, said
    assert "error: the report is incomplete: cannot write " in said
    assert "No space left on device" in said
    assert "All three ended with the same bits" in said
    assert "sha256   " in said


def test_a_run_folder_that_is_removed_ends_the_job_with_one_clear_line(tmp_path):
    job = start(tmp_path, "gloo", TMPDIR=str(tmp_path))
    try:
        run_dir = until_step(tmp_path, 0, 2, job)
        pairs = [WatchedWorker.read(pair_path(run_dir, rank)) for rank in range(3)]
        run_dir.rename(tmp_path / "moved-away")
        said, _ = job.communicate(timeout=DEADLINE_S)
    finally:
        job.kill()
        job.wait()

    assert job.returncode == 1, said
    assert f"error: {run_dir} was removed while the job was running" in said
    assert not any(pair.worker.is_alive() for pair in pairs)
    assert (tmp_path / "moved-away").is_dir(), "it is not removed under another name"
    assert os.listdir(tmp_path) == ["moved-away"]
