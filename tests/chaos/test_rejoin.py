"""Workers that come, go and take over while a job runs: the bits stay those of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import clean_env, exit_codes, holdfast, of_kind, read_report, run_report
from train_saving import EPOCHS, LOOP_ENDS, Training, undisturbed

from holdfast.checkpoint import steps
from holdfast.launch.control import append
from holdfast.launch.supervise.processes import children_of
from holdfast.records.paths import requests_path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_saving.py"
STEPS = LOOP_ENDS[-1]
LIMIT_S = 300
NOTHING_LOST = {"planned": 180, "committed": 180, "lost": 0, "repeated": 0}


def words(*options, inject=(), deeds=(), workers=3):
    """The words of a job, behind ``holdfast run --report DIR``."""
    faults = [word for spec in inject for word in ("--inject", spec)]
    script = [word for deed in deeds for word in ("--deed", deed)]
    return ["-n", workers, "--slices", 3, *options, *faults, SCRIPT, *script]


def joined(report):
    """Before which steps who joined."""
    return {(event["step"], *event["joined"]) for event in of_kind(report, "Recovered") if event["joined"]}


def check_same(report, *, finished):
    """Nothing was lost, and the bits are those of the undisturbed run."""
    assert report["outcome"] == "done"
    assert report["workers"]["ranks_finished"] == finished
    assert report["replicas"]["identical"] is True
    assert report["replicas"]["state_sha256"] == undisturbed()
    assert report["steps"] == STEPS
    assert report["samples"] == NOTHING_LOST


# -- new processes


def test_new_workers_replace_all_that_the_job_began_with_though_a_giver_and_a_newcomer_die_in_between(tmp_path):
    report = run_report(
        tmp_path,
        *words(
            "--fabric", "gloo", "--respawn", "--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 4,
            inject=(
                "kill:rank=1,step=1",
                "kill:rank=0,step=2,phase=rejoin",  # a giver, and the newcomer itself
                "kill:rank=3,step=0,phase=rejoin",
                "kill:rank=2,step=12,phase=backward",
            ),
            deeds=("await:3:all", "await-2:8:all"),
        ),
        timeout=LIMIT_S,
    )  # fmt: skip

    assert exit_codes(report) == {0: -9, 1: -9, 2: -9, 3: -9, 4: 0, 5: 0}
    assert {event["phase"] for event in of_kind(report, "FaultFired")} == {"forward", "rejoin", "backward"}
    assert joined(report) == {(9, 4, 5)}
    check_same(report, finished=[4, 5])
    # Saved while newcomers came, and after the last of those was gone who had been there from the start:
    for step in {8, 16} & set(steps(tmp_path / "c")):
        resumed = Training(checkpoint_dir=str(tmp_path / "c"), resume=True)
        assert resumed.run().sha256 == undisturbed(), step
    assert 16 in steps(tmp_path / "c")


def test_under_restart_a_newcomer_goes_back_with_the_others_to_where_the_loop_began(tmp_path):
    report = run_report(
        tmp_path,
        *words(
            "--fabric", "gloo", "--respawn", "--strategy", "restart", "--checkpoint-dir", tmp_path / "c",
            inject=("kill:rank=1,step=8", "kill:rank=0,step=12,phase=allreduce"),
            deeds=("await:10:all",),
        ),
        timeout=LIMIT_S,
    )  # fmt: skip

    assert joined(report) == {(11, 3), (11, 4)}  # twice, because step 10 was done again
    assert [event["decision"] for event in of_kind(report, "Recovered") if event["lost"] == [0]] == ["load", "load"]
    assert {event["redone_steps"] for event in of_kind(report, "Recovered") if event["lost"] == [0]} == {7}
    assert report["replicas"]["state_sha256"] == undisturbed()
    assert report["replicas"]["identical"] is True


# -- spares


def test_spares_take_the_place_of_the_dead_and_may_die_themselves(tmp_path):
    report = run_report(
        tmp_path,
        *words(
            "--fabric", "gloo", "--spares", 2, workers=2,
            inject=("kill:rank=0,step=3,phase=backward", "kill:rank=3,step=8,phase=allreduce", "kill:rank=1,step=13"),
        ),
        timeout=LIMIT_S,
    )  # fmt: skip

    assert exit_codes(report) == {0: -9, 1: -9, 2: 0, 3: -9}
    workers = {event["step"]: event["workers"] for event in of_kind(report, "StepCommitted")}
    assert [workers[step] for step in (2, 4, 9, 14)] == [2, 2, 2, 1]
    check_same(report, finished=[2])


# -- on request


class Live:
    """A job that the test talks to while it runs."""

    def __init__(self, tmp_path, *given):
        self.report = tmp_path / "report"
        self.temp = tmp_path / "temp"
        self.temp.mkdir()
        command = [sys.executable, "-m", "holdfast", "run", "--no-page", "--report", self.report, *given]
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,  # where a job that is terminated saves its state
            env=clean_env(TMPDIR=str(self.temp)),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(LIMIT_S)
        self.process.stdout.close()

    def tell(self, *command):
        """Run a command of the user's."""
        done = holdfast(*command, "--job", self.process.pid, env={"TMPDIR": str(self.temp)}, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done

    def wait_for(self, what, found):
        """Wait for a record that ``found`` likes."""
        ends_s = time.monotonic() + LIMIT_S
        while time.monotonic() < ends_s and self.process.poll() is None:
            for file in self.temp.glob("holdfast-*/records-*.jsonl"):
                lines = file.read_text().split("\n")[:-1]
                if any(found(json.loads(line)) for line in lines):
                    return
            time.sleep(0.1)
        pytest.fail(f"{what} did not come; the job said {self.process.communicate(timeout=LIMIT_S)[0][-3000:]}")

    def end(self):
        """Wait for the end of the job; return its report."""
        said, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, said[-3000:]
        return read_report(self.report) | {"_said": said}


def has_committed(step):
    return lambda record: record["event"] == "StepCommitted" and record["step"] == step


def test_a_job_of_one_grows_and_shrinks_on_request_and_a_worker_that_is_told_to_leave_is_not_replaced(tmp_path):
    given = words(
        "--fabric", "gloo", "--respawn", workers=1,
        inject=("leave:rank=1,step=9",),
        deeds=("await-3:4:all", "await-notice:13:2", "await-notice:13:3"),
    )  # fmt: skip
    with Live(tmp_path, *given) as job:
        job.wait_for("step 3", has_committed(3))
        assert "3 slices, so 1 of 4 workers" in job.tell("scale", 4).stderr
        job.wait_for("step 12", has_committed(12))
        job.tell("scale", 1)
        report = job.end()

    assert joined(report) == {(5, 1, 2, 3)}
    assert {(event["rank"], event["step"]) for event in of_kind(report, "Left")} == {(1, 10), (2, 14), (3, 14)}
    assert exit_codes(report) == {0: 0, 1: 0, 2: 0, 3: 0}
    workers = {event["step"]: event["workers"] for event in of_kind(report, "StepCommitted")}
    assert [workers[step] for step in (4, 5, 12, 15)] == [1, 3, 3, 1]
    assert "uses messages" not in report["_said"], "once it has two, it shares their memory"
    check_same(report, finished=[0])


def test_newcomers_that_are_to_leave_before_they_have_started_are_told_once_they_have(tmp_path):
    given = words("--fabric", "gloo", workers=2)
    with Live(tmp_path, *given, "--step-s", 0.4) as job:
        job.wait_for("step 2", has_committed(2))
        (server,) = [pid for pid in children_of(job.process.pid) if b"fork_server" in cmdline(pid)]
        os.kill(server, signal.SIGSTOP)  # newcomers wait for it
        job.tell("scale", 4)
        ends_s = time.monotonic() + LIMIT_S
        while sum(b"supervise.starter" in cmdline(pid) for pid in children_of(job.process.pid)) < 4:
            assert time.monotonic() < ends_s
            time.sleep(0.02)
        job.tell("scale", 2)
        time.sleep(2.5)  # in which the launcher looks at its requests, on a busy machine, too
        os.kill(server, signal.SIGCONT)
        report = job.end()

    assert {event["workers"] for event in of_kind(report, "StepCommitted")} == {2}
    assert {rank for rank, code in exit_codes(report).items() if code} == {2, 3}
    check_same(report, finished=[0, 1])


def cmdline(pid):
    return Path("/proc", str(pid), "cmdline").read_bytes()


def changed_by_hand(run_dir, at, **changes):
    """The hash of a run in one process, changed at the same step, that nothing else happened to."""
    run_dir.mkdir()
    ask = lambda step: append(requests_path(run_dir), changes) if step.number == at else None  # noqa: E731
    training = Training(run_dir=str(run_dir))
    training.run(ask)
    return training


def test_changes_count_from_one_step_on_at_all_workers_and_for_newcomers_and_after_going_back(tmp_path):
    given = words(
        "--fabric", "gloo", "--respawn", "--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 100,
        inject=("kill:rank=1,step=9,phase=allreduce", "kill:rank=2,step=13,phase=backward"),
        deeds=("await-request:7:all", "await:11:all"),
    )  # fmt: skip
    changes = {"lr": 0.02, "batch_size": 15, "strategy": "restart", "checkpoint_every": 2}
    with Live(tmp_path, *given) as job:
        job.wait_for("step 6", has_committed(6))
        options = [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", value)]
        job.tell("set", *options)
        report = job.end()

    taken = of_kind(report, "SettingChanged")
    assert {(event["step"], event["name"], event["value"]) for event in taken} == {
        (8, name, json.dumps(value)) for name, value in changes.items()
    }
    assert {event["rank"] for event in taken} == {0, 1, 2}
    assert (12, 3) in joined(report)
    decisions = {event["decision"] for event in of_kind(report, "Recovered") if event["lost"]}
    assert decisions == {"load"}  # the strategy is the new one, and so is how often a checkpoint is taken
    assert min(event["step"] for event in of_kind(report, "CheckpointSaved")) == 10
    by_hand = changed_by_hand(tmp_path / "by-hand", 7, lr=0.02, batch_size=15)
    assert report["replicas"]["state_sha256"] == by_hand.sha256 != undisturbed()
    assert report["samples"] == NOTHING_LOST
    assert {0, 3} <= set(report["workers"]["ranks_finished"])


# -- the end


def test_a_newcomer_that_cannot_start_or_comes_too_late_does_not_hold_the_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"import runpy, os, sys\n"
        f"if os.environ['HOLDFAST_RANK'] == '3':\n"
        f"    raise OSError('this machine lacks the data')\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    given = words("--fabric", "gloo", "--respawn", inject=("kill:rank=1,step=3",))

    report = run_report(tmp_path, *[script if word == SCRIPT else word for word in given], timeout=LIMIT_S)

    assert exit_codes(report)[1] == -9
    assert joined(report) == set()
    check_same(report, finished=[0, 2])
    assert sum(EPOCHS) * 60 == NOTHING_LOST["planned"]


def test_negative_control_a_newcomer_without_the_momenta_of_the_others_is_found_out(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"import runpy, os, sys\n"
        f"if os.environ['HOLDFAST_RANK'] == '3':\n"
        f"    from holdfast.engine.restorer import StateRestorer\n"
        f"    install = StateRestorer.install\n"
        f"    StateRestorer.install = lambda self: (install(self), self._trainable.optimizer.state.clear())\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    given = words("--fabric", "gloo", "--respawn", inject=("kill:rank=1,step=3",), deeds=("await:8:all",))

    report = run_report(tmp_path, *[script if word == SCRIPT else word for word in given], timeout=LIMIT_S, exit_code=1)

    assert report["outcome"] == "failed"
    assert "the replicas differ before step" in report["error"]["message"]
