"""The launcher dies, at any moment: the workers finish their step, save and end; nobody and nothing is left behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reference
from jobs import clean_env, exit_codes, run_report
from train_saving import Training, undisturbed

from holdfast.checkpoint import steps, verify
from holdfast.launch.supervise.processes import Process, WatchedWorker, pair_path
from holdfast.records.files import load_events, read_run
from holdfast.records.paths import event_files
from holdfast.records.types import Finished, StepCommitted, WorkerEnded

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

REFERENCE = Path(__file__).parents[1] / "support" / "train_reference.py"
SCRIPT = Path(__file__).parents[1] / "support" / "train_saving.py"
DEADLINE_S = 90.0


class Orphans:
    """A job whose launcher is to die; all of its processes can be told by the folder that they were given."""

    def __init__(self, folder, fabric, *options, deeds=(), workers=3, step_s=0.02):
        self.folder = folder
        self.temporary = folder / "t"
        self.temporary.mkdir()
        words = [word for deed in deeds for word in ("--deed", deed)]
        given = ("-n", workers, "--fabric", fabric, "--slices", 3, *options)
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "run", *map(str, given), str(SCRIPT), "--step-s", str(step_s), *words],
            env=clean_env(TMPDIR=str(self.temporary)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )

    @property
    def run_dir(self):
        (run_dir,) = (path.parent for path in self.temporary.glob("holdfast-*/records-launcher.jsonl"))
        return run_dir

    def processes(self):
        """What still runs of it, by number."""
        mark, found = f"TMPDIR={self.temporary}".encode(), {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
        return found

    def wait(self):
        """Wait until the launcher was killed, and all that it had started is gone."""
        assert self.launcher.wait(DEADLINE_S) == -signal.SIGKILL
        ends_s = time.monotonic() + DEADLINE_S
        while left := self.processes():
            assert time.monotonic() < ends_s, (left, self.logs())
            time.sleep(0.1)
        return self

    def logs(self):
        return {log.name: log.read_text()[-1500:] for log in (self.run_dir / "logs").glob("*.log")}

    @functools.cached_property
    def records(self):
        return read_run(self.run_dir)

    @property
    def outcomes(self):
        """How the last loop of each worker ended."""
        return {record.rank: record.outcome for record in self.records if isinstance(record, Finished)}

    @property
    def exit_codes(self):
        return {record.rank: record.exit_code for record in self.records if isinstance(record, WorkerEnded)}


def resumed(folder, newest):
    """The hash of the run that goes on from the newest checkpoint, after a look at every byte of it."""
    verify(folder, newest)
    return Training(workers=3, checkpoint_dir=str(folder), resume=True).run().sha256


def test_a_worker_whose_watcher_is_killed_is_lost_like_any_other(tmp_path):
    """It dies with its watcher, which is what says over gloo that a worker has died; nobody looks for who is stuck."""
    (tmp_path / "t").mkdir()
    job = ("-n", 3, "--fabric", "gloo", "--hang-timeout", 0, "--report", tmp_path / "report", "--no-page")
    words = ("run", *job, REFERENCE, "mlp", "sgd", "--pause", 0.2)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, words)],
        env=clean_env(TMPDIR=str(tmp_path / "t")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        records = until_committed(tmp_path / "t", 3, launcher)
        pair = WatchedWorker.read(pair_path(records.parent, 1))
        assert pair.watcher.send(signal.SIGKILL)
        assert launcher.wait(DEADLINE_S) == 0
    finally:
        launcher.kill()
        launcher.wait()

    report = json.loads((tmp_path / "report" / "report.json").read_text())
    ended = {r.rank: r.exit_code for r in load_events(tmp_path / "report") if isinstance(r, WorkerEnded)}
    assert ended == {0: 0, 1: -9, 2: 0}
    assert report["samples"]["lost"] == report["samples"]["repeated"] == 0
    assert report["replicas"]["state_sha256"] == reference.train("mlp", "sgd")


def until_committed(folder, count, job):
    """Wait until the lead has committed so many steps; return where it says so."""
    ends_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_s and job.poll() is None:
        for path in folder.glob("holdfast-*/records-0.jsonl"):
            if path.read_text().count('"StepCommitted"') >= count:
                return path
        time.sleep(0.02)
    pytest.fail(f"step {count} was not committed; exit {job.poll()}")


DEATHS = {
    "in a step": ("ulfm", ["kill-launcher:7:0"], {0: 4, 1: 4, 2: 4}, 8),
    "and a worker dies with it": ("ulfm", ["kill-launcher-and-die:7:1"], {0: 4, 1: -9, 2: 4}, 8),
    "and a worker hangs": ("ulfm", ["kill-launcher:7:0", "hang:7:1"], {0: 4, 1: -9, 2: 4}, 8),
    "and the lead dies with it": ("gloo", ["kill-launcher-and-die:7:0"], {0: -9, 1: 4, 2: 4}, 7),
    "while the others recover": ("gloo", ["die:7:1", "kill-launcher@shrink:7:2"], {0: 4, 1: -9, 2: 4}, 7),
    "while a checkpoint is written": ("gloo", ["kill-launcher@checkpoint.tensors:6:0"], {0: 4, 1: 4, 2: 4}, 6),
    "between the loops of one": ("gloo", ["kill-launcher@loop:6:2", "sleep@loop:6:2"], {0: 4, 1: 4, 2: 4}, 6),
}
"""Fabric, deeds, how the workers end, and how many steps are saved at least."""


@pytest.mark.parametrize("when", DEATHS)
def test_workers_whose_launcher_dies_save_and_end_and_nothing_is_lost(tmp_path, when):
    fabric, deeds, ends, least = DEATHS[when]
    place = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 6)

    job = Orphans(tmp_path, fabric, *place, "--grace", 8 if "hang:7:1" in deeds else 30, deeds=deeds).wait()

    assert job.exit_codes == ends, job.logs()
    newest = steps(tmp_path / "c")[-1]
    assert newest >= least
    assert newest > max(record.step for record in job.records if isinstance(record, StepCommitted))
    assert {job.outcomes[rank] for rank, code in ends.items() if code == 4} == {"stopped"}
    assert resumed(tmp_path / "c", newest) == undisturbed()


def test_workers_whose_launcher_dies_find_a_place_for_their_state(tmp_path):
    report = tmp_path / "report"
    job = Orphans(tmp_path, "gloo", "--report", report, "--events-max", "1kB", deeds=["kill-launcher:7:1"]).wait()

    known = load_events(report)
    assert {r.step for r in known if isinstance(r, StepCommitted)} >= {0, 1, 2, 3}, "its report has what it had read"
    assert {repr(record) for record in known} <= {repr(record) for record in job.records}
    assert len(event_files(report)) > 3
    assert job.exit_codes == {0: 4, 1: 4, 2: 4}, job.logs()
    (newest,) = steps(tmp_path / "holdfast-checkpoint")
    assert resumed(tmp_path / "holdfast-checkpoint", newest) == undisturbed()


def test_nothing_is_left_of_a_job_whose_launcher_dies_before_training(tmp_path):
    job = Orphans(tmp_path, "ulfm", workers=2)
    ends_s = time.monotonic() + DEADLINE_S
    while not list(job.temporary.glob("holdfast-*/process-1")):
        assert time.monotonic() < ends_s
        time.sleep(0.01)

    job.launcher.kill()
    job.wait()

    assert not list(tmp_path.glob("holdfast-checkpoint*"))


def parent_of(pid):
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def stopped_by(job, what):
    """The processes that a test stops: watchers, which would end workers, or mpirun, which the last watcher would end."""
    pairs = [WatchedWorker.read(pair_path(job.run_dir, rank)) for rank in range(2)]
    if what == "mpirun":
        return [Process.of(parent_of(pairs[0].watcher.pid))]
    watchers = [pair.watcher for pair in pairs]
    workers = [pair.worker for pair in pairs]
    return {"a watcher": watchers[1:], "all watchers": watchers, "a pair": [watchers[1], workers[1]]}[what]


@pytest.mark.parametrize(
    ("fabric", "what"),
    [
        ("ulfm", "a pair"),
        ("ulfm", "all watchers"),
        pytest.param("ulfm", "mpirun", marks=pytest.mark.soak),
        pytest.param("gloo", "a watcher", marks=pytest.mark.soak),
    ],
)
def test_nothing_is_left_where_what_would_end_it_is_stopped_when_the_launcher_dies(tmp_path, fabric, what):
    job = Orphans(tmp_path, fabric, "--grace", 2, "--hang-timeout", 0, workers=2, step_s=0.2)
    until_committed(job.temporary, 3, job.launcher)
    stopped = stopped_by(job, what)
    for process in stopped:
        assert process.send(signal.SIGSTOP)

    job.launcher.kill()
    try:
        job.wait()
    finally:
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)

    assert not any(process.is_alive() for process in stopped)


def test_a_watcher_that_is_stopped_when_the_launcher_is_gone_and_its_worker_has_ended_is_resumed(tmp_path):
    job = Orphans(tmp_path, "ulfm", workers=2, step_s=0.2)
    until_committed(job.temporary, 3, job.launcher)
    pairs = [WatchedWorker.read(pair_path(job.run_dir, rank)) for rank in range(2)]

    job.launcher.kill()
    try:
        for pair in pairs:
            while pair.worker.is_alive():  # which resumes it as long as it lives
                pair.watcher.send(signal.SIGSTOP)
                time.sleep(0.002)
        assert any(pair.watcher.is_stopped() for pair in pairs)
        job.wait()
    finally:
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)

    assert job.exit_codes == {0: 4, 1: 4}


LOSES_ITS_CONNECTION = """
import socket
import sys
from holdfast.models.trainable import Runner

begin = Runner.begin

def lose_the_store(self, batch):
    if batch.step == 3 and self._job.comm.local_ranks == (1,):
        self._job.comm._store._socket.shutdown(socket.SHUT_RDWR)
    return begin(self, batch)

Runner.begin = lose_the_store
sys.path.insert(0, {support!r})
sys.argv = [{script!r}, "mlp", "sgd"]
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


@pytest.mark.soak
def test_a_worker_that_loses_its_own_connection_to_the_store_stops_nobody_and_is_done_without_at_the_next_failure(
    tmp_path,
):
    script = tmp_path / "train.py"
    script.write_text(LOSES_ITS_CONNECTION.format(support=str(REFERENCE.parent), script=str(REFERENCE)))
    options = ("-n", 3, "--fabric", "gloo", "--max-restarts", 0, "--inject", "kill:rank=2,step=6")

    report = run_report(tmp_path, *options, script)

    assert exit_codes(report) == {0: 0, 1: -9, 2: -9}
    assert report["samples"]["lost"] == report["samples"]["repeated"] == 0
    assert report["replicas"]["state_sha256"] == reference.train("mlp", "sgd")
    assert "worker 1: the connection to the store at 127.0.0.1:" in report["_stdout"] + report["_stderr"]
