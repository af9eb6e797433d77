"""What starts, connects and ends workers freezes: the phase's limit ends it, and the job continues without it.

Workers that freeze in a phase of their own script: test_phases.py.
"""

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import Cluster, assert_complete, until
from jobs import MPIRUN, clean_env, exit_codes, of_kind, read_report, run_report
from running_job import Running
from start_strikes import Plan, StartingJob, files_in, find, left_over, processes_in, starter_of

from holdfast.base.phases import Phase
from holdfast.launch.supervise.processes import Process, WatchedWorker, children_of, name_of
from holdfast.records.beacon import UNCONNECTED, Beacon
from holdfast.records.paths import beacon_path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(230)]

SUPPORT = Path(__file__).parents[1] / "support"
PACED = SUPPORT / "train_paced.py"
FROZEN = SUPPORT / "train_frozen.py"
NODES_SCRIPT = Path(__file__).with_name("nodes_script.py")
START_S, SLOW_START_S = 6.0, 14.0
FORK_S = Phase.FORK.limit_s({"--start-timeout": SLOW_START_S})
every_fabric = pytest.mark.parametrize("fabric", ["gloo", "ulfm"])


def ends_of(records):
    return {record["rank"]: record["exit_code"] for record in records if record["event"] == "WorkerEnded"}


def stop_when_there(find_process):
    """Stop a process as soon as it exists; return it once it is stopped."""
    process = until(find_process, "the process")
    assert process.send(signal.SIGSTOP)
    until(process.is_stopped, "that it is stopped")
    return process


# -- process start, and the fork server


def fork_server_of(launcher):
    return find(Plan(0, "gloo", "fork server", 0, signal.SIGSTOP, 0.0, 0.0, 0), launcher)


