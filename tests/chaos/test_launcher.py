"""The launcher over real processes: every way in which a worker, mpirun or the launcher itself can end.

The training is a stand-in without torch (fake_training.py): what it writes down is what a session does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.base.temporary import MARKER
from holdfast.comm.fabrics import ulfm
from holdfast.config import Settings
from holdfast.launch.job import Job
from holdfast.launch.launcher import launch
from holdfast.launch.supervise.processes import children_of, name_of
from holdfast.records.files import load_events
from holdfast.records.paths import event_files
from holdfast.records.types import Finished, StepCommitted

FAKE = Path(__file__).with_name("fake_training.py")
DEADLINE_S = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


class Shell:
    """Runs jobs whose processes can be told from all others by the script's path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        shutil.copy(FAKE, self.script)

    def start(self, *options: object, script: tuple[object, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast", "run", *map(str, options), str(self.script), *map(str, script)]
        env = os.environ | {"TMPDIR": str(self.folder)}  # what a killed launcher leaves goes with the test
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder
        )

    def finish(self, job: subprocess.Popen[str]) -> Done:
        out, err = job.communicate(timeout=DEADLINE_S)
        return Done(job.returncode, out, err)

    def run(self, *options: object, script: tuple[object, ...] = ()) -> Done:
        return self.finish(self.start(*options, script=script))

    def processes(self) -> list[str]:
        """Return the command lines of what still runs, of mpirun, watchers and workers."""
        lines = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = entry.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self.script) in line:
                lines.append(line)
        return lines

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 10
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.02)

    def wait_for(self, job: subprocess.Popen[str], text: str) -> str:
        """Read what the launcher says until ``text`` is in a line of it."""
        assert job.stderr is not None
        for line in job.stderr:
            if text in line:
                return line
        raise AssertionError(f"the launcher ended without saying {text!r}")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.wait_until_gone()


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_job_without_failures_is_done(shell, tmp_path):
    done = shell.run("-n", 2, "--report", tmp_path / "out")

    assert done.code == 0, done.err
    assert report(tmp_path / "out")["workers"] == {
        "started": 2, "ranks_started": [0, 1], "spares": 0, "ranks_spare": [], "finished": 2, "ranks_finished": [0, 1],
    }  # fmt: skip
    assert (tmp_path / "out" / "logs" / "rank-1.log").exists()
    assert (tmp_path / "out" / "index.html").exists()


def test_survivors_of_a_kill_go_on_and_the_plan_can_be_replayed(shell, tmp_path):
    out = tmp_path / "out"
    done = shell.run("-n", 3, "--inject", "kill:rank=1,step=3", "--no-page", "--report", out, "--events-max", "1kB")

    assert done.code == 0, done.err
    records = load_events(out)
    assert len(event_files(out)) > 3
    assert all(path.stat().st_size >= 1000 for path in event_files(out)[:-1])
    assert len({repr(record) for record in records}) == len(records), "each record is there once"
    assert {r.step for r in records if isinstance(r, StepCommitted)} == set(range(report(out)["steps"]))
    assert {r.rank for r in records if isinstance(r, Finished)} == {0, 2}
    (failure,) = report(tmp_path / "out")["failures"]
    assert (failure["rank"], failure["step"], failure["injected"]) == (1, 3, True)
    assert report(tmp_path / "out")["restarts"] == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["specs"] == ["kill:rank=1,step=3"]
    assert plan["struck"] == [0]


def test_an_exception_ends_the_job_and_its_traceback_stands_last(shell):
    done = shell.run("-n", 3, script=("raise:1:4",))

    assert done.code == 93
    lines = done.err.splitlines()
    assert lines[-1] == "ValueError: rank 1 cannot go on"
    assert done.err.count("Traceback") == 1
    assert "launch/supervise/worker.py" not in done.err
    assert "error: rank 1, step 4: ValueError: rank 1 cannot go on" in lines


def test_a_wrong_setting_in_the_script_is_one_line_and_exit_code_2(shell):
    done = shell.run("-n", 2, script=("config:any:4",))

    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("error: color must be red, got 'blue' (train.py, line ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("deed", "message", "code"),
    [
        ("os_exit", "rank 1, step 4: train.py ended with exit code 3", 1),
        ("sys_exit", "rank 1, step 4: train.py ended with sys.exit(3)", 1),
        ("leave", "rank 1 left training at step 4 before its end: train.py returned", 93),
    ],
)
def test_a_worker_that_ends_too_early_ends_the_job(shell, deed, message, code):
    done = shell.run("-n", 3, script=(f"{deed}:1:4",))

    assert done.code == code
    assert done.err.splitlines()[-1] == f"error: {message}"


MEET = """
import os, time
open(f"here-{os.environ['RANK']}", "w").close()
ends_s = time.monotonic() + 60
while not all(os.path.exists(f"here-{rank}") for rank in range(2)):
    assert time.monotonic() < ends_s
    time.sleep(0.01)
"""
"""Ends no worker before the other one has printed: the first that ends without training ends the job."""


