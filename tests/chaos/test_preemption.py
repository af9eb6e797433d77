"""SIGTERM, the notice that a machine is about to be taken away: the step is finished, the state saved, exit code 4."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
from jobs import exit_codes, holdfast, run_report
from train_saving import LOOP_ENDS, Training

from holdfast.checkpoint import steps, verify

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_saving.py"


@pytest.fixture(autouse=True)
def _no_session_outlives_a_test(monkeypatch):
    monkeypatch.setattr("holdfast.train.session._sessions", [])


@functools.cache
def undisturbed():
    """The hash of a run that nothing happened to."""
    return Training().run().sha256


def run(tmp_path, *options, deeds=(), script=(), **expected):
    """Run the training with ``--checkpoint-dir``, and return its report."""
    words = [word for deed in deeds for word in ("--deed", deed)]
    given = ("--slices", 3, "--seed", 11, "--checkpoint-dir", tmp_path / "c", *options)
    return run_report(tmp_path, *given, SCRIPT, *words, *script, **expected)


def resume_command(report):
    """The words behind ``holdfast`` of the command that the run ended with."""
    (line,) = re.findall(r"go on with: holdfast (.*)$", report["_stderr"], re.MULTILINE)
    return shlex.split(line)


NOTICES = {
    "to the launcher": (["term-launcher:7:0"], []),
    "to a worker": (["term:7:1"], []),
    "to every process, and again": (["term:7:all", "term-launcher:7:0", "term-launcher:7:1", "term:8:1"], []),
    "while a checkpoint is written": (["term-launcher@checkpoint.tensors:6:0"], ["--checkpoint-every", 6]),
    "in the last step of a loop": (["term-launcher:5:0", "pause:5:all"], []),
    "and a worker is gone at once": (["term-and-die:7:1"], []),
    "and the lead is gone at once": (["term-and-die:7:0"], []),
    "and the lead is gone while it saves": (
        ["term-launcher:7:1", "pause:7:all", "die@checkpoint.rename:8:0"],
        [],
    ),
}


@pytest.mark.parametrize("notice", NOTICES)
def test_a_notice_ends_the_run_with_its_state_saved_and_it_goes_on_to_the_same_bits(tmp_path, notice):
    deeds, options = NOTICES[notice]

    stopped = run(tmp_path, "-n", 2, *options, deeds=deeds, script=("--step-s", 0.02), exit_code=4)

    newest = steps(tmp_path / "c")[-1]
    verify(tmp_path / "c", newest)
    assert f"stopped on request before step {newest}. The state before step {newest} is saved in" in stopped["_stderr"]
    assert "--resume" in resume_command(stopped)
    resumed = Training(workers=3, checkpoint_dir=str(tmp_path / "c"), resume=True).run()
    assert resumed.sha256 == undisturbed()


def test_the_command_that_a_stopped_run_names_goes_on_to_the_same_bits(tmp_path):
    stopped = run(tmp_path, "-n", 2, deeds=["term:7:1"], exit_code=4)
    words = resume_command(stopped)
    script = words.index(str(SCRIPT))

    done = run_report(tmp_path, *words[1:script], SCRIPT)

    assert done["replicas"]["state_sha256"] == undisturbed()
    assert done["samples"] == {"planned": 180, "committed": 180, "lost": 0, "repeated": 0}


def test_a_step_that_outlasts_the_grace_ends_the_run_with_an_older_checkpoint(tmp_path):
    options = ("-n", 2, "--checkpoint-every", 4, "--grace", 1)

    report = run(tmp_path, *options, deeds=["term-launcher:6:0", "sleep:6:1"], exit_code=1)

    assert "stopped on request, but the workers did not save within 1 s" in report["_stderr"]
    assert "The state before step 4 is saved in" in report["_stderr"]
    assert "--resume" in resume_command(report)
    assert steps(tmp_path / "c") == [4]


@pytest.mark.parametrize("fabric", ["ulfm", "virtual"])
def test_a_state_that_cannot_be_saved_on_request_ends_the_run_with_an_error(tmp_path, fabric):
    how = {"ulfm": ("-n", 2, "--fabric", "ulfm"), "virtual": ("-n", 2, "--fabric", "virtual")}[fabric]

    report = run(tmp_path, *how, deeds=["block:0:0", "term:3:0"], exit_code=1)

    assert "training stops before step 4, but its state could not be saved: cannot write" in report["_stderr"]
    assert "go on with" not in report["_stderr"]


def test_a_notice_in_a_run_without_a_place_for_checkpoints_finds_one(tmp_path):
    command = ("run", "-n", 2, "--slices", 3, "--seed", 11)

    stopped = holdfast(*command, SCRIPT, "--deed", "term:7:1", cwd=tmp_path)
    resumed = holdfast(
        *command, "--checkpoint-dir", "holdfast-checkpoint", "--resume", "--report", "out", SCRIPT, cwd=tmp_path
    )

    assert stopped.returncode == 4, stopped.stderr
    assert "The state before step 8 is saved in holdfast-checkpoint; go on with: holdfast run -n 2" in stopped.stderr
    assert resumed.returncode == 0, resumed.stderr
    assert undisturbed() in (tmp_path / "out" / "report.json").read_text()


def test_negative_control_without_a_notice_the_run_does_not_stop(tmp_path):
    report = run(tmp_path, "-n", 2)

    assert report["outcome"] == "done"
    assert exit_codes(report) == {0: 0, 1: 0}
    assert report["steps"] == LOOP_ENDS[-1]
    assert not (tmp_path / "c").exists()
    assert report["replicas"]["state_sha256"] == undisturbed()
