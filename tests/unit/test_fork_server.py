"""The launcher's handle on a fork server that is stopped or ends: it neither waits for it nor mistakes another for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from lock_holders import wait_for

from holdfast.launch.supervise import fork_server
from holdfast.launch.supervise.fork_server import ForkServer
from holdfast.launch.supervise.processes import Process

TRACER = """
import ctypes, sys, time
seize = 0x4206
if ctypes.CDLL(None).ptrace(seize, int(sys.argv[1]), None, None) == 0:
    print("traced", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def server(tmp_path):
    with contextlib.closing(ForkServer(tmp_path, os.environ, tmp_path / "log")) as server:
        yield server


def test_only_time_in_which_the_launcher_looked_counts_as_stopped(server):
    process = Process.of(server.process.pid)
    assert server.stopped_s(100.0) == 0.0
    process.send(signal.SIGSTOP)
    wait_for(process.is_stopped)

    assert [server.stopped_s(now_s) for now_s in (101.0, 104.0, 105.5)] == [0.0, 3.0, 4.5]
    assert [server.stopped_s(now_s) for now_s in (200.0, 202.0)] == [0.0, 2.0], "the launcher was asleep in between"


def test_another_process_with_the_pid_of_a_server_that_has_ended_is_not_taken_for_it(server, monkeypatch):
    other = subprocess.Popen(["sleep", "60"])
    process = Process.of(other.pid)
    process.send(signal.SIGSTOP)
    wait_for(process.is_stopped)
    monkeypatch.setattr(fork_server.Process, "of", lambda pid: process)
    assert [server.stopped_s(now_s) for now_s in (1.0, 3.0)] == [0.0, 2.0], "the negative control"

    server.kill()

    assert [server.stopped_s(now_s) for now_s in (4.0, 6.0)] == [0.0, 0.0]
    other.kill()
    other.wait()


def test_a_server_that_a_debugger_keeps_is_not_waited_for_without_end(server):
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(server.process.pid)], stdout=subprocess.PIPE, text=True
    )
    with tracer:
        if tracer.stdout.readline() != "traced\n":
            pytest.skip("this system lets no process trace another")
        began_s = time.monotonic()

        server.kill()

        assert time.monotonic() - began_s < 10.0
        assert server.process.poll() is None, "it is a zombie, and the tracer has not looked at it"
        assert server.stopped_s(1.0) == 0.0
        tracer.kill()


def test_it_ends_where_its_folder_is_out_of_reach(tmp_path):
    (tmp_path / "run").mkdir()
    server = ForkServer(tmp_path / "run", os.environ, tmp_path / "log")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").touch()  # a path through a file is as useless as one through a folder of mode 000

    server.close()

    assert server.process.poll() is not None
