"""``holdfast status`` and ``holdfast top``: the jobs that run on this machine, and runs that have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import usual_records
from usual_records import finished, recovered

from holdfast.cli import main
from holdfast.cli.run_text import WORKER_COLUMNS, facts
from holdfast.cli.top import _job_lines, _screen
from holdfast.config import Settings
from holdfast.launch.control import announce, note_wait, running_jobs
from holdfast.launch.job import Job
from holdfast.launch.supervise.processes import Process, WatchedWorker, pair_path
from holdfast.observe.monitor.observed import ObservedJob
from holdfast.observe.monitor.usage import UsageMeter
from holdfast.records.encoding import record_to_dict
from holdfast.records.types import WorkerEnded


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A folder for temporary files, in which no job runs yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def begun(rank):
    return usual_records.started(rank, t_s=1.0)


def committed(step, **more):
    return usual_records.committed(step, t_s=2.0 + step, **{"metrics": {"loss": 1.0 / (step + 1)}} | more)


def killed(rank, step):
    return WorkerEnded(t_s=4.4, rank=rank, step=step, exit_code=-9, pid=17)


AGAIN = [recovered(rank, t_s=4.5, step=3, lost=(1,), redone_steps=1) for rank in (0, 2)]
RECORDS = [*map(begun, range(3)), *map(committed, range(3)), killed(1, 3), *AGAIN]


def write_records(path, records):
    with path.open("a") as file:
        file.writelines(json.dumps(record_to_dict(record)) + "\n" for record in records)


def started(temp, records=(), name="train.py", report_dir=None, pid=None, workers=3):
    """A job of this process, or of another, whose workers have written these records."""
    run_dir = Path(tempfile.mkdtemp(prefix="holdfast-1-", dir=temp))
    job = Job(script=Path(name), settings=Settings(fabric="gloo", workers=workers), report_dir=report_dir)
    announce(run_dir, job, time.monotonic() - 60)
    if pid is not None:
        about = run_dir / "job.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"process": str(Process.of(pid))}))
    write_records(run_dir / "records-0.jsonl", records)
    WatchedWorker(Process.of(os.getpid()), Process.of(os.getpid())).note(pair_path(run_dir, 0))
    return run_dir


def said(capsys, *words):
    """The exit code of a command, and what it prints."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    return end.value.code, capsys.readouterr()


# -- status


def test_the_only_job_is_shown_with_its_workers_and_events(temp, capsys):
    started(temp, RECORDS)

    code, printed = said(capsys, "status")

    assert code == 0
    for part in (
        f"train.py: job {os.getpid()}\n",
        "33 %, 1 steps/s, about 6 s left, loss 0.3333",
        "1; the last at step 3: lost rank 1 (killed by SIGKILL)",
        "lost rank 1; step 3 is computed again with ranks 0, 2",
    ):
        assert part in printed.out
    assert [line.split()[:2] for line in printed.out.splitlines() if line[:1].isdigit()][:3] == [
        ["0", "training"],
        ["1", "lost"],
        ["2", "training"],
    ]


def test_a_job_that_does_not_train_yet_says_what_it_waits_for(temp, capsys):
    run_dir = started(temp)
    note_wait(run_dir, "waiting for node 1: rendezvous, 1 of 2 nodes")

    assert "start  waiting for node 1: rendezvous, 1 of 2 nodes" in said(capsys, "status")[1].out
    write_records(run_dir / "records-0.jsonl", RECORDS)
    assert "waiting for" not in said(capsys, "status")[1].out


def test_json_is_the_state_of_the_live_view_with_what_the_job_waits_for(temp, capsys):
    note_wait(started(temp, RECORDS), "the first step")

    state = json.loads(said(capsys, "status", "--json")[1].out)

    assert state["waits_for"] == "the first step"
    assert (state["progress"]["step"], state["run"]["live"]) == (3, True)
    assert state["workers"][0]["pid"] == os.getpid()
    assert 59 < state["now_s"] < 90


