"""Tails, processes, the words of a failure, the words of the screen."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from usual_records import DDP, committed, started

from holdfast.config import Settings
from holdfast.errors import ConfigError, TooFewWorkers
from holdfast.faults.plan import FaultPlan
from holdfast.launch.exit_status import explain, why_not_again
from holdfast.launch.fleet.hostlist import Host
from holdfast.launch.fleet.node_faults import FaultInjector
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobBroken, JobLost, JobState, NodeDeparted
from holdfast.launch.launcher import Launcher
from holdfast.launch.results import records_of
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.run_view import RunStatus, RunView
from holdfast.launch.stopping import StopProcedure
from holdfast.launch.supervise.attempt import _environment
from holdfast.launch.supervise.processes import (
    Process,
    WatchedWorker,
    children_of,
    descendants_of,
    end_gently,
    wait_for_end,
)
from holdfast.launch.supervise.script_failure import describe
from holdfast.launch.supervise.tail import LineTail, RecordTail
from holdfast.observe.terminal.views import make_view
from holdfast.records.event_log import EventLog
from holdfast.records.files import FileRecorder, read_records
from holdfast.records.paths import stop_path
from holdfast.records.progress import RunProgress
from holdfast.records.types import (
    CheckpointSaved,
    FailureSeen,
)

SEEN = FailureSeen(t_s=1.0, rank=0, step=3, phase="allreduce")


@pytest.mark.parametrize("removed", ["records-launcher.jsonl", "events.jsonl"])
def test_a_report_has_the_records_whose_file_was_removed_from_the_run_directory(tmp_path, removed):
    (tmp_path / "run").mkdir()
    events, own = EventLog(tmp_path / "report"), FileRecorder(tmp_path / "run" / "records-launcher.jsonl")
    own.write(SEEN)
    events.write(SEEN)
    job, paths = SimpleNamespace(report_dir=tmp_path / "report"), SimpleNamespace(run_dir=tmp_path / "run")
    run = SimpleNamespace(events=events, job=job, paths=paths)

    next(tmp_path.glob(f"*/{removed}")).unlink()

    assert records_of(run, has_all=own.is_there()) == [SEEN]


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.read() == []

    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    with path.open("ab") as log:
        log.write(b"o\nthree")
    assert tail.read() == [b"two"]
    assert tail.rest() == b"three"
    assert tail.rest() == b""
    tail.close()


def test_records_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "records.jsonl"
    tail = RecordTail(path)
    recorder = FileRecorder(path)

    recorder.write(SEEN)
    assert tail.records() == [SEEN]
    assert tail.records() == []
    with path.open("a") as file:
        file.write("{}\n[1]\n" + "[" * 100_000 + "\n\ud800\n".encode("utf-8", "surrogatepass").decode("latin1"))
    recorder.write(SEEN)
    assert tail.records() == [SEEN]
    assert tail.skipped == 4
    assert list(read_records(path)) == [SEEN, SEEN]
    tail.close()


def test_a_process_is_known_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = Process.of(child.pid)

    assert process is not None
    assert process.is_alive()
    assert process.send(signal.SIGKILL)
    child.wait(10)
    assert not process.is_alive()
    assert not process.send(signal.SIGKILL)


def test_another_process_with_the_same_number_is_left_alone():
    ours = Process.of(os.getpid())
    assert ours is not None
    earlier = Process(ours.pid, ours.started - 1)

    assert not earlier.is_alive()
    assert not earlier.send(signal.SIGKILL)


def test_a_pair_is_read_as_it_was_noted(tmp_path):
    pair = WatchedWorker(Process(1, 2), Process(3, 4))

    pair.note(tmp_path / "pair")

    assert WatchedWorker.read(tmp_path / "pair") == pair
    assert WatchedWorker.read(tmp_path / "none") is None


def sleeper(before="", **env):
    """A process that has done something, and sleeps now."""
    code = f"{before}\nprint(flush=True)\nimport time\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | env)
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    return child


def test_who_has_ended_is_told_and_nobody_before():
    child = sleeper()
    process = Process.of(child.pid)
    assert process is not None
    handle = process.open()
    assert handle is not None

    assert wait_for_end({"child": handle}, 0.0) == set()
    child.kill()

    assert wait_for_end({"child": handle}, 10) == {"child"}
    os.close(handle)
    child.wait(10)


SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize(("before", "ended_by"), [("", signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
def test_a_process_is_asked_to_end_before_it_is_killed(monkeypatch, before, ended_by):
    monkeypatch.setattr("holdfast.launch.supervise.processes._GRACE_S", 0.3)
    child = sleeper(before)
    process = Process.of(child.pid)
    assert process is not None

    end_gently(process)

    assert child.wait(10) == -ended_by


ORPHANS = """
import os, subprocess, sys, time
from holdfast.launch.supervise.processes import adopt_orphans, children_of, end_children
adopt_orphans()
leave = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
child = subprocess.Popen([sys.executable, "-c", leave], stdout=subprocess.PIPE, text=True)
orphan = int(child.stdout.readline())
child.wait()
assert children_of(os.getpid()) == [orphan]
end_children()
assert children_of(os.getpid()) == []
assert not os.path.exists(f"/proc/{orphan}")
"""


def test_what_a_child_leaves_behind_is_adopted_and_ended():
    done = subprocess.run([sys.executable, "-c", ORPHANS], timeout=60, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_process_that_ends_while_its_children_are_listed_has_none(monkeypatch):
    def gone(_, pattern):
        raise FileNotFoundError(2, "No such file or directory", "/proc/1524/task")
        yield

    monkeypatch.setattr(Path, "glob", gone)
    assert children_of(os.getpid()) == []


def test_descendants_are_children_and_theirs():
    child = sleeper(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])")
    below = descendants_of(os.getpid())
    (grandchild,) = descendants_of(child.pid)

    assert Process.of(child.pid) in below
    assert grandchild in below
    assert grandchild.send(signal.SIGKILL)
    child.kill()
    child.wait(10)


def run(text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    try:
        exec(compile(text, str(script), "exec"), {})  # noqa: S102
    except BaseException as error:
        return describe(error, script)
    raise AssertionError("it did not raise")


@pytest.mark.parametrize(
    ("line", "is_bug"),
    [
        ("1 / 0", True),
        ("raise __import__('holdfast').errors.ScriptError('twice')", True),
        ("open('no such file')", True),
        ("raise OSError(28, 'No space left on device')", False),
        ("raise ConnectionResetError('storage')", False),
        ("raise MemoryError", False),
        ('raise RuntimeError("can\'t start new thread")', False),
        ("raise __import__('holdfast').errors.StoreLost('gone')", False),
        ("raise __import__('holdfast').errors.CheckpointError('no storage')", False),
        ("raise SystemExit(3)", False),
        ("raise KeyboardInterrupt", False),
    ],
)
def test_an_error_that_another_try_may_avoid_is_no_bug(tmp_path, line, is_bug):
    assert run(line, tmp_path).is_bug is is_bug


def test_lost_ranks_are_known_through_the_error_of_a_callback_and_of_what_followed(tmp_path):
    lost = "__import__('holdfast').errors.RanksLost('gone')"
    wrapped = "raise RuntimeError('Got the following error when running the callback: RanksLost: gone')"

    assert run(f"raise {lost}", tmp_path).is_loss
    assert run(wrapped, tmp_path).is_loss
    assert run(f"try:\n    raise {lost}\nfinally:\n    1 / 0", tmp_path).is_loss
    assert not run("1 / 0", tmp_path).is_loss
    assert run(f"try:\n    raise {lost}\nexcept RuntimeError as e:\n    raise KeyError(1) from e", tmp_path).is_loss


@pytest.mark.parametrize("mistake", ["undefined", "error.surviors", "1 + None", "raise ValueError from None"])
def test_a_mistake_where_a_script_handles_a_loss_is_a_bug(tmp_path, mistake):
    lost = "raise __import__('holdfast').errors.RanksLost('gone')"
    failed = run(f"try:\n    {lost}\nexcept RuntimeError as error:\n    {mistake}", tmp_path)

    assert failed.is_bug
    assert not failed.is_loss
    assert failed.traceback


def test_a_traceback_begins_in_the_script(tmp_path):
    failed = run("def f():\n    1 / 0\nf()\n", tmp_path)

    assert (failed.message, failed.exit_code) == ("ZeroDivisionError: division by zero", 1)
    assert failed.traceback.splitlines()[1].startswith(f'  File "{tmp_path / "train.py"}", line 3')
    assert Path(__file__).name not in failed.traceback
    ours = run("from holdfast.errors import InternalError\nraise InternalError('no')\n", tmp_path)
    assert "line 2" in ours.traceback, "our own mistakes have one, too"
    assert run("import sys\nsys.exit(3)\n", tmp_path).message == "train.py ended with sys.exit(3)"


@pytest.mark.parametrize(("kind", "exit_code"), [(ConfigError, 2), (TooFewWorkers, 1)])
def test_our_own_errors_are_one_line_with_the_place(tmp_path, kind, exit_code):
    failed = run(f"from holdfast.errors import {kind.__name__}\n\nraise {kind.__name__}('no')\n", tmp_path)

    assert (failed.message, failed.traceback, failed.exit_code) == ("no (train.py, line 3)", "", exit_code)


def test_a_script_that_cannot_be_read_shows_where(tmp_path):
    failed = run("def f(:\n", tmp_path)

    assert failed.message == "SyntaxError: invalid syntax"
    assert "train.py" in failed.traceback


def test_each_victim_is_killed_once_when_its_time_has_come(monkeypatch):
    killed, now_s = [], 10.0
    monkeypatch.setattr("holdfast.launch.fleet.node_faults.mtbf_schedule", lambda *_: [(1.0, 2), (1.5, 0)])
    monkeypatch.setattr(
        "holdfast.launch.fleet.node_faults.kill_worker", lambda run, bus, attempt, rank: killed.append(rank)
    )
    job = SimpleNamespace(mtbf_s=1.0, workers=3, settings=Settings(), node_rank=0)
    clock, state = SimpleNamespace(now_s=lambda: now_s), SimpleNamespace(living=lambda: (0, 1, 2))
    run = SimpleNamespace(job=job, clock=clock, state=state)
    injector = FaultInjector(run, SimpleNamespace(progress=SimpleNamespace(commit=committed(0))), FaultPlan())

    counts = []
    for now_s in (10.0, 10.9, 11.0, 11.4, 12.0, 99.0):  # noqa: B007 - the clock reads it
        injector.kill_random(None)
        counts.append(len(killed))

    assert (counts, killed) == ([0, 0, 1, 1, 2, 2], [2, 0])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_far_the_run_is(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    view = make_view(screen)

    view.show(RunStatus(step=7, alive={0: 11}, metrics={}))
    view.show(RunStatus(step=30, planned=120, alive={0: 11, 2: 12}, metrics={"loss": 0.5}))
    view.print_line("lost rank 1")
    view.output(2, "[bold] is no markup")
    view.close()

    assert "7/" not in screen.getvalue(), "without a plan there is no total"
    for text in ("30/120", "loss 0.5", "0 (pid 11)  2 (pid 12)", "holdfast: lost rank 1", "[2] [bold] is no markup"):
        assert text in screen.getvalue()


@pytest.fixture
def ddp_launcher():
    """A launcher that has heard that the script speaks to torch.distributed, and was asked to stop."""
    job = Job(script=Path("train.py"), settings=Settings(fabric="ulfm", workers=3))
    with Launcher(dataclasses.replace(job, grace_s=0.0), Said()) as launcher:
        launcher._state.begin((0, 1, 2))
        launcher._bus.poll(started(**DDP))
        launcher._stopping.request()
        yield launcher


def test_what_follows_a_step_of_the_tear_down_that_raises_is_done_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    view, before = Said(), signal.getsignal(signal.SIGTERM)
    job = Job(script=Path("train.py"), settings=Settings(fabric="ulfm", workers=1))

    launcher = Launcher(job, view).__enter__()
    memory_dir = launcher._paths.memory_dir
    launcher._attempt = SimpleNamespace(end=full_disk)
    assert signal.getsignal(signal.SIGTERM) != before
    assert list(tmp_path.iterdir())

    with pytest.raises(OSError, match="the disk is full"):
        launcher.__exit__(None, None, None)

    assert view.is_closed
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.iterdir())
    assert memory_dir is None or not memory_dir.exists()


def full_disk():
    raise OSError("the disk is full")


def test_what_a_launcher_has_made_is_undone_if_it_cannot_begin(monkeypatch, tmp_path):
    """The program that reaches other hosts was removed since the options were checked."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    hosts, shared = (Host("here", 1),), tmp_path / "shared"
    settings = Settings(fabric="ulfm", workers=1)
    job = Job(script=Path("train.py"), settings=settings, hosts=hosts, run_dir=shared, launch_agent="no-such-agent")

    with pytest.raises(ConfigError, match="--launch-agent no-such-agent cannot be run"), Launcher(job, Said()):
        pass

    assert not list(shared.iterdir())
    assert not list((tmp_path / "t").iterdir())


