"""What is kept and saved of the end of a training loop, by a process that trains alone."""

from __future__ import annotations

import contextlib
import fcntl
import signal

import pytest
import torch
import torch.nn.functional as F
from interrupted import interruptions
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.checkpoint import load, steps, write_tensors
from holdfast.config import Settings
from holdfast.engine.recovering import RecoveringLoop
from holdfast.models.trainable import Runner
from holdfast.session import script_end
from holdfast.session.session import forget_sessions
from holdfast.state import loop_end, store_loss
from holdfast.state.manager import CheckpointManager

PER_EPOCH = 4


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no handler of an earlier test is a script's own one here
    yield
    forget_sessions()
    script_end._stopped.clear()
    signal.signal(signal.SIGTERM, before)


def prepare(where, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    x = torch.randn(4 * PER_EPOCH, 3)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return holdfast.prepare(model, optimizer, loader, workers=1, checkpoint_dir=str(where), **settings)


def train(model, optimizer, loader, *, stops_at=-1, breaks_at=-1):
    for x, y in loader:
        if loader.step == stops_at - 1:
            loader.stop()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if loader.step == breaks_at:
            break


def job_of(loader):
    return loader.session._job


def test_the_state_of_a_loop_that_was_left_is_that_of_its_last_step(tmp_path):
    model, optimizer, loader = prepare(tmp_path)
    train(model, optimizer, loader, breaks_at=2)
    then = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()  # as a script does that loads its best weights

    loader.finish()
    script_end.save_at_end(job_of(loader))

    assert torch.equal(load(tmp_path, 2).state["replica"]["model"]["weight"], then)


def test_an_early_stop_is_noted_where_a_checkpoint_of_the_step_exists(tmp_path):
    model, optimizer, loader = prepare(tmp_path, checkpoint_every=2)
    train(model, optimizer, loader, stops_at=2)
    assert steps(tmp_path) == [2]
    assert "stopped" not in info_of(tmp_path, 2)

    script_end.save_at_end(job_of(loader))

    assert info_of(tmp_path, 2)["stopped"] is True
    model, optimizer, loader = prepare(tmp_path, checkpoint_every=2, resume=True)
    for _ in loader.epochs(3):
        train(model, optimizer, loader)
    assert (loader.step, loader.stopped) == (2, True)


def info_of(where, step):
    return CheckpointManager(Settings(checkpoint_dir=str(where)), background=False).info(step)


def test_a_state_that_was_just_saved_is_not_copied(tmp_path):
    model, optimizer, loader = prepare(tmp_path, checkpoint_every=PER_EPOCH)

    train(model, optimizer, loader)
    assert job_of(loader).loops.at_end.content is None

    train(model, optimizer, loader, breaks_at=PER_EPOCH + 1)
    assert job_of(loader).loops.at_end.content is not None


def test_epochs_that_the_script_has_left_are_over_for_the_loops_after_them(tmp_path):
    def script(**settings):
        model, optimizer, loader = prepare(tmp_path, checkpoint_every=1, **settings)
        seen = []
        for epoch in loader.epochs(3):
            seen.append(epoch)
            train(model, optimizer, loader)
            break
        for _ in range(2):
            train(model, optimizer, loader)
        return seen, model.weight.detach().clone()

    with pytest.raises(SystemExit):
        script(stop_after=PER_EPOCH)  # in the first loop after them
    seen, weights = script(resume=True)

    assert info_of(tmp_path, PER_EPOCH + 1)["script_epoch"]["number"] == 3
    assert seen == []
    for file in sorted(tmp_path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    seen, undisturbed = script()
    assert seen == [0]
    assert torch.equal(weights, undisturbed)


def test_a_notice_while_the_end_is_saved_stops_the_script_after_it(tmp_path, monkeypatch):
    model, optimizer, loader = prepare(tmp_path)
    save_alone = CheckpointManager.save_alone

    def save(self, *args):
        signal.raise_signal(signal.SIGTERM)  # in this thread: kill() may reach another, later
        return save_alone(self, *args)

    monkeypatch.setattr(CheckpointManager, "save_alone", save)
    left = loader.epochs(1)
    next(left)
    train(model, optimizer, loader)
    with pytest.raises(SystemExit) as stopped:
        next(left)

    assert stopped.value.code == script_end.exit_code()
    assert script_end._stopped == [job_of(loader)]
    assert steps(tmp_path) == [PER_EPOCH]


@pytest.mark.parametrize("function", [Runner.ask_to_stop, RecoveringLoop._forget_stop, loop_end.save_end])
def test_a_notice_is_kept_at_whatever_instruction_it_arrives(tmp_path, function):
    asks = function is Runner.ask_to_stop

    def script(where):
        model, optimizer, loader = prepare(where)
        jobs.append(loader)
        for _ in loader.epochs(1):
            train(model, optimizer, loader, stops_at=2 if asks else -1)
        return False

    def notify():
        came.append(True)
        signal.raise_signal(signal.SIGTERM)

    came, jobs = [], []
    for number, run in enumerate(interruptions(function, notify)):
        came.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else that of the script before would remember its notice
        try:
            has_stopped = run(lambda number=number: script(tmp_path / str(number)))
        except SystemExit:
            has_stopped = True
        if asks:  # that has ended training before
            has_stopped = job_of(jobs[-1]).pending.stops_all
        assert has_stopped == bool(came), number
        assert steps(tmp_path / str(number)) or asks, number
        forget_sessions()
    assert number > 5


def test_a_notice_while_an_application_is_torn_down_stops_the_next_one(tmp_path):
    model, optimizer, loader = prepare(tmp_path)
    train(model, optimizer, loader)
    job = job_of(loader)
    end = job.loops.at_end
    for run in interruptions(script_end.forget_jobs, lambda: script_end.on_sigterm(job, is_outside=True)):
        job.loops.at_end = end
        script_end.note_job(job)
        with contextlib.suppress(SystemExit):  # if it came before
            run(forget_sessions)

    job.loops.at_end, job.rebuilds.current = None, object()
    script_end.on_sigterm(job, is_outside=True)
    assert job.pending.stops_all


def test_a_damaged_later_checkpoint_does_not_count_at_any_worker(tmp_path):
    for step in (2, 4):
        write_tensors(tmp_path, step, {"w": torch.arange(4.0)}, {}).commit(0)
    manager = CheckpointManager(Settings(checkpoint_dir=str(tmp_path)), background=False)
    assert manager.last() >= 3

    manager.load(2)  # as the lead has chosen, since that of step 4 is damaged

    assert manager.last() == 2
    newcomer = CheckpointManager(Settings(checkpoint_dir=str(tmp_path)), background=False)
    newcomer.adopt(manager.state())
    assert newcomer.last() == 2


@pytest.mark.parametrize("is_free", [True, False])
def test_a_turn_does_not_wait_for_ever(tmp_path, monkeypatch, is_free):
    monkeypatch.setattr(store_loss, "_TURN_WITHIN_S", 0.1)
    path = tmp_path / "lock"
    with path.open("ab") as held, store_loss.turn(path) if is_free else path.open("ab") as _:
        if is_free:
            with pytest.raises(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        fcntl.flock(held, fcntl.LOCK_EX)
        with store_loss.turn(path):
            assert path.exists()
