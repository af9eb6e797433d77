"""Event files of jobs whose lead is killed in every phase, and whose launcher is killed: each step once, with its value."""

import os
import signal
from pathlib import Path

import pytest
from jobs import assert_landed, exit_codes, run_report

pytest.importorskip("tensorboard", reason="make loggers")
from logged import LOGGED, LOGGED_JOB, STEPS, Start, scalars_of, steps_on_disk

from holdfast.faults.kinds import PHASES
from holdfast.observe.loggers.leftovers import RunRecords
from holdfast.observe.loggers.sink import LoggerSink
from holdfast.observe.loggers.steps import LoggedImage, LoggedStep
from holdfast.observe.loggers.tensorboard import TensorBoardLogger
from holdfast.records.types import RunStarted, StepCommitted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The scalars of the job without a failure."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_report(folder, "-n", 3, *LOGGED_JOB, "--log-to", f"tensorboard:{folder / 'log'}", LOGGED)
    found = scalars_of(folder / "log")
    assert {tag: [step for step, _ in values] for tag, values in found.items()} == {
        "loss": list(range(STEPS)),
        "mean": list(range(STEPS)),
        "accuracy": [STEPS - 1],
    }
    return found


# Faults that kill the lead in each phase, and then the next lead. In recovery there has to be a failure before.
KILLS = {
    **{phase: ((0, 4, phase), (1, 8, phase)) for phase in ("forward", "backward", "allreduce", "optimizer")},
    "recovery": ((2, 4, "forward"), (0, 4, "recovery")),
    "checkpoint": ((0, 4, "checkpoint"), (1, 8, "checkpoint")),
    "rejoin": ((0, 4, "forward"), (3, 0, "rejoin"), (1, 8, "allreduce")),
}


def test_each_phase_has_its_kills():
    assert set(KILLS) == set(PHASES)


@pytest.mark.chaos
@pytest.mark.parametrize("phase", KILLS)
def test_however_the_lead_dies_each_step_is_logged_once(tmp_path, undisturbed, phase):
    log = tmp_path / "log"
    faults = [
        word for rank, step, at in KILLS[phase] for word in ("--inject", f"kill:rank={rank},step={step},phase={at}")
    ]
    options = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 4] if phase == "checkpoint" else []
    options += ["--respawn"] if phase == "rejoin" else []
    pace_s = 0.6 if phase == "rejoin" else 0.0  # a newcomer has to find the job at work

    report = run_report(
        tmp_path, "-n", 3, *LOGGED_JOB, *options, *faults, "--log-to", f"tensorboard:{log}", LOGGED, "--step-s", pace_s
    )

    killed = {rank for rank, _, _ in KILLS[phase]}
    assert {rank: exit_codes(report)[rank] for rank in killed} == dict.fromkeys(killed, -signal.SIGKILL)
    if phase != "rejoin":
        assert_landed(report, *killed)
    committed = [(event["rank"], event["step"]) for event in report["_events"] if event["event"] == "StepCommitted"]
    assert len({rank for rank, _ in committed}) >= 2, "there was one lead only: the test shows nothing"
    if phase != "optimizer":  # there the lead dies before it records the step
        assert len(committed) > STEPS, "no lead has repeated a step: the test shows nothing"
    assert scalars_of(log) == undisturbed
    assert report["sinks"] == [{"name": "tensorboard", "taken": report["sinks"][0]["taken"], "dropped": 0}]


