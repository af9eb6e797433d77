"""The launcher's view of its workers' files: nothing is missed, and those of workers that have ended are closed."""

from __future__ import annotations

import errno
import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from some_records import some

from holdfast.config import Settings
from holdfast.launch.elasticity import ElasticWorkers
from holdfast.launch.fleet.base import Fleet
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobBroken
from holdfast.launch.launcher import Launcher
from holdfast.launch.population import WorkerPopulation
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.supervise.attempt import AttemptFiles, JobAttempt
from holdfast.launch.supervise.processes import Process, WatchedWorker, pair_path
from holdfast.records.files import FileRecorder
from holdfast.records.paths import records_path
from holdfast.records.types import StepCommitted, WorkerEnded

PID = 7


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "logs").mkdir()
    return RunPaths(run_dir=tmp_path, log_dir=tmp_path / "logs", memory_dir=None)


def say(paths, rank, text):
    with (paths.log_dir / f"rank-{rank}.log").open("a") as log:
        log.write(text)


def commit(paths, rank, step):
    recorder = FileRecorder(records_path(paths.run_dir, str(rank)))
    recorder.write(some(StepCommitted, t_s=float(step), rank=rank, step=step))
    recorder.close()


def die(paths, rank, *, late=False):
    """Record the end of a worker; ``late``: of one of an earlier start."""
    if not late:
        WatchedWorker(Process(PID, 1), Process(8, 1)).note(pair_path(paths.run_dir, rank))
    recorder = FileRecorder(records_path(paths.run_dir, f"watch-{rank}"))
    recorder.write(WorkerEnded(t_s=9.0, rank=rank, step=1, exit_code=-9, pid=PID))
    recorder.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_the_files_of_dead_workers_are_closed_and_what_comes_late_is_still_printed(paths):
    files, before = AttemptFiles(paths), open_files()
    for rank in range(8):
        files.follow([rank], [rank])
        say(paths, rank, f"begun {rank}\n")
        commit(paths, rank, 1)
        die(paths, rank)
        assert files.output() == [(rank, f"begun {rank}")]
        assert [type(record) for record in files.records()] == [StepCommitted, WorkerEnded], "its end comes last"
        for _ in range(50):
            assert files.output() == []
            assert files.records() == []
    for _ in range(100):
        files.output()
        files.records()

    assert open_files() == before
    say(paths, 3, "from a process that it had started\n")
    say(paths, 5, "and half a line")
    assert files.output() == []
    assert files.output(last=True) == [(3, "from a process that it had started"), (5, "and half a line")]
    assert open_files() == before


@pytest.mark.parametrize(("number", "goes_on"), [(errno.EACCES, True), (errno.ESTALE, True), (errno.EMFILE, False)])
def test_output_that_cannot_be_read_is_named_once_and_costs_the_job_nothing(paths, monkeypatch, number, goes_on):
    files = AttemptFiles(paths)
    files.follow([0], [0])

    def refuse_to_open(path, *_):
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as refused:
        refused.setattr("holdfast.launch.supervise.tail.os.open", refuse_to_open)
        if not goes_on:
            with pytest.raises(OSError, match=os.strerror(number)):
                files.output()
            return
        assert files.output() == files.output(last=True) == []
    log = paths.log_dir / "rank-0.log"
    assert files.warnings() == [f"cannot read {log}: {os.strerror(number)}; output in it is not shown"]
    assert files.warnings() == []
    say(paths, 0, "readable again\n")
    assert files.output() == [(0, "readable again")]


def attempt_in(folder):
    job = Job(script=folder / "train.py", settings=Settings(fabric="gloo", workers=2))
    return JobAttempt(Fleet(job), job.settings, (0, 1), RunPaths(run_dir=folder, log_dir=folder, memory_dir=None))


def test_what_was_started_for_workers_that_have_ended_is_forgotten_once_their_pair_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.launch.supervise.attempt.start", lambda *_: SimpleNamespace(poll=lambda: 0))
    attempt = attempt_in(tmp_path)
    gone = Process(pid=2**22, started=1)
    WatchedWorker(gone, gone).note(pair_path(tmp_path, 0))

    attempt.add(2)

    assert list(attempt._watchers) == [1, 2], "1 ended before it wrote a pair: nothing else says that it has ended"
    assert len(attempt._started) == 2
    assert all(map(attempt.is_ended, (0, 1, 2)))


def test_processes_are_known_although_their_file_was_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.launch.supervise.attempt.start", lambda *_: SimpleNamespace(poll=lambda: None))
    attempt = attempt_in(tmp_path)
    pair = WatchedWorker(Process(pid=2**22, started=1), Process(pid=2**22 + 1, started=1))
    pair.note(pair_path(tmp_path, 0))
    assert attempt.pair(0) == pair

    pair_path(tmp_path, 0).unlink()

    assert attempt.pair(0) == pair
    assert attempt.pair(1) is None
    attempt.disown([0])
    assert attempt.pair(0) is None


