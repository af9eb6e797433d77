"""One mpirun over several hosts (see ``machines.py``): workers there die and hang, and whole hosts are lost."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reference
from jobs import clean_env, of_kind, read_report
from machines import make_machines

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("nodes_script.py")
ALL_SAMPLES = {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
DEADLINE_S = 150
expected_hash = functools.cache(lambda: reference.train("mlp", "sgd", order="tree"))  # several hosts


@pytest.fixture
def machines(tmp_path):
    made = make_machines(3, tmp_path, net="10.203.0")
    yield made
    made.remove()


class Run:
    """A job with a worker on the first and the last host and two between; its launcher runs on the first."""

    def __init__(self, machines, folder, *options, pause=0.0):
        self.folder = folder
        inside = machines.hosts.inside(1)
        words = [*inside, sys.executable, "-m", "holdfast", "run", "--hosts", machines.listed(1, 2, 1)]
        words += ["--launch-agent", machines.agent, "--node-timeout", 4, "--no-page", "--report", folder / "report"]
        words += ["--checkpoint-dir", folder / "ckpt", "--checkpoint-every", 2, *options, SCRIPT, "--pause", pause]
        self._output = (folder / "output").open("w+")
        self.launcher = subprocess.Popen(
            [str(word) for word in words],
            env=clean_env(TMPDIR=str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.launcher.terminate()
        try:
            self.launcher.wait(timeout=60)
        finally:
            self.launcher.kill()
            self._output.close()

    def until_checkpoint(self, step):
        """Wait until one is complete."""
        ends_s = time.monotonic() + DEADLINE_S
        while f"checkpoint before step {step}:" not in self.said():
            assert self.launcher.poll() is None, self.said()
            assert time.monotonic() < ends_s, self.said()
            time.sleep(0.02)

    def wait(self):
        try:
            return self.launcher.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def said(self):
        return (self.folder / "output").read_text()

    def report(self):
        return read_report(self.folder / "report")


def restarts_of_training(report):
    """Starts of the job after the first that trained: a start in which mpirun brings up no worker is repeated, and no loss."""
    return [event for event in of_kind(report, "JobRestarted") if event["step"] >= 0]


def assert_complete(report):
    """Training is over, and its result is that of one process."""
    assert report["replicas"]["state_sha256"] == expected_hash()
    assert report["replicas"]["identical"] is True
    assert report["samples"] == ALL_SAMPLES


def test_a_worker_of_another_host_dies_then_a_host_loses_power_and_the_bits_are_the_same(machines, tmp_path):
    with Run(machines, tmp_path, "--inject", "kill:rank=3,step=2", pause=0.3) as run:
        run.until_checkpoint(4)
        machines.power_off(2)
        code = run.wait()

        assert code == 0, run.said()
        report = run.report()
        assert_complete(report)
        (again,) = restarts_of_training(report)
        assert f"host {machines.hosts.address(2)} is lost" in again["reason"]
        assert again["workers"] == [0, 4], "on each host that is left as many as it has room for"
        in_place = of_kind(report, "Recovered")[0]
        assert in_place["lost"] == [3]
        assert in_place["t_s"] < again["t_s"], "a worker alone ends nothing"
        assert max(event["step"] for event in of_kind(report, "RunStarted")) >= 4, "it began where a checkpoint was"
        assert max(event["t_s"] for event in report["_events"]) <= report["wall_s"], "all hosts count from one moment"
        assert not list((tmp_path / "ckpt").glob(".holdfast*")), "the run folder goes with the run"


def test_where_a_daemon_does_not_come_up_the_job_is_started_again(machines, tmp_path):
    once = tmp_path / "once"
    words = machines.agent.read_text().splitlines()
    words.insert(1, f'case "$*" in *prted*) [ -e "{once}" ] || {{ touch "{once}"; exit 1; }};; esac')
    machines.agent.write_text("\n".join(words))
    with Run(machines, tmp_path) as run:
        assert run.wait() == 0, run.said()

        assert once.exists()
        report = run.report()
        assert_complete(report)
        (again,) = of_kind(report, "JobRestarted")
        assert again["reason"] == "no worker began: one of mpirun's daemons failed to report back"


def freeze_agent(machines, command, once):
    """Let the agent freeze at the first command that matches a pattern of the shell."""
    words = machines.agent.read_text().splitlines()
    words.insert(1, f'case "$*" in {command}) [ -e "{once}" ] || {{ touch "{once}"; kill -STOP $$; }};; esac')
    machines.agent.write_text("\n".join(words))


def agents_left(machines):
    """Processes of the agent that have not ended."""
    found = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [words for words in found if str(machines.agent).encode() in words]


@pytest.mark.soak
def test_where_the_agent_of_a_host_is_frozen_when_its_daemon_starts_the_job_is_started_again(machines, tmp_path):
    freeze_agent(machines, "*prted*", tmp_path / "once")
    with Run(machines, tmp_path, "--start-timeout", 20) as run:
        assert run.wait() == 0, run.said()

        assert (tmp_path / "once").exists()
        report = run.report()
        assert_complete(report)
        (again,) = of_kind(report, "JobRestarted")
        assert again["reason"] == "no worker began: one of mpirun's daemons failed to report back"
        assert agents_left(machines) == []


@pytest.mark.soak
def test_where_the_agent_of_a_host_is_frozen_from_the_start_the_host_is_named(machines, tmp_path):
    freeze_agent(machines, f'"{machines.hosts.address(2)} "*', tmp_path / "once")
    with Run(machines, tmp_path) as run:
        code = run.wait()

        assert (tmp_path / "once").exists()
        assert f"{machines.hosts.address(2)} did not answer within 4 s" in run.said(), (code, run.said())
        assert agents_left(machines) == []


@pytest.mark.soak
def test_a_worker_of_another_host_that_hangs_is_ended_there(machines, tmp_path):
    with Run(machines, tmp_path, "--inject", "hang:rank=3,step=6", "--hang-timeout", 3) as run:
        assert run.wait() == 0, run.said()

        report = run.report()
        assert_complete(report)
        assert restarts_of_training(report) == []
        assert {e["rank"]: e["exit_code"] for e in of_kind(report, "WorkerEnded")} == {0: 0, 1: 0, 2: 0, 3: -9}
        assert [event["rank"] for event in of_kind(report, "WorkerFenced")] == [3]


@pytest.mark.soak
def test_a_host_that_is_cut_off_is_found_by_its_silence(machines, tmp_path):
    with Run(machines, tmp_path, pause=0.3) as run:
        run.until_checkpoint(4)
        machines.cut_off(3)
        code = run.wait()

        assert code == 0, run.said()
        report = run.report()
        assert_complete(report)
        (again,) = restarts_of_training(report)
        assert again["workers"] == [0, 1, 2]


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 4), (signal.SIGKILL, -signal.SIGKILL)])
def test_when_the_launcher_is_told_to_stop_or_killed_the_workers_of_all_hosts_save(machines, tmp_path, number, code):
    idle = [len(machines.hosts.pids(host)) for host in (1, 2, 3)]
    with Run(machines, tmp_path, pause=0.5) as run:
        run.until_checkpoint(4)
        os.kill(run.launcher.pid, number)
        assert run.wait() == code, run.said()
        ends_s = time.monotonic() + DEADLINE_S
        while [len(machines.hosts.pids(host)) for host in (1, 2, 3)] != idle:
            assert time.monotonic() < ends_s, "workers are left"
            time.sleep(0.1)

    again = tmp_path / "again"
    again.mkdir()
    (tmp_path / "ckpt").rename(again / "ckpt")
    with Run(machines, again, "--resume") as run:
        assert run.wait() == 0, run.said()
        report = run.report()
        assert_complete(report)
        assert of_kind(report, "RunStarted")[0]["step"] >= 4
