"""A debug bundle holds no secret, nothing outside its folder, and the stacks of hung workers come without the GIL."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import textwrap
import time

import pytest
from some_records import some

from holdfast.cli import main
from holdfast.errors import ConfigError
from holdfast.launch.control import RunningJob
from holdfast.launch.health import stacks
from holdfast.launch.health.stacks import LastStacks
from holdfast.launch.supervise import debug_handlers as handlers
from holdfast.launch.supervise.processes import Process, WatchedWorker, pair_path
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path
from holdfast.records.types import JobRestarted, Recovered, WorkerFenced
from holdfast.tools.debug import bundle
from holdfast.tools.debug.bundle import BundleSource, write_bundle
from holdfast.tools.debug.bundle_writer import BundleWriter
from holdfast.tools.debug.flight_recorder import flight_recorder
from holdfast.tools.debug.redaction import REDACTED, helpful, redact, secrets_of
from holdfast.tools.debug.running import live_source

PLANTED = "S3cr3t-pl4nted-value"


def run_folder(folder):
    """A report directory in which a secret stands wherever a user may have put one."""
    (folder / "logs").mkdir(parents=True)
    report = {
        "command": f"holdfast run train.py --wandb-api-key {PLANTED} --lr 0.1",
        "job": {
            "args": ["--password", PLANTED, "--steps", "5"],
            "settings": {"rdzv": f"etcd://me:{PLANTED}@etcd:2379/job"},
        },
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    (folder / "plan.json").write_text("{}")
    (folder / "events.jsonl").write_text(json.dumps({"event": "X", "message": f'{{"token": "{PLANTED}"}}'}) + "\n")
    lines = [
        f"loading https://user:{PLANTED}@host/data?x=1",
        f"Authorization: Bearer {PLANTED}",
        f"GET /file?access_token={PLANTED}&part=2",
        f"MY_SECRET={PLANTED} python train.py",
        f"export AWS_SECRET_ACCESS_KEY='{PLANTED}'",
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
        f'password: "{PLANTED} of two words"',
        "step 7, tokens: 4096, loss 0.25",
    ]
    (folder / "logs" / "rank-0.log").write_text("\n".join(lines))
    (folder / "logs" / "rank-1.log").write_text(f"a printed {PLANTED} without a name")
    return folder


def contents(archive):
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
        return members, {m.name.partition("/")[2]: opened.extractfile(m).read().decode() for m in members}


def texts_of(tmp_path, **source):
    """The texts of a bundle of such a source."""
    write_bundle(BundleSource(**source), tmp_path / "bundle.tgz")
    return contents(tmp_path / "bundle.tgz")[1]


def test_no_planted_secret_is_in_a_bundle_and_all_names_are_below_one_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HOLDFAST_TOKEN", PLANTED)  # known to the environment: hidden in the logs, too
    monkeypatch.setenv("UNKNOWN_VARIABLE", "not on the list")
    out = tmp_path / "bundle.tar.gz"

    with pytest.raises(SystemExit) as ended:
        main(["debug-bundle", str(run_folder(tmp_path / "run")), "--out", str(out)])
    members, texts = contents(out)

    assert ended.value.code == 0
    assert f"{out}  (8 files)" in capsys.readouterr().out
    assert not [name for name, text in texts.items() if PLANTED in text]
    assert all(m.isreg() and m.name.startswith("bundle/") and ".." not in m.name for m in members)
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    environment = json.loads(texts["environment.json"])
    assert (environment["NCCL_DEBUG"], environment["HOLDFAST_TOKEN"]) == ("INFO", REDACTED)
    assert "UNKNOWN_VARIABLE" not in environment
    assert "step 7, tokens: 4096, loss 0.25" in texts["logs/rank-0.log"]
    report = json.loads(texts["report.json"])
    assert report["job"]["args"] == ["--password", REDACTED, "--steps", "5"]
    assert report["command"].endswith(f"--wandb-api-key {REDACTED} --lr 0.1")
    assert json.loads(texts["versions.json"])["python"]


def test_a_planted_secret_is_found_where_its_variable_is_not_known(tmp_path):
    texts = texts_of(tmp_path, report_dir=run_folder(tmp_path / "run"))

    assert not [name for name, text in texts.items() if PLANTED in text], "no folder of logs was given"


@pytest.mark.parametrize(
    "line",
    [
        "loss: 0.5, key figures: 12",
        "tokenizer: bert-base, max_tokens=512",
        "step 7 of 9, tokens 4096",
        "https://host:8080/path@tag",
        '"token": null, "secret": false',
        "the secret of a good run",
    ],
)
def test_ordinary_text_stays_as_it_is(line):
    assert redact(line) == line


@pytest.mark.parametrize("piece", ["a", "password", "a.b-", "?a", "x://", "token=", "--key", '"-', " "])
def test_a_long_text_takes_no_more_than_its_length(piece):
    text = piece * (500_000 // len(piece))
    began_s = time.process_time()
    redact(text)

    assert time.process_time() - began_s < 5


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("password=123456", "password=<redacted>"),
        ('{"api_key": "two words", "lr": 0.1}', '{"api_key": "<redacted>", "lr": 0.1}'),
        ("--hub-token abc123 --lr 0.1", "--hub-token <redacted> --lr 0.1"),
        ("pwd: 'x y'; next", "pwd: '<redacted>'; next"),
        ("s3://id:secret@bucket/path", "s3://<redacted>@bucket/path"),
    ],
)
def test_what_is_assigned_to_the_name_of_a_secret_is_hidden_whole(line, shown):
    assert redact(line) == shown


def test_values_of_short_or_plain_variables_are_not_searched_for():
    plain = {"A_TOKEN": "abc", "B_KEY": __file__, "C_SECRET": "1234567"}

    assert secrets_of(plain | {"D_SECRET": "longenough", "E_PASS": "/x/y9+Z"}) == ("longenough", "/x/y9+Z")
    assert helpful({"HOLDFAST_RDZV": "etcd://u:pw@h:1/j"}) == {"HOLDFAST_RDZV": f"etcd://{REDACTED}@h:1/j"}


def test_links_and_devices_are_not_followed(tmp_path):
    folder = run_folder(tmp_path / "run")
    outside = tmp_path / "outside"
    outside.write_text("of somebody else")
    (folder / "logs" / "rank-2.log").symlink_to(outside)
    os.mkfifo(folder / "logs" / "rank-3.log")

    texts = texts_of(tmp_path, report_dir=folder, log_dir=folder / "logs")

    assert not any("of somebody else" in text for text in texts.values())
    notes = json.loads(texts["bundle.json"])["notes"]
    assert notes == [f"logs/rank-{n}.log: not there, or not a regular file" for n in (2, 3)]


def test_of_a_long_log_the_end_is_kept_from_a_line_on(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "logs" / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(200_000)))

    text = texts_of(tmp_path, log_dir=folder / "logs")["logs/rank-0.log"].splitlines()

    assert text[0] == "(the beginning was left out)"
    assert text[1].startswith("line ")
    assert text[-1] == "line 199999"
    assert len(text) < 200_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no report.json in nowhere, and no running job of yours writes to it"),
        (["nowhere", "--job", "1"], "give a report directory or --job NUMBER, not both"),
        (["--job", "1"], "no job of yours runs on this machine"),
        (["run", "--out", "run"], "--out must be a file, and run is a directory"),
        (["run", "--out", "missing/x.tar.gz"], "cannot write missing/x.tar.gz: No such file or directory"),
    ],
)
def test_a_bundle_of_nothing_is_refused_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_folder(tmp_path / "run")

    with pytest.raises(SystemExit) as ended:
        main(["debug-bundle", *words])

    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert len(said.splitlines()) == 1


HOLDS_THE_GIL = """
    import ctypes, sys
    from pathlib import Path
    from holdfast.launch.health.stacks import stack_path, write_stacks_on_signal
    write_stacks_on_signal(stack_path(Path(sys.argv[1]), 3))
    print("ready", flush=True)
    def stuck():
        ctypes.PyDLL(None).sleep(60)  # a PyDLL keeps the GIL
    stuck()