@pytest.mark.chaos
def test_a_job_that_is_started_again_from_a_checkpoint_logs_no_step_twice(tmp_path, undisturbed):
    log = tmp_path / "log"
    faults = [word for rank in range(3) for word in ("--inject", f"kill:rank={rank},step=7")]
    options = ("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 4)

    report = run_report(tmp_path, "-n", 3, *LOGGED_JOB, *options, *faults, "--log-to", f"tensorboard:{log}", LOGGED)

    assert report["restarts"] == 1
    assert report["steps_redone"] >= 3
    assert scalars_of(log) == undisturbed


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_however_often_the_launcher_dies_each_step_is_logged_once(tmp_path, undisturbed):
    log = tmp_path / "log"
    unlogged = []
    for number, step in enumerate((2, 6, 9)):
        committed, saved = Start(tmp_path, f"tensorboard:{log}", *(["--resume"] if number else [])).kill_after(step)
        unlogged.append({each for each in committed if each < saved} - set(steps_on_disk(log)))
    Start(tmp_path, f"tensorboard:{log}", "--resume").end()

    assert any(unlogged), "no checkpoint was newer than the log: the test shows nothing"
    found = scalars_of(log)
    assert {tag: [step for step, _ in values] for tag, values in found.items()} == {
        tag: [step for step, _ in values] for tag, values in undisturbed.items()
    }
    assert found == undisturbed
    assert sorted(steps_on_disk(log)) == [*range(STEPS), STEPS - 1], "the last step has a second event, of session.log"


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_job_that_is_stopped_and_resumed_logs_each_step_once(tmp_path, undisturbed):
    log = tmp_path / "log"

    Start(tmp_path, f"tensorboard:{log}").stop_after(4)
    stopped = steps_on_disk(log)
    assert stopped == list(range(len(stopped)))
    assert 5 <= len(stopped) < STEPS
    for _ in range(2):  # the second time there is nothing left to do
        Start(tmp_path, f"tensorboard:{log}", "--resume").end()

        assert scalars_of(log) == undisturbed


class Records(RunRecords):
    """Record files without a file."""

    def read(self):
        return [commit(step) for step in range(9)]


def commit(step):
    return StepCommitted(t_s=float(step), rank=0, step=step, epoch=0, samples=1, workers=1, metrics={"loss": step / 8})


def start_at(step):
    values = dict.fromkeys(("fabric", "strategy", "order", "split", "batch", "rescale"), "")
    numbers = dict.fromkeys(
        ("seed", "workers", "slices", "steps_planned", "samples_planned", "num_buckets", "parameters"), 1
    )
    return RunStarted(t_s=0.0, rank=0, step=step, **values, **numbers)


def test_an_event_file_may_end_at_any_byte(tmp_path):
    whole = tmp_path / "whole"
    first = TensorBoardLogger(whole)
    first.open()
    first.write([LoggedStep(step=step, time_s=1.0, metrics={"loss": step / 8}) for step in range(4)])
    first.close(is_done=False)
    (file,) = whole.iterdir()
    data, run = file.read_bytes(), Records(run_dir=Path("/nowhere"), epoch_s=0.0)

    for size in range(len(data) + 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / file.name).write_bytes(data[:size])
        sink = LoggerSink(TensorBoardLogger(folder), run, [run])
        sink.take([start_at(5), *map(commit, range(5, 9))])
        sink.close(10.0)

        if size >= 40:  # TensorBoard leaves out a file whose first event is not complete
            assert scalars_of(folder) == {"loss": [(step, step / 8) for step in range(9)]}, size
        assert steps_on_disk(folder) == list(range(9)), size


def test_steps_that_cannot_be_encoded_leave_no_files(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    image = LoggedImage(path=tmp_path / "gone.png", width=1, height=1, channels=1)
    for _ in range(3):
        assert logger.open() == {}
        with pytest.raises(FileNotFoundError):
            logger.write([LoggedStep(step=0, time_s=0.0, metrics={}, images={"image": image})])

    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_continued_in_a_new_file(tmp_path, monkeypatch):
    from holdfast.records.queued import NotTaken

    sink = LoggerSink(TensorBoardLogger(tmp_path), Records(run_dir=Path("/nowhere"), epoch_s=0.0))
    sink.take([start_at(0), commit(0), commit(1)])
    real = os.write

    def torn(file, data):
        real(file, bytes(data)[:11])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.observe.loggers.tensorboard.os.write", torn)
        with pytest.raises(NotTaken, match="No space left on device"):
            sink.take([commit(2)])
        with pytest.raises(NotTaken, match="No space left on device"):
            sink.take([commit(3)])
    sink.take([commit(4)])
    sink.close(5.0)

    assert scalars_of(tmp_path) == {"loss": [(step, step / 8) for step in range(5)]}
    assert len(list(tmp_path.iterdir())) == 2