class Said(RunView):
    def __init__(self):
        self.lines = []
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def print_line(self, line):
        self.lines.append(line)


class Deaf:
    """A start of the job whose ranks do not answer a signal."""

    processes = (0, 1, 2)

    def send(self, rank, number):
        return True


def test_torch_distributed_is_not_said_to_save_when_it_is_stopped(ddp_launcher):
    ddp_launcher._stopping.advance(Deaf())

    line = "stopping: the ranks receive SIGTERM, within 0 s (Ctrl-C to stop immediately)"
    assert ddp_launcher._view._view.lines == [line]
    assert ddp_launcher._stopping.timed_out() == JobBroken("stopped on request, but the ranks did not end within 0 s")
    assert ddp_launcher._restart(JobLost("rank 0 killed by SIGTERM"), (1,)) == JobBroken(
        "stopped on request: rank 0 killed by SIGTERM"
    )


def test_each_start_of_a_job_has_a_port_of_its_own_unless_one_is_set(monkeypatch, tmp_path):
    places = RunPaths(run_dir=tmp_path, log_dir=tmp_path, memory_dir=None)
    monkeypatch.delenv("MASTER_PORT", raising=False)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(_environment(Settings(), places, 30.0)["MASTER_PORT"])))
        taken.listen()
        other = _environment(Settings(), places, 30.0)["MASTER_PORT"]
        assert other != str(taken.getsockname()[1])
    monkeypatch.setenv("MASTER_PORT", "12345")
    assert _environment(Settings(), places, 30.0)["MASTER_PORT"] == "12345"


