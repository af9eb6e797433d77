"""Runs of other launchers, read from their directories: finished, growing, replaced, damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from view_runs import a_kill, begun, finished, steps

from holdfast.errors import ConfigError
from holdfast.observe.monitor.dashboards import serve_runs
from holdfast.observe.monitor.feed import Refused
from holdfast.observe.monitor.followed import FollowedFolder
from holdfast.records.encoding import record_to_dict
from holdfast.summary.files import write_report

BAD = "<img src=x onerror=alert(1)>"


def lines(records):
    return "".join(json.dumps(record_to_dict(record)) + "\n" for record in records)


def told_of(run):
    return run.live.full(run.now_s())


def test_a_finished_run_has_the_numbers_of_its_report(tmp_path):
    job = {"script": "dir/train.py", "settings": {"guard": "heal", "checkpoint_dir": "ck"}}
    report = write_report(a_kill(), tmp_path, started=range(3), wall_s=6.0, seed=0, command="holdfast run", job=job)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("the end\n")
    run = FollowedFolder(tmp_path, "out")
    told = told_of(run)

    assert {name: told["goodput"][name] for name in report["goodput"]} == report["goodput"]
    assert told["state"]["sentence"] == "Done after 40 steps in 6.00 s; 1 worker lost."
    assert told["run"]["ended"]
    assert not told["run"]["live"]
    assert (told["run"]["script"], told["run"]["command"], told["run"]["guard"]) == ("train.py", "holdfast run", "heal")
    assert run.log(0, 10) == ["the end"]
    with pytest.raises(Refused, match="started by another launcher"):
        run.act("stop", {})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["report.json", "records-0.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_left_out(tmp_path, name):
    """To open one would wait without end for a program that writes to it."""
    os.mkfifo(tmp_path / name)
    assert told_of(FollowedFolder(tmp_path, "out"))["run"]["script"] == "out"


def test_a_growing_file_is_followed_half_lines_too(tmp_path):
    path, text = tmp_path / "events.jsonl", lines(a_kill())
    run = FollowedFolder(tmp_path, "out")
    for place in range(0, len(text), 777):
        with path.open("a") as file:
            file.write(text[place : place + 777])
        run.poll()
    told = told_of(run)

    assert told["progress"]["step"] == 40
    assert len(told["recoveries"]) == 1
    assert not told["run"]["ended"]


def test_a_file_that_was_truncated_or_replaced_is_another_run(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(lines(a_kill()))
    run = FollowedFolder(tmp_path, "out")
    assert told_of(run)["progress"]["step"] == 40
    first = run.live

    path.write_text(lines([*begun(1.0, range(2), workers=2), *steps(0, 4, 1.1)]))
    run.poll()
    assert run.live is not first
    assert told_of(run)["progress"]["step"] == 5
    assert len(told_of(run)["workers"]) == 2

    (tmp_path / "new").write_text(lines([*begun(1.0, range(3)), *steps(0, 19, 1.1)]))
    os.replace(tmp_path / "new", path)
    run.poll()
    assert told_of(run)["progress"]["step"] == 20


def test_the_report_that_is_written_at_the_end_ends_the_run(tmp_path):
    (tmp_path / "events.jsonl").write_text(lines([*begun(1.0, range(3)), *steps(0, 39, 1.1)]))
    run = FollowedFolder(tmp_path, "out")
    assert not told_of(run)["run"]["ended"]

    records = [*begun(1.0, range(3)), *steps(0, 39, 1.1), *finished(5.5, range(3))]
    write_report(records, tmp_path, started=range(3), wall_s=6.0, seed=0)
    run.poll()

    assert told_of(run)["state"] == {"level": "done", "sentence": "Done after 40 steps in 6.00 s."}


def test_a_file_to_which_nothing_is_written_may_be_of_a_dead_job(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(lines([*begun(1.0, range(3)), *steps(0, 9, 1.1)]))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 600))
    told = told_of(FollowedFolder(tmp_path, "out"))

    assert told["state"]["level"] == "warning"
    assert told["state"]["sentence"].startswith("Nothing was written for 10 min")


def test_the_files_of_a_running_job_are_put_in_the_order_of_time(tmp_path):
    for rank in (*range(4), -1):
        own = [record for record in a_kill() if record.rank == rank]
        (tmp_path / f"records-{rank}.jsonl").write_text(lines(own))
    run = FollowedFolder(tmp_path, "train.py-1", lambda action, values: action, ("stop",))
    (tmp_path / "sorted").mkdir()
    (tmp_path / "sorted" / "events.jsonl").write_text(lines(sorted(a_kill(), key=lambda record: record.t_s)))
    told, calm = told_of(run), told_of(FollowedFolder(tmp_path / "sorted", "out"))

    assert told["run"]["live"]
    assert run.act("stop", {}) == "stop"
    for section in ("recoveries", "lanes"):
        assert told[section] == calm[section]
    assert told["goodput"]["badput_s"]["agreement"] == calm["goodput"]["badput_s"]["agreement"]


@pytest.mark.parametrize(
    "report",
    [
        "{",
        "null",
        '{"wall_s": "x", "workers": 3, "job": [], "error": 1}',
        '{"wall_s": 1e400}',
        '{"outcome": 3, "wall_s": 2.0}',
    ],
)
def test_a_report_of_any_content_is_no_error(tmp_path, report):
    (tmp_path / "report.json").write_text(report)
    (tmp_path / "events.jsonl").write_bytes(b"\x00\xff\n{}\n[]\n" + lines(begun(1.0, range(3))).encode())
    told = told_of(FollowedFolder(tmp_path, "out"))

    assert len(told["workers"]) == 3
    json.dumps(told, allow_nan=report != '{"wall_s": 1e400}')


@pytest.mark.parametrize(
    "wrong",
    [
        {"event": "StepCommitted", "metrics": [1]}, {"event": "StepCommitted", "metrics": {"loss": "x"}},
        {"event": "StepCommitted", "metrics": {"loss": 1}, "t_s": float("inf")}, {"event": "StepCommitted", "t_s": -1e300},
        {"event": "SettingChanged", "name": "speeds", "value": "{"}, {"event": "WorkerEnded", "exit_code": "x", "pid": []},
        {"event": "Recovered", "lost": 3, "survivors": None, "decision": 1, "redone_steps": "x", "generation": {}},
    ],
)  # fmt: skip
def test_records_with_values_of_other_types_are_skipped(tmp_path, wrong):
    text = lines([*begun(1.0, range(3)), *steps(0, 9, 1.1)])
    stamps = {"t_s": 1.5, "rank": 0, "step": 4, "epoch": 0, "samples": 1, "workers": 3}
    names = ("t_s", "rank", "step") if wrong["event"] != "StepCommitted" else tuple(stamps)
    line = json.dumps({name: stamps[name] for name in names} | wrong) + "\n"
    (tmp_path / "events.jsonl").write_text(text + line + lines(steps(10, 11, 2.2)))
    told = told_of(FollowedFolder(tmp_path, "out"))

    assert told["progress"]["step"] == 12
    json.dumps(told, allow_nan=False)


def test_names_in_a_report_stay_text(tmp_path):
    job = {"script": BAD, "settings": {}}
    write_report(a_kill(), tmp_path, started=range(3), wall_s=6.0, seed=0, command=BAD, job=job)
    told = told_of(FollowedFolder(tmp_path, "out"))

    assert told["run"]["command"] == BAD


def test_what_is_no_directory_or_port_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="is no directory"):
        serve_runs([tmp_path / "none"], "0", print)
    with pytest.raises(ConfigError, match=r"--port must be \[HOST:\]PORT"):
        serve_runs([tmp_path], "http://x", print)


def test_the_output_of_a_running_job_is_read_where_the_job_writes_it(tmp_path):
    run_dir, log_dir = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run_dir, log_dir):
        folder.mkdir()
    (log_dir / "rank-0.log").write_text("hello\n")

    run = FollowedFolder(run_dir, "train.py-1", lambda action, values: action, ("stop",), log_dir)
    assert run.log(0, 5) == ["hello"]


def test_sigterm_removes_the_folder_with_the_token(tmp_path):
    (tmp_path / "out").mkdir()
    words = [sys.executable, "-m", "holdfast", "dashboard", str(tmp_path / "out"), "--port", "0"]
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE) as server:
        try:
            assert b"dashboard at http" in server.stderr.readline()
            assert len(list(tmp_path.glob("holdfast-dashboard-*"))) == 1
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()
    assert list(tmp_path.glob("holdfast-dashboard-*")) == []
