"""What scripts do between training loops: epochs that are over, SIGTERM, the end of training, and loops that are left."""

import functools
import re
from pathlib import Path

import pytest
import train_epochs
from jobs import exit_codes, run_report

from holdfast.checkpoint import steps, verify

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(170),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # where an epoch is over
]

SCRIPT = Path(train_epochs.__file__)


def run_here(*words, **settings):
    """Return the weights and the evaluated epochs of a run in this process."""
    script = train_epochs.Script(train_epochs.options(list(words)), fabric="virtual", workers=1, slices=3, **settings)
    return script.run(), script.best.seen


@functools.cache
def undisturbed(loops=1):
    return run_here("--loops", str(loops))


def check_resumed(tmp_path, *words):
    """A run that resumes ends as an undisturbed one, and has evaluated each epoch once, over both runs."""
    assert run_here(*words, checkpoint_dir=str(tmp_path / "c"), resume=True) == undisturbed()


def run(tmp_path, *options, deeds=(), script=(), name="c", **expected):
    words = [word for deed in deeds for word in ("--deed", deed)]
    given = ("-n", 3, "--checkpoint-dir", tmp_path / name, *options)
    return run_report(
        tmp_path,
        *(("--fabric", "gloo") if "--fabric" not in options else ()),
        *given,
        SCRIPT,
        *words,
        *script,
        **expected,
    )


def weights(report):
    """The weights that each rank ended with."""
    return set(re.findall(r"weights (\w+)", report["_stdout"]))


def check(report, loops=1):
    end, evaluated = undisturbed(loops)
    assert weights(report) == {end}
    assert f"evaluated {evaluated}" in report["_stdout"]  # each epoch once, over both runs


@pytest.mark.parametrize(("loops", "last", "begins"), [(1, 5, 1), (2, 13, 1)])
def test_a_resumed_script_begins_at_the_epoch_of_the_checkpoint(tmp_path, loops, last, begins):
    script = ("--loops", loops)
    run(tmp_path, "--stop-after", last, script=script, exit_code=4)

    report = run(tmp_path, "--resume", script=script)

    check(report, loops)
    assert re.findall(r"epoch (\d) steps", report["_stdout"]) == [str(epoch) for epoch in range(begins, 4)]
    assert "yields nothing" not in report["_stderr"] or loops > 1


def test_a_job_that_starts_again_by_itself_does_so_too(tmp_path):
    report = run(tmp_path, "--checkpoint-every", 6, deeds=["end:8:0"])

    assert [event["restart"] for event in report["_events"] if event["event"] == "JobRestarted"] == [1]
    check(report)
    assert re.findall(r"epoch (\d) steps", report["_stdout"]) == ["0", "1", "1", "2", "3"]


def test_a_script_that_ends_in_an_epoch_that_is_over_is_not_done(tmp_path):
    early = ("--range", "--patience", 1)
    run(tmp_path, "--stop-after", 13, script=early, exit_code=4)

    report = run(tmp_path, "--resume", script=early, exit_code=93)

    assert "this loop was done before the checkpoint (step 14): it yields nothing" in report["_stdout"]
    assert "before training loop 3, to which the checkpoint of step 14 belongs" in report["_stderr"]
    assert "for epoch in loader.epochs(N)" in report["_stderr"]
    assert steps(tmp_path / "c") == [14]
    check_resumed(tmp_path, "--patience", "1")  # as the line says


