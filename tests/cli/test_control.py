"""``holdfast scale`` and ``holdfast set``: which job is meant, what may be asked of it, and one clear line if not."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.control import ControlRequest, RunningJob, advice, announce, append, check, find, request_changes
from holdfast.launch.job import Job
from holdfast.launch.supervise.processes import Process


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """Where jobs are looked for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other():
    """Another process that runs."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def run_dir(temp, name):
    """The folder of a run, as the launcher makes it."""
    return Path(tempfile.mkdtemp(prefix=f"holdfast-{name}-", dir=temp))


def job(**settings):
    """A job as the launcher knows it."""
    return Job(script=Path("train.py"), settings=Settings(**({"fabric": "gloo", "workers": 4} | settings)))


def started(temp, process=None, **settings):
    """Announce a job of this process, or as if it were another's."""
    running = announce(run_dir(temp, "1"), job(**settings))
    if process is not None:
        about = running.run_dir / "job.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"process": str(Process.of(process.pid))}))
    return running


def refusal(call, *args, **kwargs):
    """What is said of it: one line."""
    with pytest.raises(ConfigError) as refused:
        call(*args, **kwargs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -- which job


def test_the_only_job_is_found(temp):
    running = started(temp)

    assert find() == find(os.getpid()) == running
    assert (running.pid, running.script, running.slices) == (os.getpid(), "train.py", 4)


def test_without_a_job_it_says_where_it_looked(temp):
    assert refusal(find) == f"no job of yours runs on this machine (searched {temp}); start one with holdfast run"
    assert "and none has a launcher with PID 17 " in refusal(find, 17)


def test_of_several_jobs_one_must_be_named(temp, other):
    started(temp)
    second = started(temp, other)

    said = refusal(find)
    assert said.startswith("2 jobs are running: ")
    assert f"{os.getpid()} (train.py)" in said
    assert f"{other.pid} (train.py)" in said
    assert said.endswith("; choose one with --job NUMBER")
    assert find(other.pid).run_dir == second.run_dir


def test_the_only_job_is_taken_without_its_number_only_where_it_was_started(temp, monkeypatch):
    running = started(temp)
    folder = os.getcwd()
    monkeypatch.chdir(temp)

    assert refusal(find) == (
        f"job {os.getpid()} (train.py) was started in {folder}, not here: name it with --job {os.getpid()}"
    )
    assert find(os.getpid()) == running


def test_a_number_that_no_launcher_has_is_answered_with_those_that_have_one(temp):
    started(temp)

    assert refusal(find, 1) == (f"--job must be the PID of a running launcher: {os.getpid()} (train.py); got 1")


def test_a_job_whose_launcher_is_gone_is_not_found_even_if_its_number_was_given_away(temp, other):
    started(temp, other)
    about = next(temp.glob("holdfast-*/job.json"))
    told = json.loads(about.read_text())
    about.write_text(json.dumps(told | {"process": f"{other.pid} 1"}))  # the same number, started at another time

    assert "no job of yours" in refusal(find)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": 3}', "\x00"])
def test_a_file_that_is_not_ours_is_passed_over(temp, text):
    (run_dir(temp, "2") / "job.json").write_text(text)
    running = started(temp)

    assert find() == running


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("given_away", ["file", "folder"])
def test_the_job_of_another_user_is_not_found(temp, given_away):
    running = started(temp)
    os.chown(running.run_dir / "job.json" if given_away == "file" else running.run_dir, 12345, 12345)

    assert "no job of yours" in refusal(find)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_to_a_file_of_ours_is_not_followed(temp):
    about = started(temp).run_dir / "job.json"
    about.rename(temp / "elsewhere.json")
    about.symlink_to(temp / "elsewhere.json")
    assert find().script == "train.py"

    os.chown(about, 12345, 12345, follow_symlinks=False)

    assert "no job of yours" in refusal(find)


def test_a_job_that_has_ended_meanwhile_is_named(temp):
    running = started(temp)
    (running.run_dir / "job.json").unlink()
    running.run_dir.rmdir()

    assert refusal(request_changes, running, lr=0.1) == f"job {os.getpid()} (train.py) has ended in the meantime"


# -- what may be asked


def running(**settings):
    return RunningJob.of(job(**settings))


GOOD = [{"workers": 1}, {"workers": 1024}, {"lr": 0}, {"lr": 0.1}, {"batch_size": 1}, {"strategy": "forward"}]


@pytest.mark.parametrize("changes", [*GOOD, {"lr": 0.1, "batch_size": 64, "strategy": "rollback"}])
def test_what_is_allowed_is_passed_on_as_it_is(temp, changes):
    there = started(temp)

    request_changes(there, **changes)

    assert ControlRequest(there.run_dir, pytest.fail).new() == [changes]


BAD = [
    ({}, "no change requested: give at least one of --lr"),
    ({"workers": 0}, "WORKERS must be a whole number from 1 to 1024, got 0"),
    ({"workers": -3}, "WORKERS must be a whole number from 1 to 1024, got -3"),
    ({"workers": 1025}, "WORKERS must be a whole number from 1 to 1024, got 1025"),
    ({"workers": True}, "WORKERS must be a whole number"),
    ({"workers": 1, "min_workers": 2}, "WORKERS must be at least 2, the job's --min-workers, got 1"),
    ({"lr": -0.1}, "--lr must be a finite number, at least 0, got -0.1"),
    ({"lr": float("nan")}, "--lr must be a finite number, at least 0, got nan"),
    ({"lr": float("inf")}, "--lr must be a finite number, at least 0, got inf"),
    ({"lr": 10**400}, "--lr must be a finite number, at least 0, got 1000"),
    ({"lr": "fast"}, "--lr must be a finite number, at least 0, got 'fast'"),
    ({"batch_size": 0}, "--batch-size must be a whole number from 1 to 2147483647, got 0"),
    ({"batch_size": 2**40}, "--batch-size must be a whole number from 1 to"),
    ({"batch_size": 1.5}, "--batch-size must be a whole number from 1 to"),
    ({"strategy": "hope"}, "--strategy must be one of rollback, forward, restart, got 'hope'"),
    ({"strategy": "reinit"}, "--strategy reinit must be set when the job starts"),
    ({"strategy": "restart"}, "--strategy restart needs a checkpoint directory, and job"),
    ({"checkpoint_every": 5}, "--checkpoint-every needs a checkpoint directory, and job"),
    ({"checkpoint_every": -1, "checkpoint_dir": "c"}, "--checkpoint-every must be a whole number from 0 to"),
    ({"momentum": 0.9}, "momentum cannot be changed while a job runs; these can: workers, lr, batch_size, strategy"),
    ({"workers": 3, "fabric": "ulfm"}, "runs with --fabric ulfm, which cannot add or remove workers"),
    ({"workers": 3, "fabric": "virtual"}, "runs with --fabric virtual, which cannot add or remove workers"),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_what_is_not_allowed_is_refused_in_one_line(changes, said):
    settings = {k: v for k, v in changes.items() if k in ("min_workers", "checkpoint_dir", "fabric")}
    asked = {k: v for k, v in changes.items() if k not in settings}

    assert said in refusal(check, asked, running(**settings))


def test_with_a_place_for_checkpoints_they_and_restart_may_be_asked_for():
    check({"strategy": "restart", "checkpoint_every": 0}, running(checkpoint_dir="c"))


def test_more_workers_than_slices_are_allowed_and_explained():
    assert "4 slices, so 2 of 6 workers will be idle spares" in advice(running(), {"workers": 6})
    assert advice(running(), {"workers": 4}) == ""
    assert advice(running(split="even"), {"workers": 6}) == ""
    assert advice(running(), {"lr": 1.0}) == ""


def test_the_launcher_takes_each_line_once_and_none_that_is_half_written(tmp_path):
    asked = ControlRequest(tmp_path, pytest.fail)
    assert asked.new() == []

    append(tmp_path / "asked.jsonl", {"lr": 0.1})
    with (tmp_path / "asked.jsonl").open("a") as file:
        file.write('{"lr": ')
    assert asked.new() == [{"lr": 0.1}]

    with (tmp_path / "asked.jsonl").open("a") as file:
        file.write("0.2}\n")
    assert asked.new() == [{"lr": 0.2}]
    assert asked.new() == []


BAD_LINES = [
    b"lr = 0.1",
    b"",
    b'{"lr": 0.',
    b"17",
    b"null",
    b'["lr"]',
    b"\xff\xfe",
    b'{"\\ud800": 1}',
    b'{"a\\nb": 1}',
    b'{"lr": 1' + b"0" * 5000 + b"}",
    b'{"lr": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"lr": 0.1, "why": "' + b"x" * (10 << 20) + b'"}',
]


def test_a_line_that_asks_for_nothing_is_said_once_and_passed_over(tmp_path):
    said = []
    asked = ControlRequest(tmp_path, said.append)
    append(tmp_path / "asked.jsonl", {"lr": 0.1})
    with (tmp_path / "asked.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in BAD_LINES)
        file.write(b'{"lr": ')

    assert asked.new() == [{"lr": 0.1}]
    assert asked.new() == []
    assert [int(line.split()[3]) for line in said] == list(range(2, 2 + len(BAD_LINES)))
    assert all(len(line) < 300 and "\n" not in line for line in said)

    with (tmp_path / "asked.jsonl").open("a") as file:
        file.write("0.2}\n")
    assert asked.new() == [{"lr": 0.2}]


def test_a_folder_in_the_place_of_the_file_asks_for_nothing(tmp_path):
    (tmp_path / "asked.jsonl").mkdir()

    assert ControlRequest(tmp_path, pytest.fail).new() == []


# -- the command line


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("scale", "3"), 0, "(train.py): workers=3"),
        (("set", "--lr", "0.5", "--batch-size", "64"), 0, "(train.py): lr=0.5, batch_size=64"),
        (("set",), 2, "error: no change requested"),
        (("scale", "0"), 2, "error: WORKERS must be a whole number from 1 to 1024, got 0"),
        (("scale", "many"), 2, "error: WORKERS must be a whole number, got 'many'"),
        (("scale", "3", "--job", "1"), 2, "error: --job must be the PID of a running launcher"),
    ],
)
def test_the_commands_answer_with_an_exit_code_and_a_line(temp, capsys, command, code, said):
    started(temp)

    with pytest.raises(SystemExit) as ended:
        main(list(command))

    out, err = capsys.readouterr()
    assert (ended.value.code or 0) == code, err
    assert said in (err if code else out)
    if code:
        assert (out, err.count("\n")) == ("", 1)
