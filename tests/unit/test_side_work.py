"""An error of what a thread only shows, in each thread that lives depend on: its duty goes on, and the error is said once."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from clusters import until

from holdfast.base import side_work
from holdfast.checkpoint import CheckpointStore, steps, take
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.comm.surviving import SurvivingGroup
from holdfast.config import Settings
from holdfast.distributed import comm_thread
from holdfast.distributed.comm_thread import CommThread
from holdfast.distributed.recorder import GroupRecorder
from holdfast.distributed.tasks import Collective, CollectiveCall
from holdfast.engine import exits
from holdfast.launch.health import deaths
from holdfast.launch.health import monitor as health
from holdfast.launch.health.deaths import KilledWorkers
from holdfast.launch.health.monitor import HealthMonitor
from holdfast.launch.run_view import RunStatus, SteadyView
from holdfast.launch.supervise import watcher
from holdfast.membership import Hub, open_store
from holdfast.membership import server as hub_server
from holdfast.records import beacon as beacons
from holdfast.records.beacon import Beacon, Pulse

DEADLINE_S = 30.0


class Strange(Exception):
    """An error that no code expects."""


def raises(*args, **kwargs):
    raise Strange("of side work")


@pytest.fixture(autouse=True)
def said_before(monkeypatch):
    monkeypatch.setattr(side_work, "_reported", set())


def beat(tmp_path, monkeypatch):
    """The heartbeat, whose search for the module being imported raises."""
    monkeypatch.setattr(beacons, "current_activity", raises)
    monkeypatch.setattr(beacons, "_START_EVERY_S", 0.01)
    path = tmp_path / "beacon"
    beacon = Beacon(path)
    beacon.mark("launch", -1)
    Pulse(beacon, 0.01)
    until(lambda: Beacon.read(path).pulse >= 5, "the heartbeat")


def watch(tmp_path, monkeypatch):
    """The watcher of a worker, where a file cannot be synced: it still sees the end of the worker."""
    monkeypatch.setattr(watcher, "_publish", raises)
    monkeypatch.setattr(watcher, "_PUBLISH_S", 0.01)
    monkeypatch.setattr(watcher, "_is_disowned", lambda run_dir, rank: next(looks) == 3)
    monkeypatch.setenv(watcher.LAUNCHER_NODE, "elsewhere 0")
    looks = iter(range(10))
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    settings = SimpleNamespace(run_dir=str(tmp_path))
    handle = os.pidfd_open(worker.pid)
    assert watcher._wait_and_publish({"worker": handle}, settings, 0) == set(), "it looked again"
    worker.kill()
    assert watcher._wait_and_publish({"worker": handle}, settings, 0) == {"worker"}
    worker.communicate()
    os.close(handle)


def request_stop(tmp_path, monkeypatch):
    """The watcher of a worker whose launcher has died, on a full disk: the worker is asked to save and stop."""
    monkeypatch.setattr(watcher, "stop_path", lambda run_dir: SimpleNamespace(touch=raises))
    monkeypatch.setenv(watcher.ALL_STOP, "1")
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watcher._request_stop(worker.pid, SimpleNamespace(run_dir=str(tmp_path)))
    worker.communicate()
    assert worker.returncode == -signal.SIGTERM


def start_beside(tmp_path, monkeypatch):
    """A worker of mpirun, which cannot start the process that says for which ones it waits: it starts."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(exits.subprocess, "Popen", raises)
    started = []
    with exits.stacks_and_exit_after(DEADLINE_S):
        started.append(True)
    assert started