# -- stopping


class Waiting:
    """Workers that are there, or not yet."""

    def __init__(self, *there):
        self.processes, self.there, self.told = (0, 1, 2), set(there), []

    def send(self, rank, number):
        if rank in self.there:
            self.told.append((rank, number))
        return rank in self.there


@pytest.fixture
def stopping(tmp_path):
    run = SimpleNamespace(
        job=SimpleNamespace(grace_s=10.0, nnodes=1, node_timeout_s=4.0),
        clock=SimpleNamespace(now_s=lambda: 5.0),
        view=SimpleNamespace(print_line=lambda line: None),
        paths=SimpleNamespace(run_dir=tmp_path),
        fleet=SimpleNamespace(is_needed=True, stop_all=lambda: True),
        state=JobState("train.py"),
    )
    return StopProcedure(run, SimpleNamespace(progress=RunProgress()))


def test_who_is_still_being_started_is_told_to_stop_as_soon_as_it_is_there_and_nobody_twice(stopping):
    workers = Waiting(0)
    stopping.request()
    stopping.advance(workers)
    workers.there |= {1, 2}
    stopping.advance(workers)
    stopping.advance(workers)

    assert workers.told == [(rank, signal.SIGTERM) for rank in (0, 1, 2)]


@pytest.mark.parametrize(("nnodes", "is_needed"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_launcher_that_lost_the_store_stops_the_whole_job_only_where_no_other_node_goes_on_without_it(
    stopping, nnodes, is_needed, is_asked
):
    stopping._run.job.nnodes, stopping._run.fleet.is_needed = nnodes, is_needed
    stopping._run.fleet.stop_all = lambda: is_needed
    workers = Waiting(0, 1, 2)
    workers.is_running = lambda: True
    if is_asked:
        stopping.request()
        stopping.advance(workers)

    assert stopping.without_store(workers, "it is gone") is None

    assert workers.told == [(rank, signal.SIGTERM) for rank in (0, 1, 2) if is_needed]
    assert stop_path(stopping._run.paths.run_dir).exists() == is_needed


@pytest.mark.parametrize(
    ("numbers", "at_once"),
    [
        ([signal.SIGINT], False),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGINT, signal.SIGINT, signal.SIGTERM], True),
    ],
)
def test_the_second_ctrl_c_of_a_person_stops_at_once_whoever_else_has_asked(stopping, numbers, at_once):
    stopping.request()  # another launcher was stopped
    for number in numbers:
        stopping._on_signal(number, None)

    assert stopping.is_requested
    assert (stopping.timed_out() is not None) is at_once


