"""Processes of a job are killed while it starts, alone and together: nothing is left, and the next start removes only its own.

A killed launcher leaves its folders, which no process can remove. The next start on this machine does, and leaves the
folders of running jobs and of users alone.
"""

import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import Cluster, assert_complete
from jobs import clean_env
from start_strikes import Plan, StartingJob, files_in, find, processes_in, rank_of, starter_of

from holdfast.base.temporary import TemporaryFolder
from holdfast.launch.supervise.processes import Process, descendants_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(200)]

MEMORY = Path("/dev/shm")
DEADLINE_S = 60.0
KINDS = ("launcher", "watcher", "worker", "fork server", "starter", "mpirun")


@pytest.fixture
def strangers(tmp_path):
    """Folders with names like those of a run that no start may remove: of a running process, and of a user."""
    (tmp_path / "t").mkdir()
    parents = [tmp_path / "t", MEMORY]
    in_use = [TemporaryFolder.make("holdfast-", parent) for parent in parents]
    of_user = [parent / f"holdfast-notes-{time.monotonic_ns()}" for parent in parents]
    for path in of_user:
        path.mkdir(mode=0o700)
        (path / "note").write_text("mine")
    yield [*(folder.path for folder in in_use), *of_user]
    for folder in in_use:
        folder.remove()
    for path in of_user:
        (path / "note").unlink()
        path.rmdir()


def start_again(temporary):
    """Start another job, which does not train, with the same temporary folder."""
    script = temporary.parent / "nothing.py"
    script.write_text("print('nothing')\n")
    words = ("run", "-n", "1", "--fabric", "virtual", "--no-page", "--report", temporary.parent / "again", script)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, words)],
        env=clean_env(TMPDIR=str(temporary)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "ended without training" in done.stderr, done.stderr


def folders_of(job):
    """What a job has in shared memory."""
    return list(MEMORY.glob(f"holdfast-{job.process.pid}-*"))


def found(kind, fabric, launcher):
    if kind == "starter":
        pid = starter_of(launcher, fabric, 1)
        return None if pid is None else Process.of(pid)
    return find(Plan(0, fabric, kind, 1, signal.SIGKILL, 0.0, 0.0, 0), launcher)


def wait_until_gone(temporary):
    ends_s = time.monotonic() + DEADLINE_S
    while left := processes_in(temporary):
        assert time.monotonic() < ends_s, {
            pid: (Path(f"/proc/{pid}/cmdline").read_bytes(), rank_of(pid)) for pid in left
        }
        time.sleep(0.05)


def check_nothing_is_left(job, strangers):
    """Nothing runs; only a killed launcher has left folders, and the next start removes them."""
    wait_until_gone(job.temporary)
    start_again(job.temporary)
    assert {*files_in(job.temporary), *folders_of(job)} == {path for path in strangers if path.parent == job.temporary}
    assert all(path.is_dir() for path in strangers)


@pytest.mark.parametrize(
    ("fabric", "options"),
    [
        ("gloo", ("--no-preload",)),
        pytest.param("gloo", (), marks=pytest.mark.soak),
        pytest.param("ulfm", (), marks=pytest.mark.soak),
    ],
)
def test_all_processes_of_a_job_are_killed_at_once(tmp_path, strangers, fabric, options):
    with StartingJob(tmp_path, fabric, *options, workers=2) as job:
        job.until(lambda: list(job.temporary.glob("holdfast-*/process-1")))
        every = [Process.of(job.process.pid), *descendants_of(job.process.pid)]
        every += [found(kind, fabric, job.process.pid) for kind in ("worker", "watcher")]
        for process in filter(None, every):
            process.send(signal.SIGKILL)
        assert job.process.wait(DEADLINE_S) == -signal.SIGKILL

        check_nothing_is_left(job, strangers)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_some_processes_of_a_job_are_killed_at_a_random_moment(tmp_path, strangers, seed):
    rng = random.Random(seed)
    fabric = rng.choice(("gloo", "ulfm"))
    kinds = rng.sample([kind for kind in KINDS if fabric == "ulfm" or kind != "mpirun"], rng.choice((1, 1, 2, 3)))
    after_s = rng.uniform(0, 5)
    with StartingJob(tmp_path, fabric, "--start-timeout", 8, workers=2) as job:
        time.sleep(after_s)
        targets = [process for kind in kinds if (process := found(kind, fabric, job.process.pid)) is not None]
        landed = [process.send(signal.SIGKILL) for process in targets]
        said, _ = job.process.communicate(timeout=120)
        told = f"seed {seed}: {fabric}, {kinds} after {after_s:.2f} s, {sum(landed)} landed\n{said}"
        if "launcher" not in kinds:
            assert job.process.returncode in (0, 1), told
            if job.process.returncode:
                assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, told
            assert folders_of(job) == [], told
            assert set(files_in(job.temporary)) <= set(strangers), told

        check_nothing_is_left(job, strangers)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_launcher_of_two_nodes_is_killed_at_a_random_moment(tmp_path, seed):
    """With its worker or without: the other one continues, or says which node is missing; no port stays open."""
    rng = random.Random(seed)
    killed, after_s, with_worker = rng.randrange(2), rng.uniform(0, 5), rng.random() < 0.5
    options = ("--rdzv-timeout", 5, "--node-timeout", 2, "--start-timeout", 8)
    with Cluster(tmp_path, 2, *options, pause=0, workers=1) as cluster:
        launchers = cluster.start_all()
        time.sleep(after_s)
        below = descendants_of(launchers[killed].pid) if with_worker else []
        launchers[killed].kill()
        for process in below:
            process.send(signal.SIGKILL)
        other = 1 - killed
        code = cluster.wait(other)[other]

        if code == 0:
            assert_complete(cluster.report(launchers[other]))
        else:
            assert code in (1, 4), cluster.said()
            assert "Traceback" not in cluster.output(other), cluster.output(other)
        for launcher in launchers:
            wait_until_gone(launcher.place / "tmp")
            start_again(launcher.place / "tmp")
            assert files_in(launcher.place / "tmp") == []
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(cluster.url.rpartition(":")[2])))
