"""Several machines under one mpirun: how they are named, what is asked of them, and how they are reached."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from holdfast.base.rules import check_rules
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.command_line import resume_command
from holdfast.launch.control import announce, find
from holdfast.launch.fleet.hostlist import Host, parse_hosts
from holdfast.launch.fleet.mpi_hosts import MpiHosts, RemoteAgent, check_hosts, shared_folder
from holdfast.launch.job import Job
from holdfast.launch.job_rules import HOST_RULES
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.supervise import worker_context
from holdfast.launch.supervise.processes import Process, WatchedWorker

FAR, AWAY = "203.0.113.1", "203.0.113.2"
"""Addresses that are no machine's (RFC 5737)."""

SCONTROL = "#!/bin/sh\n[ \"$*\" = 'show hostnames n[1-3]' ] && printf 'n1\\nn2\\nn3\\n'\n"

AGENT = f"""#!/bin/sh
host=$1; shift
case $host in
{FAR}) sh -c "$*" | sed "s/$(uname -n)/far/" ;;
{AWAY}) {{away}} ;;
esac
"""


@pytest.fixture
def agent(tmp_path):
    """Returns a program that reaches one host, which is this machine under another name, and another one as is said."""

    def write(away="exit 0"):
        path = tmp_path / "agent"
        path.write_text(AGENT.format(away=away))
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def make_job(tmp_path, agent):
    script = tmp_path / "train.py"
    script.touch()

    def make(away="exit 0", workers=2, **fields):
        settings = Settings(fabric="ulfm", workers=workers, checkpoint_dir=str(tmp_path / "ckpt"))
        usual = {"hosts": (Host(FAR, 1), Host(AWAY, 1)), "launch_agent": agent(away), "node_timeout_s": 20.0}
        return Job(**{"script": script, "settings": settings} | usual | fields)

    return make


def meet(job, tmp_path):
    hosts = MpiHosts(job, RunPaths(run_dir=tmp_path, log_dir=tmp_path, memory_dir=None))
    try:
        hosts.connect(lambda text: None)
    finally:
        hosts.close()


# -- names


@pytest.mark.parametrize(
    "text",
    ["n1:2,n2,n-3.lan:10", "n1:2, n2:1 ,n-3.lan:10", "# mine\nn1:2\n\nn2   # one\nn-3.lan slots=10\n"],
    ids=["list", "blanks", "file"],
)
def test_hosts_are_given_as_a_list_or_as_a_file(text, tmp_path):
    if "\n" in text:
        (tmp_path / "hosts").write_text(text)
        text = str(tmp_path / "hosts")

    assert parse_hosts(text) == (Host("n1", 2), Host("n2", 1), Host("n-3.lan", 10))


BAD_NAMES = {
    "": "got ''",
    "n1:0": "the number of workers of n1 must be from 1 to 1024, got '0'",
    "n1:many": "the number of workers of n1 must be from 1 to 1024, got 'many'",
    "n1,-oProxyCommand=x": "got '-oProxyCommand=x'",
    "n[1-3]:8": "got 'n[1-3]:8'",
    "n1:2,n1:3": "names n1 twice",
    "nowhere/hosts": "there is no file nowhere/hosts",
}


@pytest.mark.parametrize("text", BAD_NAMES)
def test_hosts_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)

    assert BAD_NAMES[text] in str(caught.value)


def test_slurm_says_which_hosts_there_are(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "8(x2),4"}

    assert parse_hosts("slurm", env) == (Host("n1", 8), Host("n2", 8), Host("n3", 4))
    for wrong, message in (
        ({}, "SLURM_JOB_NODELIST is not set"),
        (env | {"SLURM_TASKS_PER_NODE": "8(x2)"}, "SLURM_TASKS_PER_NODE='8(x2)' does not match the 3 nodes"),
    ):
        with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
            parse_hosts("slurm", wrong)


