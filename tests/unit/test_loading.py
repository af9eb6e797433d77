"""Loading slices ahead of time, in processes: the same bits, whatever happens to those processes or to the workers."""

import functools
import os
import signal

import numpy as np
import planned
import pytest
import reference
import torch
from train_reference import train

import holdfast
from holdfast.data import loader as loading_room
from holdfast.data.loader import DataSource, SliceLoader
from holdfast.data.plan import MiniBatch
from holdfast.errors import ConfigError


class Numbers(torch.utils.data.Dataset):
    """Its own number, a random one, and who loaded it."""

    def __init__(self, dies_at=-1):
        self.dies_at = dies_at

    def __len__(self):
        return 64

    def __getitem__(self, number):
        if number == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return number, float(np.random.normal()), os.getpid()


def batches(first=0):
    """Mini-batches of four slices with two samples each, from a step on."""
    for step in range(first, 8):
        slices = tuple(np.arange(8 * step + 2 * n, 8 * step + 2 * n + 2) for n in range(4))
        yield MiniBatch(step=step, epoch=0, full_size=8, slices=slices, owners=dict.fromkeys(range(4), 0), after=None)


def loading(mine, **source):
    return SliceLoader(
        DataSource(Numbers(), num_workers=2, **source), lambda batch: batches(batch.step + 1), lambda _: mine
    )


def alone(batch, number):
    return SliceLoader(DataSource(Numbers()), None, None)(3, batch, number)


def test_what_is_loaded_ahead_is_what_is_needed_though_slices_change_hands_and_steps_are_done_again():
    mine = [1]
    ahead = loading(mine)
    asked = [(step, mine[:]) for step in range(3)] + [
        (2, [0, 1]),
        (3, [0, 1]),
        (3, [0, 1]),
        (4, [3]),
        (1, [3]),
        (7, [0]),
    ]

    for step, held in asked:
        mine[:] = held
        batch = next(batches(step))
        for number in held:
            numbers, noise, loaders = ahead(3, batch, number)
            wanted_numbers, wanted_noise, _ = alone(batch, number)
            assert numbers.tolist() == wanted_numbers.tolist() == batch.slices[number].tolist()
            assert torch.equal(noise, wanted_noise)
            assert os.getpid() not in loaders.tolist()
    ahead.close()


def test_what_was_planned_is_forgotten_when_the_same_slices_hold_other_samples():
    size = 2

    def cut(first):
        for step in range(first, 40):
            slices = tuple(np.arange(size * (2 * step + n), size * (2 * step + n + 1)) % 64 for n in range(2))
            yield MiniBatch(step=step, epoch=0, full_size=2 * size, slices=slices, owners={0: 0, 1: 1}, after=None)

    ahead = SliceLoader(DataSource(Numbers(), num_workers=2), lambda batch: cut(batch.step + 1), lambda _: [0])
    held = []
    for step in range(20):
        size = 2 if step < 3 else 3
        batch = next(cut(step))
        numbers, _, _ = ahead(3, batch, 0)
        assert numbers.tolist() == batch.slices[0].tolist()
        held.append(len(ahead._ready))
    ahead.close()

    assert max(held[10:]) <= 4, "what nobody will ask for piles up"


def test_the_generators_are_the_same_after_loading_here_and_elsewhere():
    batch, ahead = next(batches()), loading([0])
    drawn = []
    for load in (ahead, SliceLoader(DataSource(Numbers()), None, None)):
        load(3, batch, 0)
        drawn.append((float(torch.rand(1)), float(np.random.normal())))
    ahead.close()

    assert drawn[0] == drawn[1]


def test_a_lost_process_is_started_anew_and_nothing_changes(capfd):
    ahead = loading([0, 1, 2, 3])
    first = ahead(3, next(batches()), 0)
    os.kill(int(first[2][0]), signal.SIGKILL)

    got = [ahead(3, batch, number) for batch in batches() for number in range(4) if (batch.step, number) > (0, 0)]

    wanted = [alone(batch, number) for batch in batches() for number in range(4) if (batch.step, number) > (0, 0)]
    assert [(one[0].tolist(), one[1].tolist()) for one in got] == [(one[0].tolist(), one[1].tolist()) for one in wanted]
    assert "all of them are restarted" in capfd.readouterr().err
    ahead.close()


@pytest.mark.soak
def test_data_that_kill_who_loads_them_end_training(monkeypatch):
    monkeypatch.setattr(loading_room, "_MOST_RESTARTS", 1)  # each is found out within five seconds
    ahead = SliceLoader(DataSource(Numbers(dies_at=0), num_workers=1), lambda batch: iter(()), lambda _: [0])

    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        ahead(3, next(batches()), 0)


@pytest.mark.parametrize(("name", "value"), [("num_workers", -1), ("prefetch_factor", 0)])
def test_numbers_that_make_no_sense_are_refused(name, value):
    model = torch.nn.Linear(1, 1)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        session.steps(Numbers(), 4, **{name: value})


# ---------------------------------------------------------------------------------------------
# What a training may have besides


KILLS = planned.faults("kill:rank=1,step=3,phase=backward", "kill:rank=0,step=7,phase=allreduce")


def end_of(model, features, **more):
    session, state = train(model, "adam", features=features, workers=4, **more)
    return (state, int(session._job.loops.finished[-1].metrics["ema"])) if "ema" in features else state


SKIPPED = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
"""Torch warns where the scaler leaves the first steps out, or the script steps the scheduler by itself."""


@functools.cache
def wanted():
    return reference.train("cnn", "adam", reference.FEATURES)


@SKIPPED
@pytest.mark.parametrize("faults", ["", KILLS], ids=["undisturbed", "killed"])
def test_all_of_them_together_give_the_bits_of_the_reference(faults):
    assert end_of("cnn", reference.FEATURES, faults=faults) == wanted()


@SKIPPED
@pytest.mark.parametrize("broken", [feature for feature in reference.FEATURES if feature != "augment"])
def test_what_depends_on_the_worker_or_the_attempt_gives_other_bits(broken):
    """The negative controls, one a feature; noise that depends on the worker breaks two of them."""
    assert end_of("cnn", reference.FEATURES, faults=KILLS, broken=broken) != wanted()
