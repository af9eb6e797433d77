"""A worker that is stopped while it adds and wakes up in a later step writes into memory that nobody uses any more."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import reference
from jobs import MPIRUN, ROOT, clean_env

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "late_writer.py"
VICTIM, SURVIVORS = 2, (0, 1)
JOB_S = 150
reference_hash = functools.cache(reference.train)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def state_of(pid):
    """What the system says a process does: T is stopped, Z is dead."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def wait(job, path):
    end = time.monotonic() + JOB_S
    while not path.exists():
        assert job.poll() is None, "the job ended too early"
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.01)


def run(folder, *options):
    """Run the job, killing the stopped worker's wrapper; return each survivor's hash."""
    job = subprocess.Popen(
        [*MPIRUN, "-n", "3", sys.executable, str(SCRIPT), str(folder), *options],
        env=clean_env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids = []
    try:
        wait(job, folder / "stopped")
        pids = [int(word) for word in (folder / "stopped").read_text().split()]
        worker, wrapper = pids
        while state_of(worker) != "T":
            time.sleep(0.001)
        kill(wrapper)
        wait(job, folder / "written")
        assert state_of(worker) == "S", "it was woken, has written its share, and waits"
        job.wait(JOB_S)
    finally:
        for pid in pids:
            kill(pid)
        job.kill()
        job.wait()
    logs = "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in folder.glob("*.log"))
    missing = [rank for rank in SURVIVORS if not (folder / f"state-{rank}").exists()]
    assert not missing, f"ranks {missing} did not end\n{logs}"
    assert {(folder / f"members-{rank}").read_text() for rank in SURVIVORS} == {"0,1"}
    assert not (folder / f"state-{VICTIM}").exists()
    return [(folder / f"state-{rank}").read_text() for rank in SURVIVORS]


@pytest.mark.timeout(2 * JOB_S)
def test_what_a_late_worker_writes_reaches_nobody(tmp_path):
    assert run(tmp_path) == [reference_hash("cnn", "sgd")] * 2


@pytest.mark.timeout(2 * JOB_S)
def test_with_the_memory_used_again_all_survivors_would_be_wrong_alike(tmp_path):
    states = run(tmp_path, "--reuse")

    assert len(set(states)) == 1
    assert states[0] != reference_hash("cnn", "sgd")