def test_a_script_that_does_not_train_is_told_so_and_finds_what_torchrun_gives_it_and_what_python_does(shell):
    shell.script.write_text(
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR'.split()\n"
        "print(*[os.environ[name] for name in names], __name__, sys.argv[1:], sys.path[0])\n"
        f"print(int(os.environ['MASTER_PORT']) > 0)\n{MEET}"
    )

    done = shell.run("-n", 2, "--no-requeue-code", 7, script=("--epochs", 3))

    assert done.code == 7
    assert done.err.splitlines()[-1] == ("error: train.py ended without training: it never ran session.steps(...)")
    assert sorted(done.out.splitlines()) == [
        f"[0] 0 0 2 2 127.0.0.1 __main__ ['--epochs', '3'] {shell.folder}",
        "[0] True",
        f"[1] 1 1 2 2 127.0.0.1 __main__ ['--epochs', '3'] {shell.folder}",
        "[1] True",
    ]


SLOTS = """
import os, signal, time
names = 'RANK LOCAL_RANK LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES CUBLAS_WORKSPACE_CONFIG'.split()
print(*[os.environ[name] for name in names], flush=True)
open(f"here-{os.environ['RANK']}", "w").close()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
ends_s = time.monotonic() + 60
while not all(os.path.exists(f"here-{rank}") for rank in range(4)):
    assert time.monotonic() < ends_s
    time.sleep(0.01)
"""


def test_each_worker_sees_the_gpu_of_its_slot_and_a_new_one_that_of_the_dead(shell, monkeypatch, tmp_path):
    """The GPUs are names only: no process here uses one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    shell.script.write_text(SLOTS)

    done = shell.run("--fabric", "gloo", "-n", 3, "--respawn", "--no-page", "--report", tmp_path / "out")

    said = [line for line in done.out.splitlines() if line.startswith("[")]
    assert sorted(said) == ["[0] 0 0 3 5 :4096:8", "[1] 1 1 3 7 :4096:8", "[2] 2 2 3 5 :4096:8", "[3] 3 1 3 7 :4096:8"]
    assert "3 workers share 2 GPUs, 1 or 2 on each: they divide its memory and time" in done.err
    events = map(json.loads, (tmp_path / "out" / "events.jsonl").read_text().splitlines())
    assert (1, -signal.SIGKILL) in {(e["rank"], e["exit_code"]) for e in events if e["event"] == "WorkerEnded"}


def test_more_gpus_than_there_are_start_nothing(shell, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")

    done = shell.run("-n", 2, "--gpus", 2)

    assert done.code == 2
    assert done.err.strip() == (
        "error: --gpus 2 needs as many GPUs on each node, and here CUDA_VISIBLE_DEVICES and nvidia-smi show 1; "
        "give a smaller number, or auto"
    )


VIRTUAL = """
import sys
from pathlib import Path
from holdfast.records.types import Finished
from holdfast.records.files import FileRecorder
from holdfast.records.paths import records_path
from holdfast.comm.fabrics import ulfm
from holdfast.config import Settings
settings = Settings.from_env()
print(settings.workers, settings.fabric)
for rank in range(1, settings.workers):
    FileRecorder(records_path(Path(settings.run_dir), "0")).write(Finished(
        t_s=1.0, rank=rank, step=3, outcome="done", sha256="a", state_sha256="b", planned=0, committed=0, lost=0,
        repeated=0, metrics={}, checkpoint=""))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_virtual_workers_are_one_process_judged_by_its_end(shell, code):
    shell.script.write_text(VIRTUAL)

    done = shell.run("-n", 3, "--fabric", "virtual", script=(code,))

    assert done.code == bool(code), done.err
    assert done.out == "[0] 3 virtual\n"


def test_a_crashed_job_starts_again_from_its_checkpoint(shell, tmp_path):
    done = shell.run(
        "-n",
        2,
        "--checkpoint-dir",
        tmp_path / "ckpt",
        "--no-page",
        "--report",
        tmp_path / "out",
        script=("once:any:4",),
    )

    assert done.code == 0, done.err
    assert report(tmp_path / "out")["restarts"] == 1
    assert report(tmp_path / "out")["slices"] == 2
    assert "from step 4" in done.err


def test_workers_killed_by_faults_do_not_come_back_and_faults_fire_once(shell, tmp_path):
    faults = ("--inject", "kill:rank=0,step=3", "--inject", "kill:rank=1,step=3")

    done = shell.run("-n", 2, *faults, "--no-page", "--report", tmp_path / "out")

    assert done.code == 0, done.err
    assert report(tmp_path / "out")["workers"]["ranks_finished"] == [2]
    assert report(tmp_path / "out")["restarts"] == 1


def test_restarts_have_an_end(shell):
    done = shell.run("-n", 1, "--max-restarts", 1, script=("kill:any:4",))

    assert done.code == 1
    assert "error: the job was lost twice, and --max-restarts is 1: rank 1 killed by SIGKILL" in done.err