@pytest.mark.parametrize(("nnodes", "workers", "spares"), [(1, 3, 0), (2, 3, 0), (3, 2, 1), (1, 1, 2)])
def test_a_worker_belongs_to_the_node_that_the_job_gives_it_to(temp, nnodes, workers, spares):
    settings = Settings(fabric="gloo", workers=workers, spares=spares)
    job = Job(script=Path("train.py"), settings=settings, nnodes=nnodes, node_rank=nnodes - 1)
    running = announce(Path(tempfile.mkdtemp(prefix="holdfast-1-", dir=temp)), job)
    ranks = [*job.ranks, 100]

    assert [running.home(rank) for rank in ranks] == [job.home(rank) for rank in ranks]
    assert [row["id"] for row in ObservedJob(running).live.full(0.0)["nodes"]] == list(range(nnodes))


def test_several_jobs_are_listed_and_one_can_be_chosen(temp, capsys):
    other = subprocess.Popen(["sleep", "600"])
    try:
        started(temp, RECORDS)
        started(temp, name="other.py", pid=other.pid)

        code, printed = said(capsys, "status")
        assert code == 0
        assert "train.py" in printed.out
        assert f"{other.pid}  other.py" in printed.out
        assert len(json.loads(said(capsys, "status", "--json")[1].out)) == 2
        assert f"other.py: job {other.pid}" in said(capsys, "status", "--job", other.pid)[1].out
    finally:
        other.kill()
        other.wait()


def test_without_a_job_the_answer_is_no(temp, capsys):
    assert said(capsys, "status")[0] == 1
    assert said(capsys, "status", "--json")[1].out == "[]\n"
    assert said(capsys, "top") == (1, ("no job of yours runs on this machine\n", ""))
    assert "no job of yours runs" in _screen([], 80, 24).renderables[1].plain


def report_in(folder, outcome, checkpoint=""):
    folder.mkdir(exist_ok=True)
    workers = {"ranks_started": [0, 1, 2], "ranks_spare": []}
    kinds = {"step_s": {}, "failures": [], "samples": {}, "replicas": {}, "metrics": {}}
    report = {"schema": 1, "outcome": outcome, "workers": workers, "steps": 3, "wall_s": 9.0, "restarts": 0, **kinds}
    (folder / "report.json").write_text(json.dumps(report | {"checkpoint": checkpoint, "job": {"script": "train.py"}}))
    return folder


@pytest.mark.parametrize(
    ("outcome", "checkpoint", "code"),
    [("done", "", 0), ("failed", "", 1), ("gave-up", "saved", 1), ("stopped", "saved", 4), ("stopped", "", 1)],
)
def test_a_run_that_has_ended_gives_its_exit_code(temp, capsys, outcome, checkpoint, code):
    out = report_in(temp / "out", outcome, checkpoint)
    ends = [finished(rank, t_s=8.0, step=3, outcome=outcome) for rank in (0, 2)] if outcome != "failed" else []
    write_records(out / "events.jsonl", [*RECORDS, *ends])

    found, printed = said(capsys, "status", out)

    assert found == code
    assert f"train.py: {out}\n" in printed.out
    assert "memory" not in printed.out  # nothing is known of it