@pytest.mark.parametrize("fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)])
def test_a_fork_server_that_is_stopped_while_it_imports_is_ended_and_workers_import_torch_themselves(tmp_path, fabric):
    with StartingJob(tmp_path, fabric, "--start-timeout", SLOW_START_S, workers=2) as job:
        server = stop_when_there(lambda: fork_server_of(job.process.pid))
        began_s = time.monotonic()
        job.until(lambda: not server.is_alive())
        assert time.monotonic() - began_s < FORK_S + BUSY_S
        assert not list(job.temporary.glob("holdfast-*/process-*")), "no worker was forked before"
        records = job.end()

    assert job.check_bits()["restarts"] == 0
    assert ends_of(records) == {0: 0, 1: 0}
    (line,) = re.findall("the fork server is stopped for .*", job.said)
    assert line.endswith("s and was ended; workers now import torch themselves")


@pytest.mark.soak
def test_a_replacement_does_not_wait_for_a_fork_server_that_is_stopped(tmp_path):
    go = tmp_path / "go"
    words = ("--fabric", "gloo", "--respawn", "--start-timeout", SLOW_START_S, "--no-page", NODES_SCRIPT, "--hold", go)
    running = Running(tmp_path, "-n", 2, *words)
    pair = running.pair_at_step(1, 2)
    stop_when_there(lambda: fork_server_of(running.job.pid))
    assert pair.worker.send(signal.SIGKILL)
    began_s = time.monotonic()
    running.wait_for(lambda: connected(running, 2))
    assert time.monotonic() - began_s < FORK_S + 30
    go.touch()
    out, err = running.job.communicate(timeout=120)

    assert running.job.returncode == 0, err
    assert "the fork server is stopped" in out + err
    assert {record["rank"] for record in of_kind(read_report(tmp_path / "report"), "Finished")} == {0, 2}


def connected(running, rank):
    """True once a worker is connected, or waits to be admitted; None before."""
    for run_dir in running.folder.glob("holdfast-*-*"):
        position = Beacon.read(beacon_path(run_dir, rank))
        if position is not None and position.phase not in UNCONNECTED:
            return True
    return None


@pytest.mark.soak
@every_fabric
def test_a_process_that_is_stopped_before_it_is_a_worker_is_ended_and_done_without(tmp_path, fabric):
    with StartingJob(tmp_path, fabric, "--start-timeout", START_S) as job:

        def starter():
            pid = starter_of(job.process.pid, fabric, 1)
            return None if pid is None else Process.of(pid)

        stop_when_there(starter)
        assert not list(job.temporary.glob("holdfast-*/process-1")), "it has no worker"
        records = job.end()

    assert job.check_bits()["restarts"] == (1 if fabric == "ulfm" else 0)
    (fenced,) = [record for record in records if record["event"] == "WorkerFenced"]
    assert fenced["rank"] == 1
    assert fenced["silent_s"] >= START_S
    assert ("is stopped" if fabric == "gloo" else "has not started") in fenced["reason"]
    assert ends_of(records)[1] == (-9 if fabric == "gloo" else 0), "over Open MPI it takes part in the next start"
    finished = {record["rank"] for record in records if record["event"] == "Finished"}
    assert finished == {0, 2} | ({1} if fabric == "ulfm" else set())


# -- an import that holds Python's lock


HOLDS_THE_LOCK = """
import ctypes, os, runpy, sys, time
if os.environ["RANK"] == "1" and not os.path.exists({note!r}):
    open({note!r}, "w").close()
    ctypes.PyDLL(None).sleep(3600)  # as an extension module does that initializes itself without end
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, "mlp", "sgd"]
runpy.run_path({script!r}, run_name="__main__")  # needs torch, so workers are forked
"""


@pytest.mark.soak
@every_fabric
def test_an_import_that_holds_the_lock_is_ended_after_ten_times_the_limit(tmp_path, fabric):
    script, reference_script = tmp_path / "locks.py", SUPPORT / "train_reference.py"
    script.write_text(
        HOLDS_THE_LOCK.format(note=str(tmp_path / "note"), folder=str(SUPPORT), script=str(reference_script))
    )

    report = run_report(tmp_path, "-n", 3, "--fabric", fabric, "--start-timeout", 10, "--no-page", script, timeout=220)

    (fenced,) = of_kind(report, "WorkerFenced")
    assert fenced["rank"] == 1
    limits = {"--start-timeout": 10}
    if "without a sign of life" in fenced["reason"]:
        assert fenced["silent_s"] >= Phase.SILENT_IMPORT.limit_s(limits)
    else:  # the others have waited for it that long
        assert "other workers wait for it" in fenced["reason"]
    assert exit_codes(report)[0] == 0


# -- MPI_Init


WAITS_ONCE = """
import os, runpy, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists({note!r}):
        time.sleep(0.01)
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, "mlp", "sgd"]
runpy.run_path({script!r}, run_name="__main__")  # needs torch, so workers are forked
"""


def in_connect(temporary, rank):
    """The process of a worker that connects, None before."""
    for path in temporary.glob(f"holdfast-*/process-{rank}"):
        position, pair = Beacon.read(beacon_path(path.parent, rank)), WatchedWorker.read(path)
        if position is not None and position.phase == "connect" and pair is not None and pair.worker.is_alive():
            return pair.worker
    return None


@pytest.mark.soak
def test_a_worker_that_is_stopped_inside_mpi_init_is_ended(tmp_path):
    """Over Gloo: test_phases.py."""
    note, script = tmp_path / "note", tmp_path / "waits.py"
    script.write_text(
        WAITS_ONCE.format(note=str(note), folder=str(SUPPORT), script=str(SUPPORT / "train_reference.py"))
    )
    (tmp_path / "t").mkdir()
    words = ("-n", 3, "--fabric", "ulfm", "--start-timeout", START_S, "--no-page", "--report", tmp_path / "r", script)
    job = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "run", *map(str, words)],
        env=clean_env(TMPDIR=str(tmp_path / "t")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with ended(job):
        stopped = stop_when_there(lambda: in_connect(tmp_path / "t", 0))
        time.sleep(0.3)
        note.touch()
        said, _ = job.communicate(timeout=150)

    assert job.returncode == 0, said
    report = read_report(tmp_path / "r")
    (fenced,) = of_kind(report, "WorkerFenced")
    assert fenced["rank"] == 0, said
    assert "is stopped" in fenced["reason"]
    assert -9 in [
        event["exit_code"] for event in report["_events"] if event.get("pid") == stopped.pid and "exit_code" in event
    ]
    assert files_in(tmp_path / "t") == []
    assert processes_in(tmp_path / "t") == []
    assert report["replicas"]["identical"] is True


@contextlib.contextmanager
def ended(*jobs):
    """Kill jobs at the end, whatever happens."""
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


# -- the rendezvous of launchers


RDZV_S, BUSY_S = 6, 60.0
"""Limit of the rendezvous, and what a busy machine may add to it."""


def launchers(tmp_path, count, *options):
    return Cluster(tmp_path, count, "--rdzv-timeout", RDZV_S, "--node-timeout", 2, *options, pause=0, workers=1)


def left_of(launcher):
    return [*processes_in(launcher.place / "tmp"), *files_in(launcher.place / "tmp")]


def test_a_launcher_that_is_stopped_before_it_joins_is_named_by_the_others(tmp_path):
    with launchers(tmp_path, 2) as cluster:
        stopped = cluster.start(1)
        stop_when_there(lambda: Process.of(stopped.pid))
        began_s = time.monotonic()
        first = cluster.start(0)

        assert cluster.wait(0) == {0: 1}
        assert RDZV_S <= time.monotonic() - began_s < RDZV_S + BUSY_S
        assert f"error: node 1 did not join within {RDZV_S} s (--rdzv-timeout)" in cluster.output(0)
        assert left_of(first) == []


@pytest.mark.soak
def test_a_launcher_that_is_stopped_while_it_hosts_the_rendezvous_is_named_by_the_others(tmp_path):
    with launchers(tmp_path, 3) as cluster:
        host = cluster.start(0)
        second = cluster.start(1)
        until(lambda: has_joined(cluster, 1), "node 1")
        host.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()

        assert cluster.wait(1) == {1: 1}
        assert time.monotonic() - began_s < RDZV_S + BUSY_S
        assert "store" in last_line(cluster, 1)
        assert left_of(second) == []
        host.send_signal(signal.SIGCONT)
        assert cluster.wait(0) == {0: 1}
        assert left_of(host) == []


def has_joined(cluster, node):
    """Whether a launcher waits for others: it says so in the folder of its run."""
    texts = [path.read_text() for path in cluster.launchers[node].place.glob("tmp/holdfast-*/*") if path.is_file()]
    return any("rendezvous" in text for text in texts)


def last_line(cluster, node):
    return cluster.output(node).splitlines()[-1]


@pytest.mark.soak
def test_a_launcher_that_is_stopped_after_it_joined_is_named_by_the_others(tmp_path):
    with launchers(tmp_path, 3, "--rdzv-timeout", 3 * RDZV_S) as cluster:
        cluster.start(0)
        stopped = cluster.start(1)
        until(lambda: has_joined(cluster, 1), "node 1")
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # its lease is over
        cluster.start(2)

        assert cluster.wait(0, 2) == {0: 1, 2: 1}
        assert f"error: node 1 did not join within {3 * RDZV_S} s (--rdzv-timeout)" in cluster.output(0)
        assert last_line(cluster, 2).startswith("error: "), "node 0, which hosts the store, may have ended before"
        stopped.send_signal(signal.SIGCONT)
        assert cluster.wait(1) == {1: 1}
        assert [left_of(launcher) for launcher in cluster.launchers.values()] == [[]] * 3


@pytest.mark.soak
def test_a_launcher_that_is_stopped_when_all_have_joined_is_done_without(tmp_path):
    with launchers(tmp_path, 2, "--start-timeout", 20) as cluster:
        first, stopped = cluster.start_all()
        until(lambda: list(stopped.place.glob("tmp/holdfast-*/process-1")), "its worker")
        stopped.send_signal(signal.SIGSTOP)

        assert cluster.wait(0) == {0: 0}, cluster.said()
        report = cluster.report(first)
        assert_complete(report)
        assert "node 1 is lost, with rank 1" in cluster.output(0)
        assert {event["rank"] for event in of_kind(report, "Finished")} == {0}
        assert left_of(first) == []
        stopped.send_signal(signal.SIGCONT)
        assert cluster.wait(1)[1] != 0
        assert left_of(stopped) == []


# -- process groups of torch.distributed


FREEZES_IN_INIT = """
import os, pathlib, signal, sys
import torch
import torch.distributed as dist
import holdfast.distributed
from holdfast.records.beacon import Beacon

note = pathlib.Path(sys.argv[1])
mark = Beacon.mark

def mark_and_freeze(self, phase, *more):
    mark(self, phase, *more)
    if phase == "connect" and os.environ["RANK"] == "1" and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGSTOP)

Beacon.mark = mark_and_freeze
dist.init_process_group("holdfast")
total = torch.ones(1)
for _ in range(2):
    try:
        dist.all_reduce(total)
        break
    except holdfast.distributed.RanksLost as error:
        print("lost", *error.ranks)
group = dist.new_group(holdfast.distributed.alive())
dist.barrier(group)
print("sum", total.item(), "of", dist.get_world_size())
"""


@pytest.mark.soak
@every_fabric
def test_a_rank_that_freezes_in_init_process_group_is_ended_and_done_without(tmp_path, fabric):
    script, note = tmp_path / "early.py", tmp_path / "note"
    script.write_text(FREEZES_IN_INIT)

    report = run_report(
        tmp_path, "-n", 3, "--fabric", fabric, "--start-timeout", START_S, "--no-page", script, note, timeout=150
    )

    assert note.exists()
    (fenced,) = of_kind(report, "WorkerFenced")
    assert fenced["rank"] == 1
    assert "is stopped" in fenced["reason"]
    assert exit_codes(report)[1] == -9
    assert report["restarts"] == (1 if fabric == "ulfm" else 0)
    assert report["_stdout"].count(f"sum {'2.0 of 2' if fabric == 'ulfm' else '3.0 of 3'}\n") == 2


INIT_ALONE = """
import holdfast.distributed.comm_thread as comm_thread
import torch.distributed as dist
comm_thread._START_WITHIN_S = {limit_s}
store = dist.HashStore()  # a TCPStore of torch would wait for all ranks itself, for half an hour
dist.init_process_group("holdfast", store=store, rank=0, world_size=2)
"""


@pytest.mark.soak
def test_without_a_launcher_ranks_of_init_process_group_do_not_wait_for_one_that_is_missing(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    time.sleep(20)\n    raise SystemExit\n"
        + INIT_ALONE.format(limit_s=4)
    )
    done = subprocess.run(
        [*MPIRUN, "-n", "2", sys.executable, script],
        env=clean_env(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )

    assert done.returncode
    assert "Timeout (0:00:06)!" in done.stderr
    assert "rank 0 ends; it waited for processes that have not called MPI_Init of 2 processes of mpirun" in done.stderr
    assert "init_process_group" in done.stderr


DIES_BEFORE_MPI = """
import os, signal
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import torch, holdfast
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(torch.utils.data.TensorDataset(torch.ones(8, 2)), 4, epochs=1):
    pass
"""


def test_a_rank_of_a_bare_mpirun_that_dies_before_mpi_init_is_named_after_10_s_and_at_the_limit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DIES_BEFORE_MPI)
    done = subprocess.run(
        [*MPIRUN, "-n", "2", sys.executable, script],
        env=clean_env(TMPDIR=str(tmp_path), HOLDFAST_START_TIMEOUT_S="11"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode
    who = "rank 1 of 2 processes of mpirun, which no longer runs"
    assert f"holdfast: for 10 s rank 0 waits for {who}; after 11 s (HOLDFAST_START_TIMEOUT_S)" in done.stderr
    assert re.search(rf"holdfast: after \d\d s rank 0 ends; it waited for {who};", done.stderr)


# -- the tear-down


def stop_everything_below(launcher):
    """Stop all processes of a job but the launcher; return them."""
    found = set()
    while new := {Process.of(pid) for pid in descendants(launcher)} - found - {None}:
        for process in new:
            process.send(signal.SIGSTOP)
        found |= new
    return found


def descendants(pid):
    return [below for child in children_of(pid) for below in (child, *descendants(child))]


@pytest.mark.soak
@every_fabric
def test_a_job_that_is_stopped_ends_though_all_that_it_started_is_frozen(tmp_path, fabric):
    """Workers, watchers, starters, the fork server and mpirun."""
    running = Running(tmp_path, *paced("--fabric", fabric, "--grace", 1, "--hang-timeout", 0))
    pairs = [running.pair_at_step(rank, 2) for rank in range(3)]
    frozen = stop_everything_below(running.job.pid) | {each for pair in pairs for each in (pair.worker, pair.watcher)}
    for process in frozen:
        process.send(signal.SIGSTOP)
    names = {name_of(process.pid) for process in frozen}
    assert fabric == "gloo" or "prterun" in names

    began_s = time.monotonic()
    running.job.send_signal(signal.SIGTERM)
    _, err = running.job.communicate(timeout=60)

    assert time.monotonic() - began_s < 1 + 2 * Phase.TEAR_DOWN.value.fixed_s + 5
    assert running.job.returncode == 1
    assert "1 s" in err.splitlines()[-1], err
    assert not any(process.is_alive() for process in frozen)
    assert left_in(tmp_path) == []


def paced(*options):
    naps = (word for rank in range(3) for word in ("--nap", rank, "all", 0.05, "quiet"))
    return ("-n", 3, "--no-page", *options, PACED, "--epochs", 40, *naps)


def left_in(folder):
    """Processes of the jobs that were given this temporary folder, and what they have left there."""
    return [*processes_in(folder), *folder.glob("holdfast-*-*"), *folder.glob("ompi.*"), *folder.glob("prte.*")]


@pytest.mark.soak
@every_fabric
def test_workers_end_though_their_launcher_is_frozen_and_the_next_start_removes_what_it_left(tmp_path, fabric):
    """Nothing watches the launcher of a single node. Its workers need it no more, and its folders are those of a killed one."""
    (tmp_path / "t").mkdir()
    with StartingJob(tmp_path / "t", fabric) as job:
        pairs = [
            job.until(
                lambda rank=rank: next(
                    iter(map(WatchedWorker.read, job.temporary.glob(f"holdfast-*/process-{rank}"))), None
                )
            )
            for rank in range(3)
        ]
        job.process.send_signal(signal.SIGSTOP)
        until(lambda: not any(each.is_alive() for pair in pairs for each in (pair.worker, pair.watcher)), "their end")
        assert job.process.poll() is None
        job.process.kill()
        job.process.wait()

        assert left_over(job.temporary, job.process.pid, 20) == []