"""


@pytest.fixture
def stuck_worker(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(textwrap.dedent(HOLDS_THE_GIL))
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_worker_that_holds_the_gil_writes_its_stacks_within_the_limit(stuck_worker, tmp_path):
    began_s = time.monotonic()
    text = LastStacks(tmp_path, is_off=False).take(3, Process.of(stuck_worker.pid))
    took_s = time.monotonic() - began_s

    assert "in stuck" in text
    assert stacks.innermost(text, "/elsewhere/stuck.py") == "stuck.py, line 8"
    assert took_s < 2, "the limit is 50 ms; the machine may be busy"
    assert LastStacks(tmp_path, is_off=True).take(3, Process.of(stuck_worker.pid)) == ""


def test_a_stopped_worker_is_not_resumed_and_one_that_never_registered_is_not_signalled(
    stuck_worker, tmp_path, monkeypatch
):
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    os.kill(stuck_worker.pid, signal.SIGSTOP)
    worker = Process.of(stuck_worker.pid)
    while not worker.is_stopped():
        time.sleep(0.01)

    assert LastStacks(tmp_path, is_off=False).take(3, worker) == ""
    assert worker.is_stopped()
    assert stacks.last_stack(stacks.stack_path(tmp_path, 9), lambda number: pytest.fail("signalled")) == ""


def test_the_file_of_stacks_exists_only_once_the_signal_no_longer_kills(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(stacks.faulthandler, "register", lambda *_, **__: seen.append(list(tmp_path.glob("*.txt"))))
    stacks.write_stacks_on_signal(stacks.stack_path(tmp_path, 3))
    stacks._open.pop().close()

    assert seen == [[]]
    assert list(tmp_path.iterdir()) == [stacks.stack_path(tmp_path, 3)]


def test_the_line_of_the_script_is_found_in_both_forms():
    of_python = '  File "/a/train.py", line 12 in main\n  File "/a/train.py", line 90 in <module>'
    assert stacks.innermost(of_python, "/b/train.py") == "train.py, line 12"
    assert stacks.innermost("    main (train.py:12)\n    <module> (train.py:90)", "train.py") == "train.py, line 12"
    assert stacks.innermost("no frame of it", "train.py") == ""


def test_a_worker_without_handlers_has_no_flight_recorder(tmp_path):
    assert flight_recorder(tmp_path / "debug-0.sock") == "(not served: start the job with --debug-handlers)"
    (tmp_path / "debug-0.sock").touch()
    assert flight_recorder(tmp_path / "debug-0.sock").startswith("(no answer: ")


def test_a_worker_serves_the_flight_recorder_of_torch_at_a_socket(tmp_path):
    path = tmp_path / "debug-0.sock"

    assert handlers.serve_handlers(path) == ""
    try:
        assert flight_recorder(path).startswith(("(empty: ", "{"))
    finally:
        handlers._serving.clear()
    long = tmp_path / ("x" * 120)
    assert handlers.serve_handlers(long).startswith("torch serves no debug handlers: ")


def recovered(generation, rank=0, lost=(1,)):
    return some(Recovered, rank=rank, step=5, lost=lost, generation=generation)


def test_bundles_are_few_one_at_a_time_and_one_for_each_recovery(tmp_path, monkeypatch):
    started, over = [], []

    class Writing:
        pid = 0

        def __init__(self, words, **how):
            assert how["start_new_session"]
            started.append(words)
            over.append(0)

        def poll(self):
            return over[-1]

    monkeypatch.setattr(subprocess, "Popen", Writing)
    writer = BundleWriter(tmp_path)

    writer.take([recovered(1), recovered(1, rank=2)])
    writer.take([recovered(1, rank=3)])
    writer.take([recovered(2, lost=())])
    (name,) = (words[-1].rpartition("/")[2] for words in started)
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getpid()}-1-recovery-step-5\.tar\.gz", name)
    over[-1] = None
    writer.take([some(JobRestarted), recovered(1)])
    assert len(started) == 1, "one is being written"
    over[-1] = 0
    for rank in range(9):
        writer.take([some(WorkerFenced, rank=rank)])
    assert len(started) == 5
    assert started[1][:3] == ["nice", "-n", "19"]
    assert started[1][-1].endswith("-2-hang-rank-0.tar.gz")
    writer = BundleWriter(tmp_path / "of another job")
    for records in ([recovered(1), recovered(1, rank=2)], [some(JobRestarted, restart=1)], [recovered(1)]):
        writer.take(records)
    assert len(started) == 7, "a restart counts its generations anew"


def test_only_the_draft_of_this_launcher_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.tools.debug.bundle_writer._BUNDLE_S", -1.0)
    other = tmp_path / ".20260101-000000-1-1-recovery-step-5.tar.gz.7.draft"
    other.touch()
    popen, own = subprocess.Popen, []

    def write(words, **how):
        name = words[-1].rpartition("/")[2]
        own.append(tmp_path / f".{name}.8.draft")
        own[0].touch()
        return popen(["sleep", "60"], **how)

    monkeypatch.setattr(subprocess, "Popen", write)
    writer = BundleWriter(tmp_path)
    writer.take([recovered(1)])
    assert not writer._is_busy()

    assert (other.exists(), own[0].exists()) == (True, False)


def test_many_files_have_a_smaller_share_each_and_unused_shares_go_to_the_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.tools.debug.bundle._MOST_OF_FOLDER", 4000)
    (tmp_path / "logs").mkdir()
    for rank, size in enumerate((10, 5000, 5000)):
        (tmp_path / "logs" / f"rank-{rank}.log").write_text("line\n" * (size // 5))
    texts = texts_of(tmp_path, log_dir=tmp_path / "logs")
    sizes = [len(texts[f"logs/rank-{rank}.log"]) for rank in range(3)]

    assert sizes[0] == 10
    assert all(1800 < size < 2100 for size in sizes[1:])
    assert texts["logs/rank-2.log"].startswith("(the beginning was left out)\nline\n")


def test_each_file_is_in_the_archive_before_the_next_is_read(tmp_path, monkeypatch):
    done = []
    read, add = bundle.read_end, bundle._add
    monkeypatch.setattr(bundle, "read_end", lambda path, most: done.append(("read", path.name)) or read(path, most))
    monkeypatch.setattr(bundle, "_add", lambda to, name, text: done.append(("add", name[15:])) or add(to, name, text))
    for rank in range(3):
        (tmp_path / f"records-{rank}.jsonl").write_text("a line\n")
    write_bundle(BundleSource(run_dir=tmp_path), tmp_path / "bundle.tar.gz")

    assert [what for what, name in done if name.startswith("records-")] == ["read", "add"] * 3


def test_of_a_running_job_a_bundle_has_positions_stacks_and_the_environment_of_its_launcher(tmp_path, monkeypatch):
    """The launcher and its worker are a process that sleeps; py-spy is a script that prints how it was called."""
    run_dir = tmp_path / "holdfast-1"
    run_dir.mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("hello\n")
    environment = os.environ | {"NCCL_DEBUG": "WARN", "MY_PASSWORD": PLANTED}
    with subprocess.Popen(["sleep", "60"], env=environment) as launcher:
        try:
            process = Process.of(launcher.pid)
            Beacon(beacon_path(run_dir, 0)).mark("forward", 7)
            WatchedWorker(process, process).note(pair_path(run_dir, 0))
            told = RunningJob(
                process=str(process), script="train.py", fabric="gloo", slices=2, split="slices", min_workers=1,
                run_dir=run_dir, report_dir=str(tmp_path), log_dir=str(tmp_path / "logs"),
            )  # fmt: skip
            (run_dir / "records-0.jsonl").write_text(json.dumps({"event": "X", "said": PLANTED}) + "\n")
            spy = tmp_path / "py-spy"
            spy.write_text('#!/bin/sh\necho "called with $@"\n')
            spy.chmod(0o755)
            monkeypatch.setattr(stacks, "py_spy", lambda: str(spy))
            write_bundle(live_source(told), tmp_path / "b.tar.gz")
        finally:
            launcher.kill()
    _, texts = contents(tmp_path / "b.tar.gz")

    assert texts["stacks/rank-0.txt"] == f"called with dump --nonblocking --pid {process.pid}\n"
    position = json.loads(texts["positions.json"])["0"]
    assert (position["phase"], position["step"]) == ("forward", 7)
    assert json.loads(texts["environment.json"])["NCCL_DEBUG"] == "WARN"
    assert REDACTED in texts["records/records-0.jsonl"]
    assert texts["logs/rank-0.log"] == "hello\n"
    assert not [name for name, text in texts.items() if PLANTED in text]
    assert "flight recorder of rank 0: (not served: start the job with --debug-handlers)" in texts["bundle.json"]
    with pytest.raises(ConfigError, match="has ended in the meantime"):
        live_source(told)