def test_the_report_directory_of_a_running_job_is_that_job(temp, capsys):
    started(temp, RECORDS, report_dir=temp / "out")
    report_in(temp / "out", "failed")  # of an earlier run

    code, printed = said(capsys, "status", temp / "out")

    assert code == 0
    assert f"job {os.getpid()}" in printed.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["missing"], "missing is no directory; give the report directories of runs"),
        (
            ["."],
            ". has no run: there is no report.json, and no records of a running job; give the directory of holdfast",
        ),
        ([".", "--job", "3"], "give either DIR or --job, got . and --job 3"),
        (["--job", "3"], "no job of yours runs on this machine, and none has a launcher with PID 3"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(temp, capsys, monkeypatch, words, error):
    monkeypatch.chdir(temp)

    code, printed = said(capsys, "status", *words)

    assert code == 2
    assert printed.err.startswith(f"error: {error}")
    assert printed.err.count("\n") == 1


# -- top


def observed(temp, records, workers=3):
    started(temp, records, workers=workers)
    job = ObservedJob(next(running_jobs()))
    job.poll()
    return job


def test_without_a_terminal_top_prints_one_frame(temp, capsys):
    started(temp, RECORDS)

    code, printed = said(capsys, "top")

    assert code == 0
    assert all(head.removesuffix(">") in printed.out for head in WORKER_COLUMNS)
    assert " MB" in printed.out or " GB" in printed.out


@pytest.mark.parametrize("every", ["0", "0.05", "61", "nan"])
def test_the_time_between_two_frames_is_checked(every, capsys):
    code, printed = said(capsys, "top", "--every", every)

    assert code == 2
    assert printed.err == f"error: --every must be from 0.1 to 60 seconds, got {float(every):g}\n"


@pytest.mark.parametrize("width", [20, 40, 120])
@pytest.mark.parametrize("height", [1, 5, 12, 40])
def test_a_frame_fits_into_the_terminal(temp, width, height):
    job = observed(temp, RECORDS)

    lines = [part.plain for part in _screen([job, job], width, height).renderables]

    assert len(lines) <= max(2, height)
    assert max(map(len, lines)) <= width


def test_where_there_is_no_room_for_all_workers_those_that_train_are_left_out(temp):
    records = [*map(begun, range(100)), committed(0, workers=100), killed(70, 1)]
    lines = [line.plain for line in _job_lines(observed(temp, records, workers=100), 100, 12)]

    assert len(lines) <= 12, lines
    assert [line.split()[:2] for line in lines if line.strip()[:1].isdigit()][:1] == [["0", "training"]], lines
    assert ["70", "lost"] in [line.split()[:2] for line in lines], lines
    assert any(line.startswith("... and 9") for line in lines)


def test_of_a_thousand_workers_status_shows_those_that_do_not_train(temp, capsys):
    started(temp, [*map(begun, range(1000)), committed(0, workers=1000), killed(700, 1)], workers=1000)

    lines = said(capsys, "status")[1].out.splitlines()

    assert len(lines) < 60
    assert any(line.startswith("700 ") and "lost" in line for line in lines)
    assert "... and 960 more workers; --json has all of them" in lines


def test_text_of_a_script_cannot_write_to_the_terminal(temp):
    evil = "\x1b]0;title\x07"
    state = observed(temp, [*map(begun, range(3)), committed(0, metrics={evil: 1.0})]).live.full(3.0)

    assert "\x1b" not in "".join(text for _, text in facts(state))
    assert "\\x1b]0;title\\x07 1" in dict(facts(state))["progress"]


def test_all_recoveries_are_counted_not_only_those_that_are_kept(temp):
    state = observed(temp, RECORDS).live.full(6.0)
    row = {"id": 250, "step": 9, "lost": [], "decision": "redo", "duration_s": 0.5}
    counted = dict(facts(state | {"recoveries": [row | {"id": 249}, row]}))["recoveries"]
    assert counted.startswith("250; the last at step 9")


# -- what processes use


def test_a_busy_process_is_told_from_an_idle_one():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen(["sleep", "600"])
    try:
        meter, processes = UsageMeter(), [Process.of(busy.pid), Process.of(idle.pid)]
        for process in processes:
            meter.measure(process)
        time.sleep(0.5)
        used = [meter.measure(process) for process in processes]
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()

    assert used[0].cpu > 0.05 > used[1].cpu
    assert used[0].memory_bytes > 1e6 > 0 < used[1].memory_bytes


def test_of_a_process_that_has_ended_or_of_a_later_one_with_its_pid_nothing_is_known():
    process = subprocess.Popen(["sleep", "600"])
    known = Process.of(process.pid)
    later = Process(known.pid, known.started + 1)
    assert UsageMeter().measure(later) is None
    process.kill()
    process.wait()

    assert UsageMeter().measure(known) is None