def test_a_job_that_is_stopped_waits_for_its_sinks_while_there_is_time_to_report(stopping):
    assert stopping.patience_s() == math.inf
    stopping.request()
    assert stopping.patience_s() == 5.0, "half of the grace period"
    stopping.advance(Waiting(0))
    stopping._run.clock = SimpleNamespace(now_s=lambda: 9.0)
    assert stopping.patience_s() == 3.0
    stopping._run.clock = SimpleNamespace(now_s=lambda: 20.0)
    assert stopping.patience_s() == 1.0


KILLED = JobBroken("stopped on request, but the workers died before they could save")
COMMITTED = committed(4)
SAVED = CheckpointSaved(t_s=1.0, rank=0, step=5, path="ckpt/step-00000005", size_bytes=1, seconds=0.0)


@pytest.mark.parametrize(
    ("records", "verdict", "code"),
    [
        ([], KILLED, 4),
        ([], JobLost("rank 0 killed by SIGTERM"), 4),
        ([], JobBroken("train.py ended without training", is_final=True), 4),  # a handler called sys.exit(0)
        ([], NodeDeparted(), None),
        ([], JobBroken("no such option", exit_code=2), None),
        ([], JobBroken("KeyError", traceback="T", is_final=True), None),  # a bug, which would end the next start, too
        ([], JobBroken("RuntimeError", traceback="T"), 4),  # raised because others had ended
        ([COMMITTED, SAVED], KILLED, 4),
        ([COMMITTED], KILLED, None),  # the steps of the earlier start are lost
    ],
)
def test_a_stop_before_training_loses_nothing_unless_steps_were_lost_before_or_the_script_fails(
    stopping, records, verdict, code
):
    for record in records:
        stopping._run.state.apply(record)
    assert stopping.before_training(verdict) is verdict
    stopping.request()

    said = stopping.before_training(verdict)

    assert said is verdict if code is None else (said.exit_code, said.message[:14]) == (code, "stopped before")


@pytest.mark.parametrize("code", [0, 4])
def test_a_node_that_left_ends_with_the_code_of_its_scheduler(code):
    job = Job(script=Path("train.py"), settings=Settings(workers=1), nnodes=2, node_rank=1, left_code=code)

    ended, message, traceback = explain(job, NodeDeparted(), JobState("train.py"))

    assert (ended, traceback) == (code, "")
    assert message == "the workers of node 1 have left as requested; the job continues"


@pytest.mark.parametrize(
    ("lost", "could_not_connect", "code"),
    [(JobLost("lost"), False, 93), (JobLost("lost"), True, 1), (JobLost("lost", is_final=False), False, 1)],
)
def test_restarts_are_worth_another_try_without_connections_and_after_lost_ranks(lost, could_not_connect, code):
    job = Job(script=Path("train.py"), settings=Settings(workers=2))

    given = {"in_vain": 3, "stopping": False, "distributed": False, "could_not_connect": could_not_connect}
    broken = why_not_again(job, lost, 3, 2, **given)

    assert broken is not None
    line = "no new step was committed since 3 restarts (--max-no-progress 3): lost"
    assert explain(job, broken, JobState("train.py")) == (code, line, "")
