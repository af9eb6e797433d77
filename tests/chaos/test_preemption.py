"""SIGTERM, the notice that a machine is about to be taken away.

To one worker: it finishes the step and leaves the others in order. To the launcher: all save and stop, exit code 4.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from jobs import exit_codes, holdfast, run_report
from train_saving import LOOP_ENDS, Training, undisturbed

from holdfast.checkpoint import steps, verify

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_saving.py"


def run(tmp_path, *options, deeds=(), script=(), **expected):
    """Run the training with ``--checkpoint-dir``, and return its report."""
    words = [word for deed in deeds for word in ("--deed", deed)]
    given = ("--slices", 3, "--checkpoint-dir", tmp_path / "c", *options)
    return run_report(tmp_path, *given, SCRIPT, *words, *script, **expected)


def resume_command(report):
    """The words behind ``holdfast`` of the command that the run ended with."""
    (line,) = re.findall(r"resume with: holdfast (.*)$", report["_stderr"], re.MULTILINE)
    return shlex.split(line)


def left(report):
    """Who left in order, by rank: before which step."""
    return {event["rank"]: event["step"] for event in report["_events"] if event["event"] == "Left"}


def test_workers_that_are_told_to_leave_do_so_in_order_and_the_others_go_on_to_the_same_bits(tmp_path):
    deeds = ["term:-1:2", "term:8:0"]  # before training, and the lead

    report = run(tmp_path, "-n", 3, "--fabric", "ulfm", deeds=deeds)

    assert left(report) == {2: 1, 0: 9}
    assert exit_codes(report) == {0: 0, 1: 0, 2: 0}
    assert report["failures"] == []
    assert report["samples"] == {"planned": 180, "committed": 180, "lost": 0, "repeated": 0}
    assert report["replicas"]["state_sha256"] == undisturbed()


def test_a_worker_that_is_told_to_leave_during_a_save_or_a_recovery_is_no_failure_either(tmp_path):
    deeds = ["term@checkpoint.tensors:6:0", "die:9:1", "term@shrink:9:2"]

    report = run(tmp_path, "-n", 4, "--fabric", "gloo", "--checkpoint-every", 6, deeds=deeds, script=("--step-s", 0.02))

    assert left(report).keys() == {0, 2}
    assert exit_codes(report) == {0: 0, 1: -9, 2: 0, 3: 0}
    assert [failure["rank"] for failure in report["failures"]] == [1]
    assert {6, 12} <= set(steps(tmp_path / "c"))
    assert report["replicas"]["state_sha256"] == undisturbed()


def test_the_last_ones_that_are_told_to_leave_find_a_place_for_the_state_and_name_the_command_that_goes_on(tmp_path):
    given = ("-n", 3, "--fabric", "gloo", "--slices", 3)
    deeds = [word for deed in ("term:3:0", "term:7:1", "term:7:2") for word in ("--deed", deed)]

    stopped = holdfast("run", *given, SCRIPT, *deeds, cwd=tmp_path)

    assert stopped.returncode == 4, stopped.stderr
    said = "stopped on request before step 8. The state before step 8 is saved in holdfast-checkpoint; resume with: "
    assert said in stopped.stderr
    words = shlex.split(stopped.stderr.partition(said)[2].splitlines()[0])
    done = run_report(tmp_path / "again", *words[2 : words.index(str(SCRIPT))], SCRIPT, cwd=tmp_path)
    assert done["replicas"]["state_sha256"] == undisturbed()
    assert done["samples"] == {"planned": 180, "committed": 180, "lost": 0, "repeated": 0}


def test_where_too_few_stay_the_state_is_saved(tmp_path):
    options = ("-n", 2, "--fabric", "gloo", "--min-workers", 2)

    stopped = run(tmp_path, *options, deeds=["term:7:1"], exit_code=1)

    assert left(stopped) == {1: 8}
    assert "too few workers are left to continue at step 8 (--min-workers 2)" in stopped["_stderr"]
    resumed = Training(workers=3, checkpoint_dir=str(tmp_path / "c"), resume=True).run()
    assert resumed.sha256 == undisturbed()


NOTICES = {
    "to the launcher and to workers, again and again": (
        "gloo",
        ["term-launcher:7:0", "term-launcher:7:1", "term:7:0", "term:8:1"],
        [],
    ),
    "while a checkpoint is written": ("ulfm", ["term-launcher@checkpoint.tensors:6:0"], ["--checkpoint-every", 6]),
    "and the lead is gone at once": ("ulfm", ["term-and-die:7:0"], []),
    "and the lead is gone while it saves": (
        "ulfm",
        ["term-launcher:7:1", "pause:7:all", "die@checkpoint.rename:8:0"],
        [],
    ),
}


@pytest.mark.parametrize("notice", NOTICES)
def test_a_notice_ends_the_run_with_its_state_saved_and_it_goes_on_to_the_same_bits(tmp_path, notice):
    fabric, deeds, options = NOTICES[notice]

    stopped = run(tmp_path, "-n", 2, "--fabric", fabric, *options, deeds=deeds, script=("--step-s", 0.02), exit_code=4)

    newest = steps(tmp_path / "c")[-1]
    verify(tmp_path / "c", newest)
    assert f"stopped on request before step {newest}. The state before step {newest} is saved in" in stopped["_stderr"]
    assert "--resume" in resume_command(stopped)
    resumed = Training(workers=3, checkpoint_dir=str(tmp_path / "c"), resume=True).run()
    assert resumed.sha256 == undisturbed()


def test_a_step_that_outlasts_the_grace_ends_the_run_with_an_older_checkpoint(tmp_path):
    options = ("-n", 2, "--checkpoint-every", 4, "--grace", 1)

    report = run(tmp_path, *options, deeds=["term-launcher:6:0", "sleep:6:1"], exit_code=1)

    assert "stopped on request, but the workers did not save within 1 s" in report["_stderr"]
    assert "The state before step 4 is saved in" in report["_stderr"]
    assert "--resume" in resume_command(report)
    assert steps(tmp_path / "c") == [4]


def test_a_state_that_cannot_be_saved_on_request_ends_the_run_with_an_error(tmp_path):
    report = run(tmp_path, "-n", 2, "--fabric", "virtual", deeds=["block:0:0", "term:3:all"], exit_code=1)

    assert "training stops before step 4, but its state could not be saved: cannot write" in report["_stderr"]
    assert "resume with" not in report["_stderr"]


def test_negative_control_without_a_notice_the_run_does_not_stop_even_if_the_launcher_stands_still(tmp_path):
    report = run(tmp_path, "-n", 2, "--fabric", "gloo", deeds=["stop-launcher:7:0"])

    assert report["outcome"] == "done"
    assert exit_codes(report) == {0: 0, 1: 0}
    assert report["steps"] == LOOP_ENDS[-1]
    assert [path.name for path in (tmp_path / "c").glob("step-*")] == [f"step-{LOOP_ENDS[-1]:08}"]  # the end alone
    assert report["replicas"]["state_sha256"] == undisturbed()