def say_that_it_begins(tmp_path, monkeypatch):
    """A process that says something at its start, with nowhere to write it: it starts."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=raises, flush=raises))
    side_work.say("2 processes of srun have joined")


def report_deaths(tmp_path, monkeypatch):
    """The launcher's thread that waits for the end of a worker: the worker's end is looked at, whatever the report raises."""
    looked = []
    monkeypatch.setattr(deaths, "cause_of_death", lambda code: looked.append(code) or "killed")
    killed = KilledWorkers(tmp_path, SimpleNamespace(report=raises))
    killed._look(0, SimpleNamespace(signal_of_end=lambda: signal.SIGKILL))
    killed._look(1, SimpleNamespace(signal_of_end=lambda: signal.SIGSEGV))
    assert looked == [-signal.SIGKILL, -signal.SIGSEGV]


def communicator():
    """A communication thread with nothing to communicate with."""
    thread = CommThread.__new__(CommThread)
    thread._answers, thread._inbox, thread._transfers = queue.SimpleQueue(), queue.SimpleQueue(), []
    thread._current, thread._said_waits, thread._is_at_gate = None, False, False
    return thread


def complete_futures(tmp_path, monkeypatch):
    """The thread that completes futures: what a script chains to one raises, and the next is completed."""
    thread, done = communicator(), threading.Event()
    thread._answers.put(raises)
    thread._answers.put(done.set)
    threading.Thread(target=thread._complete_futures, daemon=True).start()
    assert done.wait(DEADLINE_S)


def communicate(tmp_path, monkeypatch):
    """The communication thread, where the beacon raises: the collective is carried out."""
    thread, ended = communicator(), []
    thread.recorder = SimpleNamespace(publish_waits=raises)
    monkeypatch.setattr(CommThread, "_exchange", lambda self, job: None)
    work = SimpleNamespace(timeout_s=1.0, complete=lambda: ended.append("completed"))
    group = SimpleNamespace(failed=set(), completed=0)
    thread._carry_out(Collective(group, CollectiveCall("barrier", [], lambda: None), work))
    assert ended == ["completed"]


def end_with_a_reason(tmp_path, monkeypatch):
    """The communication thread that has to end its process, where the reason cannot be printed."""
    killed = []
    monkeypatch.setattr(comm_thread.exits, "kill_self", lambda: killed.append(1))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=raises))
    thread = communicator()
    monkeypatch.setattr(CommThread, "_serve", raises)
    thread._run()
    assert killed


def continue_with_the_survivors(tmp_path, monkeypatch):
    """The communication thread, which cannot print what it has recovered from, or that it scales a sum."""
    recorder = GroupRecorder(Settings(), 0, (0, 1, 2))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=raises))
    recorder._check_rank_0(SimpleNamespace(holders={1: 0}))
    recorder.scaled("all_reduce(SUM)", "train.py, line 3", (0,), 3)
    recorder.scaled("all_reduce(SUM)", "train.py, line 3", (0, 2), 3)


def report_a_dead_rank(tmp_path, monkeypatch):
    """The thread of a process that watches the others: it reports a death to them, even if it cannot print."""
    reported = []
    group = SurvivingGroup.__new__(SurvivingGroup)
    group.group, group.ranks, group._dead = SimpleNamespace(rank=0, size=3), [0, 1, 2], set()
    group._store = SimpleNamespace(create=lambda key, value: reported.append(key))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=raises))
    group._report(1)
    group._report(2)
    assert reported == ["dead/1", "dead/2"]


def end_with_the_others(tmp_path, monkeypatch):
    """The same thread, when the process has to end."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=raises))
    group = SurvivingGroup.__new__(SurvivingGroup)
    group.group, group._hub = SimpleNamespace(rank=1, restarts_all=False), None
    group._end("rank 0 has failed")
    assert ended == [1]


def serve_members(tmp_path, monkeypatch):
    """The thread of the membership store, where logging raises: it serves the next client."""
    monkeypatch.setattr(hub_server.logger, "warning", raises)
    with Hub("secret") as hub:
        with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
            stranger.sendall(b"no handshake\n")
            while stranger.recv(1 << 16):
                pass
        store = open_store(f"holdfast://127.0.0.1:{hub.port}/job", "secret")
        store.put("key", "value")
        assert store.get("key") == "value"
        store.close()


def write_checkpoints(tmp_path, monkeypatch):
    """The thread that writes checkpoints, where the files of one that has failed cannot be removed: the next is saved."""
    store = CheckpointStore(tmp_path)
    writer, write = CheckpointWriter(store, background=True), store.write
    monkeypatch.setattr(store, "write", raises)
    monkeypatch.setattr(store, "discard", raises)
    outcomes = []
    for step in range(2):
        writer.begin(step, take({"w": torch.ones(3)}), {}, "token")
        writer.commit(0)
        writer.wait()
        outcomes += writer.poll()
        monkeypatch.setattr(store, "write", write)
    assert [type(each.error) for each in outcomes] == [Strange, type(None)]
    assert steps(tmp_path) == [1]


def show_the_job(tmp_path, monkeypatch):
    """The launcher, whose display raises."""
    view = SteadyView(SimpleNamespace(output=raises, print_line=raises, show=raises, close=raises))
    view.output(0, "line")
    view.print_line("event")
    view.show(RunStatus(alive={}, metrics={}))
    view.close()


def end_stuck_workers(tmp_path, monkeypatch):
    """The launcher, which cannot take the stacks of a worker that hangs: it is recorded all the same."""
    noted = []
    monitor = HealthMonitor.__new__(HealthMonitor)
    monitor._run = SimpleNamespace(job=SimpleNamespace(nnodes=1, hosts=(), script="train.py"))
    monitor._bus = SimpleNamespace(note=noted.append)
    monitor._stacks = SimpleNamespace(take=raises)
    monitor._note_fenced(health.StuckWorker(1, 3.0, "no progress"), 5, SimpleNamespace(worker=None, node=""))
    assert [(record.rank, record.reason) for record in noted] == [(1, "no progress")]


DUTIES = [
    beat,
    watch,
    request_stop,
    start_beside,
    say_that_it_begins,
    report_deaths,
    complete_futures,
    communicate,
    end_with_a_reason,
    continue_with_the_survivors,
    report_a_dead_rank,
    end_with_the_others,
    serve_members,
    write_checkpoints,
    show_the_job,
    end_stuck_workers,
]


@pytest.mark.parametrize("duty", DUTIES, ids=lambda duty: duty.__name__)
def test_a_thread_survives_what_it_only_shows(duty, tmp_path, monkeypatch, capfd):
    duty(tmp_path, monkeypatch)

    lines = [line for line in capfd.readouterr().err.splitlines() if "Strange: of side work" in line]
    assert lines
    assert len(lines) == len(set(lines)), "each is said once"
    assert all(" failed in " in line and "which continues" in line for line in lines)