def refuse(*_):
    raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC), sys.executable)


REFUSED = f"cannot start {sys.executable}: Exec format error; it may have been replaced while this process ran"


def test_a_replacement_that_cannot_be_started_is_tried_again_and_costs_the_job_nothing(tmp_path, monkeypatch):
    started, lines = [], []
    monkeypatch.setattr(
        "holdfast.launch.supervise.attempt.start",
        lambda *given: started.append(given[1]) or SimpleNamespace(poll=lambda: None),
    )
    attempt = attempt_in(tmp_path)
    elastic = ElasticWorkers.__new__(ElasticWorkers)
    waits = []
    elastic._run = SimpleNamespace(
        fleet=attempt._fleet,
        population=WorkerPopulation(limit=3, next_rank=2),
        clock=SimpleNamespace(now_s=lambda: now_s),
        view=SimpleNamespace(print_line=lines.append),
        files=SimpleNamespace(follow=lambda *_: None),
        state=SimpleNamespace(wait_for=waits.append),
    )
    now_s = 0.0
    elastic._run.population.died(1, now_s)

    with monkeypatch.context() as broken:
        broken.setattr("holdfast.launch.supervise.attempt.start", refuse)
        elastic.start_newcomers(attempt)
    assert (waits, attempt.processes) == ([], (0, 1))
    assert lines == [f"rank 2 cannot be started: {REFUSED}"]

    now_s = 100.0
    elastic.start_newcomers(attempt)
    assert (waits, attempt.processes) == ([3], (0, 1, 3))
    assert started[-1]["HOLDFAST_SLOT"] == "2", "rank 2 has not kept a slot"


def test_a_start_that_fails_leaves_no_process_and_ends_the_job_in_one_line(tmp_path, monkeypatch):
    started, ended = [], []

    def start_one(*given):
        if started:
            refuse()
        started.append(SimpleNamespace(poll=lambda: None, pid=1))
        return started[-1]

    monkeypatch.setattr("holdfast.launch.supervise.attempt.start", start_one)
    monkeypatch.setattr("holdfast.launch.fleet.base.end", lambda processes, *_: ended.extend(processes))
    job = Job(script=tmp_path / "train.py", settings=Settings(fabric="gloo", workers=2))
    paths = RunPaths(run_dir=tmp_path, log_dir=tmp_path, memory_dir=None)
    launcher = Launcher.__new__(Launcher)
    launcher._fleet, launcher._job, launcher._fork_server = Fleet(job), job, None
    launcher._state = launcher._health = launcher._elastic = launcher._files = Mock()
    launcher._paths, launcher._settings = paths, lambda start: job.settings

    assert launcher._run_once() == JobBroken(f"the workers cannot be started: {REFUSED}")
    assert ended == started


def test_a_worker_that_lives_or_starts_again_is_read_on(paths):
    files = AttemptFiles(paths)
    files.follow([0, 1], [0, 1])
    commit(paths, 1, 1)
    die(paths, 1)
    assert len(files.records()) == 2
    for _ in range(200):
        files.records()
    commit(paths, 0, 2)
    assert [record.step for record in files.records()] == [2]

    files.follow([0, 1], [0, 1])  # the job is started again
    commit(paths, 1, 3)
    say(paths, 1, "again\n")

    assert [record.step for record in files.records()] == [3], "nothing is read twice"
    assert files.output() == [(1, "again")]
    files.close()


def test_the_last_read_returns_what_was_recorded_after_the_files_were_closed(paths):
    files, before = AttemptFiles(paths), open_files()
    for rank in range(3):
        files.follow([rank], [rank])
        die(paths, rank)
    for _ in range(110):
        files.records()
    assert open_files() == before
    for rank in range(3):
        commit(paths, rank, 5)

    assert files.records() == []
    assert [(record.rank, record.step) for record in files.records(last=True)] == [(0, 5), (1, 5), (2, 5)]
    assert files.records(last=True) == [], "nothing is read twice"
    assert open_files() == before


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_late_end_of_an_earlier_worker_does_not_close_the_files_of_the_one_that_lives(paths, has_begun):
    files = AttemptFiles(paths)
    files.follow([0], [0])
    if has_begun:
        WatchedWorker(Process(PID + 1, 1), Process(9, 1)).note(pair_path(paths.run_dir, 0))
    die(paths, 0, late=True)
    assert len(files.records()) == 1
    for _ in range(110):
        files.records()
    say(paths, 0, "still here\n")

    assert files.output() == [(0, "still here")]
    files.close()