BETWEEN = {
    "and have a handler of their own": ("gloo", ["term:4:0", "wait:4:1", "wait:4:2"], ("--own-handler",)),
    "the lead evaluates, and others are in the next loop": ("ulfm", ["term-late:4:0"], ()),
    "a second rank has died": ("gloo", ["die:4:0", "term:4:1", "wait:4:2"], ()),
    "in a loop that was left": ("gloo", ["break:4:all", "term:4:0", "wait:4:1", "wait:4:2"], ()),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_a_notice_between_two_loops_saves_the_end_of_the_last_one(tmp_path, case):
    fabric, deeds, script = BETWEEN[case]

    stopped = run(tmp_path, "--fabric", fabric, deeds=deeds, script=script, exit_code=4)

    newest = steps(tmp_path / "c")[-1]
    assert 4 <= newest <= 5  # workers that are in the next loop may finish a step of it
    verify(tmp_path / "c", newest)
    assert f"stopped on request before step {newest}" in stopped["_stderr"]
    check_resumed(tmp_path)


@pytest.mark.parametrize("script", [(), ("--own-handler",)])
def test_a_notice_before_the_first_step_loses_nothing(tmp_path, script):
    report = run(tmp_path, deeds=["term:0:0", "wait:0:1", "wait:0:2"], script=script, exit_code=4)

    trains = "stopped on request before step 1"  # the script's handler does not end it
    assert (trains if script else "stopped before training; nothing was lost") in report["_stderr"]
    assert "died" not in report["_stderr"]


def test_the_end_of_training_is_saved_though_the_lead_dies_after_it(tmp_path):
    # what the script writes under is_lead last is missing, but not the state
    report = run(tmp_path, "--checkpoint-every", 6, deeds=["die:16:0"], script=("--range",), exit_code=1)

    assert exit_codes(report) == {0: -9, 1: 0, 2: 0}
    assert steps(tmp_path / "c") == [6, 12, 16]
    verify(tmp_path / "c", 16)
    assert run_here(checkpoint_dir=str(tmp_path / "c"), resume=True)[0] == undisturbed()[0]


def test_a_notice_after_the_last_epoch_stops_a_script_whose_end_is_saved(tmp_path):
    stopped = run(tmp_path, deeds=["term:-1:0", "wait:-1:1", "wait:-1:2"], exit_code=4)

    assert "stopped on request before step 16" in stopped["_stderr"]
    assert steps(tmp_path / "c") == [16]
    check_resumed(tmp_path)


def test_a_notice_behind_a_loop_that_was_trained_before_stops_the_script_too(tmp_path):
    run(tmp_path, "--stop-after", 5, exit_code=4)
    passed = ["term:6:0", "wait:6:1", "wait:6:2"]

    stopped = run(tmp_path, "--resume", deeds=passed, script=("--range",), exit_code=4)

    assert "it yields nothing" in stopped["_stdout"]
    assert "stopped on request before step 6" in stopped["_stderr"]
    assert steps(tmp_path / "c") == [6]
    verify(tmp_path / "c", 6)
    check_resumed(tmp_path)


def test_a_worker_that_leaves_its_first_loop_ends_training_for_all(tmp_path):
    report = run(tmp_path, deeds=["break:2:1"], script=("--range",))

    assert "all workers stop training after the same step" in report["_stdout"]
    ends = dict(re.findall(r"rank (\d) steps (\d+)", report["_stdout"]))
    assert ends == {"0": "2", "1": "2", "2": "2"}
    assert report["restarts"] == 0, "the one that left it begins no further loop, in which it would wait for the others"
    assert len(weights(report)) == 1
    assert steps(tmp_path / "c") == [2]


LEFT = {"an exception": ["swallow:6:1"], "and another dies": ["break:6:1", "die-in:6:2"]}


@pytest.mark.parametrize("how", LEFT)
def test_a_loop_that_one_worker_leaves_ends_for_all_after_the_same_step(tmp_path, how):
    report = run(tmp_path, deeds=LEFT[how], script=("--epochs", 2))

    assert "rank 1 left the loop after step 5, while other ranks were in step 6" in report["_stdout"]
    ends = dict(re.findall(r"rank (\d) steps (\d+)", report["_stdout"]))
    assert set(ends.values()) == {"6"}
    assert len(set(re.findall(r"drawn (\(.*\))", report["_stdout"]))) == 1, "random numbers after it are the same"
    assert len(weights(report)) == 1
    assert report["samples"]["repeated"] == 0
    assert steps(tmp_path / "c") == [6]
    assert not [event for event in report["_events"] if event["event"] == "JobRestarted"]


def test_a_loop_that_all_leave_is_over_for_that_epoch_alone(tmp_path):
    report = run(tmp_path, deeds=["break:6:all"])

    assert "left the loop" not in report["_stdout"]
    assert set(re.findall(r"steps (\d+) weights", report["_stdout"])) == {"14"}
    assert [event for event in report["_events"] if event["event"] == "Recovered"] == []
