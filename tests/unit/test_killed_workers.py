"""Workers that a signal ends are reported at once; all other ends, and what only looks like one, are not."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lock_holders import DEADLINE_S, LockHolder, wait_for

from holdfast.launch.health.deaths import KilledWorkers
from holdfast.launch.supervise.processes import Process
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path


class Reports(dict):
    """The reported ranks, and why they died."""

    def __init__(self, folder):
        super().__init__()
        self.watched = KilledWorkers(folder, SimpleNamespace(members=object(), report=self.__setitem__))
        self.waiting = []

    def watch(self, rank, holder):
        self.watch_process(rank, Process.of(holder.process.pid))

    def watch_process(self, rank, process):
        before = threading.enumerate()
        self.watched.watch(rank, process)
        self.waiting += [thread for thread in threading.enumerate() if thread not in before]

    def are_over(self):
        """Whether the threads that wait for the ends of workers have ended: they report nothing more."""
        return not any(thread.is_alive() for thread in self.waiting)


@pytest.fixture
def reports(tmp_path):
    return Reports(tmp_path)


def go_on(holder):
    """Let a process do what it does last."""
    holder.process.stdin.write("\n")
    holder.process.stdin.flush()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_is_reported_before_anything_waits_for_it_and_no_other(tmp_path, reports, number):
    with LockHolder(tmp_path, 0) as killed, LockHolder(tmp_path, 1) as other:
        reports.watch(0, killed)
        reports.watch(1, other)

        killed.process.send_signal(number)

        wait_for(lambda: reports)
        assert reports == {0: f"killed by {signal.Signals(number).name}"}
        assert killed.process.wait() == -number


def test_threads_that_have_not_ended_yet_are_waited_for(tmp_path, reports):
    many = "import threading\nfor _ in range(20): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    with LockHolder(tmp_path, 0, many) as killed:
        reports.watch(0, killed)

        killed.process.kill()

        wait_for(lambda: reports)
        assert reports == {0: "killed by SIGKILL"}


@pytest.mark.parametrize("last", ["sys.exit(0)", "os._exit(3)"])
def test_a_worker_that_exits_is_left_to_the_record_of_its_watcher(tmp_path, reports, last):
    with LockHolder(tmp_path, 0, last=f"sys.stderr.close()\n{last}") as exits:
        reports.watch(0, exits)

        go_on(exits)
        exits.process.wait()
        wait_for(reports.are_over)

    assert reports == {}


def test_a_worker_that_has_replaced_its_program_is_not_reported(tmp_path, reports):
    with LockHolder(tmp_path, 0, last='os.execv("/bin/sleep", ["sleep", "60"])') as alive:
        reports.watch(0, alive)

        go_on(alive)
        wait_for(reports.are_over)

        assert reports == {}
        assert alive.process.poll() is None


STOP = "os.kill(os.getpid(), 19)"


def state_of(holder):
    """State of a process as the kernel has it: T if it is stopped."""
    return Path("/proc", str(holder.process.pid), "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(STOP, id="it is stopped"),
        pytest.param(f"os.waitpid(os.fork() or os.abort(), 0)\n{STOP}", id="a child of it was killed"),
    ],
)
def test_a_worker_that_lives_is_not_reported(tmp_path, reports, last):
    with LockHolder(tmp_path, 0, last=last) as alive:
        reports.watch(0, alive)

        go_on(alive)
        wait_for(lambda: state_of(alive) == "T")
        time.sleep(0.05)  # nothing has woken the thread that waits for its end

        assert reports == {}
        assert not reports.are_over()


def test_another_process_that_has_got_the_same_pid_since_is_not_taken_for_it(tmp_path, reports):
    with LockHolder(tmp_path, 0) as killed:
        reports.watch_process(0, Process(killed.process.pid, 1))  # as if it had started at another time

        killed.process.kill()
        wait_for(reports.are_over)

    assert reports == {}


def test_a_worker_without_a_lock_is_left_to_its_watcher(tmp_path, reports):
    Beacon(beacon_path(tmp_path, 0)).mark("forward", 1)
    with LockHolder(tmp_path, 1) as killed:
        for rank in (0, 2):  # one has a beacon, but no lock; the other has nothing
            reports.watch(rank, killed)

        wait_for(reports.are_over)
        killed.process.kill()

    assert reports == {}


def test_what_the_launcher_kills_at_the_end_is_not_reported(tmp_path, reports):
    with LockHolder(tmp_path, 0) as killed:
        reports.watch(0, killed)
        reports.watched.close()

        killed.process.kill()
        killed.process.wait()
        wait_for(reports.are_over)

    assert reports == {}


def test_the_mark_is_there_again_while_the_report_is_still_on_its_way(tmp_path):
    locks, reported, may_end = Beacon.peer_locks(tmp_path), threading.Event(), threading.Event()

    def report(rank, why):
        reported.set()
        may_end.wait(DEADLINE_S)

    with LockHolder(tmp_path, 0) as killed:
        KilledWorkers(tmp_path, SimpleNamespace(members=object(), report=report)).watch(
            0, Process.of(killed.process.pid)
        )

        killed.process.kill()

        assert reported.wait(DEADLINE_S)
        wait_for(lambda: locks.core_of_end(0) is not None)
        may_end.set()


def test_a_report_that_fails_prints_nothing(tmp_path, monkeypatch):
    printed, failed = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def report(rank, why):
        failed.set()
        raise OSError("no network")

    with LockHolder(tmp_path, 0) as killed:
        KilledWorkers(tmp_path, SimpleNamespace(members=object(), report=report)).watch(
            0, Process.of(killed.process.pid)
        )

        killed.process.kill()

        assert failed.wait(DEADLINE_S)
        wait_for(lambda: not any(thread.name == "holdfast-end-0" for thread in threading.enumerate()))
    assert printed == []


def test_without_another_thread_it_is_left_to_the_watcher(tmp_path, reports, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with LockHolder(tmp_path, 0) as killed:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        reports.watch(0, killed)

        killed.process.kill()
        killed.process.wait()

    assert reports == {}


def test_the_signal_of_an_end_is_known_once_no_thread_runs_and_as_long_as_there_is_the_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = Process.of(child.pid)
    assert process.signal_of_end() is None

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert process.signal_of_end() == signal.SIGKILL
    assert Process(child.pid, process.started + 1).signal_of_end() == 0
    child.wait()
    assert process.signal_of_end() == 0