def test_a_job_that_makes_no_progress_is_not_to_be_requeued(shell):
    done = shell.run("-n", 1, "--max-no-progress", 2, script=("kill:any:4",))

    assert done.code == 93
    assert "error: no new step was committed since 2 restarts (--max-no-progress 2): rank 2 killed" in done.err


def test_a_job_that_stands_still_starts_again(shell, tmp_path):
    done = shell.run(
        "-n", 2, "--stall-timeout", 1, "--no-page", "--report", tmp_path / "out", script=("hang_once:any:4",)
    )

    assert done.code == 0, done.err
    assert report(tmp_path / "out")["restarts"] == 1
    assert "no worker sent a heartbeat for 1 s" in done.err


def test_random_kills_leave_one_worker_and_are_written_down(shell, tmp_path):
    options = ("-n", 3, "--mtbf", 0.1, "--no-page", "--report", tmp_path / "out")

    done = shell.run(*options, script=("--steps", 200))

    assert done.code == 0, done.err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(plan["specs"]) == len(report(tmp_path / "out")["failures"]) == 2


def test_a_job_stops_on_request_with_its_state_saved(shell, tmp_path):
    job = shell.start("-n", 2, "--checkpoint-dir", tmp_path / "ckpt", script=("--steps", 5000))
    shell.wait_for(job, "checkpoint before step 2")

    job.send_signal(signal.SIGINT)  # SIGTERM is in test_preemption.py
    done = shell.finish(job)

    assert done.code == 4, done.err
    assert f"resume with: holdfast run -n 2 --slices 2 --checkpoint-dir {tmp_path / 'ckpt'} --resume" in done.err


def test_a_second_request_stops_at_once(shell):
    job = shell.start("-n", 2, script=("--steps", 50, "--step-s", 20))
    shell.wait_for(job, "2 workers, 50 steps")

    job.send_signal(signal.SIGINT)
    shell.wait_for(job, "Ctrl-C to stop immediately")
    began_s = time.monotonic()
    job.send_signal(signal.SIGINT)
    done = shell.finish(job)

    assert done.code == 1
    assert time.monotonic() - began_s < 10
    assert "stopped immediately" in done.err


def test_nothing_outlives_a_launcher_that_is_killed(shell):
    job = shell.start("-n", 2, script=("--steps", 5000))
    shell.wait_for(job, "2 workers, 5000 steps")
    assert len(shell.processes()) == 9  # the launcher, its fork server, mpirun, two starters, two watchers, two workers

    job.kill()
    shell.finish(job)

    shell.wait_until_gone()
    for left in Path("/dev/shm").glob(f"holdfast-{job.pid}-*"):
        assert [path.name for path in left.iterdir()] == [MARKER], "mpirun was told to clean up, and did not"
        shutil.rmtree(left)


def test_nothing_outlives_mpirun(shell, tmp_path):
    job = shell.start("-n", 2, "--max-restarts", 0, script=("--steps", 5000))
    shell.wait_for(job, "2 workers, 5000 steps")
    (mpirun,) = [pid for pid in children_of(job.pid) if name_of(pid) == "prterun"]
    assert list(tmp_path.rglob("ompi.*")), "it has a folder of its own"

    os.kill(mpirun, signal.SIGKILL)
    done = shell.finish(job)

    assert done.code == 1
    assert "the job was lost once, and --max-restarts is 0: mpirun ended before the workers did" in done.err
    assert list(tmp_path.iterdir()) == [shell.script]


def test_nothing_is_left_of_an_mpirun_that_is_stopped(shell, tmp_path):
    job = shell.start("-n", 2)
    shell.wait_for(job, "2 workers")
    (mpirun,) = [pid for pid in children_of(job.pid) if name_of(pid) == "prterun"]

    os.kill(mpirun, signal.SIGSTOP)
    done = shell.finish(job)

    assert done.code == 0, done.err
    assert list(tmp_path.iterdir()) == [shell.script]


def test_a_job_that_mpirun_cannot_start_fails_with_what_mpirun_said(tmp_path, monkeypatch):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho no slots for you\nexit 1\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(ulfm, "find_mpirun", lambda: str(mpirun))
    job = Job(script=FAKE, settings=Settings(fabric="ulfm", workers=2))

    outcome = launch(job)

    assert (outcome.exit_code, outcome.message) == (1, "the workers did not start")
    assert outcome.mpirun_output == "no slots for you"


def test_without_the_watcher_the_end_of_a_worker_is_not_seen(shell, tmp_path):
    """The control: the same exit leaves the two others waiting, which is what the watcher is for."""
    command = [*ulfm.mpirun_command(3), sys.executable, str(shell.script), "os_exit:1:4"]
    env = os.environ | {"HOLDFAST_RUN_DIR": str(tmp_path), "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}

    job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(6)
    job.terminate()
    job.wait(10)