# -- options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hosts": ()}, "--launch-agent needs --hosts"),
        ({"hosts": (), "launch_agent": "", "run_dir": Path("x")}, "--run-dir needs --hosts"),
        ({"settings": Settings(fabric="gloo", workers=2)}, "--hosts needs --fabric ulfm, got gloo"),
        ({"workers": 3}, "--hosts has 2 slots, and -n and --spares ask for 3"),
        ({"launch_agent": "no-such-program -x"}, "--launch-agent no-such-program cannot be run"),
        (
            {"settings": Settings(fabric="ulfm", checkpoint_dir="s3://bucket/run")},
            "--hosts needs a directory that all hosts share: --checkpoint-dir, or --run-dir",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(make_job, fields, message):
    def check(job):
        check_rules(HOST_RULES, job)
        check_hosts(job)

    with pytest.raises(ConfigError, match=message):
        check(make_job(**fields))


def test_the_command_that_goes_on_names_the_hosts(make_job):
    job = make_job(network="10.0.0.0/8")

    said = resume_command(job, 1, "ckpt")

    assert "-n 2 " in said, "as many as they have room for"
    assert f"--hosts {FAR}:1,{AWAY}:1 --launch-agent {job.launch_agent} --network 10.0.0.0/8" in said


# -- other machines


def test_a_host_that_cannot_take_part_is_named_with_what_it_lacks(make_job, tmp_path):
    for away, message in {
        'echo "no route to host" >&2; exit 255': f"host {AWAY} could not be reached: no route to host",
        "exit 91": f"host {AWAY} does not see {tmp_path.parent}: it must be shared",
        "exit 95": f"host {AWAY} has no {sys.executable}; install the same environment there",
        'sh -c "$*" | sed "s/$(uname -n)/far/"': f"hosts {FAR} and {AWAY} are the same machine, far",
    }.items():
        with pytest.raises(ConfigError) as caught:
            meet(make_job(away), tmp_path)
        assert str(caught.value).startswith(message)

    meet(make_job("""sh -c "$*" """), tmp_path)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.2 did not answer within 0\.5 s"):
        meet(make_job("sleep 60", hosts=(Host(AWAY, 1),), node_timeout_s=0.5), tmp_path)


def test_who_is_left_is_found_out_and_what_still_runs_there_is_ended(make_job, tmp_path, monkeypatch):
    hosts = MpiHosts(
        make_job('test ! -e "$0.down" && sh -c "$*"'), RunPaths(run_dir=tmp_path, log_dir=tmp_path, memory_dir=None)
    )
    hosts.connect(lambda text: None)
    (tmp_path / "agent.down").touch()
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    first, second, later = (Process.of(sleeper.pid) for sleeper in sleepers)
    earlier = Process(later.pid, later.started - 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    name = os.uname().nodename
    for daemon, mpirun in ((1, 77), (2, 78)):
        (tmp_path / f"prted.{daemon}" / "0").mkdir(parents=True)
        (tmp_path / f"prted.{daemon}" / f"pmix.far.tool.prterun-{name}-{mpirun}@0").touch()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for daemon in (ended.pid, os.getpid()):  # one that found no space for more, and one that begins
        (tmp_path / f"prted.{daemon}" / "0").mkdir(parents=True)
        (tmp_path / f"prted.{daemon}" / "pmix.far.tool").touch()
    try:
        lost = hosts.poll([WatchedWorker(first, second, "far"), WatchedWorker(earlier, earlier, "far")], [77])

        assert lost == {AWAY: "could not be reached: exit code 1"}
        assert hosts.left == (Host(FAR, 1),)
        stay = {path.name for path in tmp_path.glob("prted.*")}
        assert stay == {"prted.2", f"prted.{os.getpid()}"}, "neither of another mpirun, nor of a daemon that lives"
        assert [sleeper.wait(timeout=20) for sleeper in sleepers[:2]] == [-signal.SIGKILL] * 2
        assert sleepers[2].poll() is None, "another process that got the number of an earlier one"
        hosts.reach(WatchedWorker(later, later, "far")).worker.send(signal.SIGTERM)
        assert sleepers[2].wait(timeout=20) == -signal.SIGTERM
    finally:
        hosts.close()
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_what_takes_too_long_on_a_host_is_ended_with_all_that_it_started(tmp_path):
    script = tmp_path / "agent"
    script.write_text(f'#!/bin/sh\nsleep 60 & echo $! > "{tmp_path}/child"; wait\n')
    script.chmod(0o755)

    answers = RemoteAgent([str(script)]).request({FAR: "true"}, 1.0)

    assert answers[FAR].exit_code is None
    child = int((tmp_path / "child").read_text())
    ends_s = time.monotonic() + 20
    while Process.of(child) is not None:
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_a_run_folder_that_is_shared_is_found_where_those_look_who_ask_something_of_a_job(
    make_job, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    job = make_job()

    places = RunPaths.make(None, shared_folder(job))
    announce(places.run_dir, job)

    assert places.run_dir.parent == tmp_path / "ckpt"
    assert places.memory_dir is None, "nobody else has that"
    found = find()
    assert found.pid == os.getpid()
    assert found.run_dir.resolve() == places.run_dir.resolve()
    places.clear()
    assert list((tmp_path / "tmp").iterdir()) == list((tmp_path / "ckpt").iterdir()) == []


def test_workers_on_another_machine_count_time_from_the_same_moment(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_000_100.0)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    monkeypatch.setenv("HOLDFAST_ORIGIN_S", "55555")

    monkeypatch.setenv(worker_context.LAUNCHER_NODE, f"{os.uname().nodename} 1000000.0")
    worker_context.read_our_clock()
    assert os.environ["HOLDFAST_ORIGIN_S"] == "55555", "it was said by the clock of this machine"

    monkeypatch.setenv(worker_context.LAUNCHER_NODE, "another-machine 1000000.0")
    worker_context.read_our_clock()
    assert float(os.environ["HOLDFAST_ORIGIN_S"]) == 7.0 - 100.0
