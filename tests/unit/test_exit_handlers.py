"""A script's exit handlers that do not end: the process exits all the same, and never as a success."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from holdfast.base.phases import Phase
from holdfast.config import Settings
from holdfast.session import connecting

HANG_S = 0.02
LIMIT_S = Phase.FINALIZING.limit_s({"--hang-timeout": HANG_S})
DEADLINE_S = 60.0
SCRIPT = """
import atexit, os, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from holdfast.launch.supervise import worker
from holdfast.records.beacon import show_life, _of_process
show_life(Path(sys.argv[1]), 0.0)
(beacon,) = _of_process.values()
worker.worker_name = lambda: (SimpleNamespace(hang_timeout_s={hang_s}), 0)  # shorter than settings allow
def handler():
    {handler}
atexit.register(handler)
worker._leave({code})
"""
HOLDS_STDERR = "sys.stderr = type('Held', (), {'write': lambda *_: time.sleep(600)})(); time.sleep(600)"


def words(tmp_path, handler, code=0):
    return [sys.executable, "-c", SCRIPT.format(handler=handler, code=code, hang_s=HANG_S), tmp_path / "beacon"]


def leave(tmp_path, handler, code=0):
    """Let a process leave with an exit handler; return its exit code, stderr and how long that took."""
    began_s = time.monotonic()
    done = subprocess.run(words(tmp_path, handler, code), stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    return done.returncode, done.stderr, time.monotonic() - began_s


@pytest.mark.parametrize(
    ("code", "expected", "handler"), [(0, 1, HOLDS_STDERR), (2, 2, "time.sleep(600)")], ids=range(2)
)
def test_handlers_that_are_cut_off_are_no_success(tmp_path, handler, code, expected):
    ended, said, _ = leave(tmp_path, handler, code)

    assert ended == expected
    assert said == f"holdfast: exit handlers have not ended within {LIMIT_S:g} s; the process ends without them\n"


def test_handlers_that_end_change_nothing(tmp_path):
    assert leave(tmp_path, "pass")[:2] == (0, "")


def test_a_system_that_refuses_a_thread_does_not_keep_handlers_from_running(tmp_path):
    script = SCRIPT.replace("worker._leave", "def refuse(*_): raise RuntimeError(\"can't start new thread\")\n"
                            "worker.threading.Thread.start = refuse\nworker._leave")  # fmt: skip
    words = [sys.executable, "-c", script.format(handler="print('ran')", code=3, hang_s=HANG_S), tmp_path / "beacon"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (3, "ran\n", "")


def test_handlers_that_are_busy_may_take_longer(tmp_path):
    busy = f"beacon.publish_busy(busy=True); time.sleep({3 * LIMIT_S}); beacon.publish_busy(busy=False)"
    ended, said, took_s = leave(tmp_path, busy)

    assert (ended, said) == (0, "")
    assert took_s > 3 * LIMIT_S


def test_a_full_pipe_for_stderr_keeps_no_process(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)

    assert subprocess.run(words(tmp_path, "time.sleep(600)"), stderr=writer, timeout=DEADLINE_S).returncode == 1

    os.close(reader)
    os.close(writer)


HOLDS_THE_LOCK = """
import ctypes
from holdfast.engine.exits import stacks_and_exit_after
with stacks_and_exit_after(None), stacks_and_exit_after(60):
    pass
with stacks_and_exit_after(0.5):
    ctypes.PyDLL(None).sleep(60)  # keeps Python's lock, as MPI_Init does
"""


def test_a_call_that_keeps_pythons_lock_ends_with_the_stacks_of_its_process():
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_LOCK], capture_output=True, text=True, timeout=50, check=False
    )

    assert done.returncode == 1
    assert "Timeout (0:00:02.500000)!" in done.stderr
    assert 'File "<string>", line 7 in <module>' in done.stderr


@pytest.mark.parametrize(("run_dir", "ranks", "limit_s"), [("", "2", 300.0), ("/tmp/run", "2", None), ("", None, None)])
def test_mpi_init_has_a_limit_where_no_launcher_ends_its_wait(monkeypatch, run_dir, ranks, limit_s):
    if ranks is None:
        monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", ranks)

    assert connecting._mpi_limit_s(Settings(run_dir=run_dir)) == limit_s
