"""A slice that runs out of a device's memory is computed once more, alone, with the same bits. Memory is short by decree here."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.engine import exits
from holdfast.models.training_state import model_tensors

SAMPLES, SLICES = 64, 4
SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Model(nn.Module):
    """Draws random numbers and changes buffers; or, ``plain``, has rows that can be batched."""

    def __init__(self, *, plain=False):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12) if plain else nn.BatchNorm1d(12)
        self.drop = nn.Identity() if plain else nn.Dropout(0.3)
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


def trained(model, compute):
    """Train, each step by ``compute(step)``; return all tensors of the model."""
    drawn = torch.Generator().manual_seed(6)
    data = TensorDataset(torch.randn(SAMPLES, 6, generator=drawn), torch.randint(3, (SAMPLES,), generator=drawn))
    optimizer = torch.optim.Adam(model.parameters())
    session = holdfast.Session(model, optimizer, workers=1, slices=SLICES, fabric="virtual")
    for step in session.steps(data, 16, epochs=3):
        compute(step)
    return {name: tensor.clone() for name, tensor in model_tensors(model)}


def train(model, forward=None):
    return trained(model, lambda step: step.compute(forward or model, F.cross_entropy))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def failing(model, *calls, error=SHORT, larger_than=0):
    """Return a forward function of which these calls, counted from 1, raise after they have computed."""
    count = 0

    def forward(x):
        nonlocal count
        made = model(x)
        if len(x) > larger_than:
            count += 1
            if count in calls:
                raise error
        return made

    return forward


def test_a_slice_that_ran_out_of_memory_has_the_same_bits_when_it_is_computed_again(capsys):
    expected = train(Model())
    model = Model()

    got = train(model, failing(model, 6, 19))

    assert same(got, expected)
    lines = [line for line in capsys.readouterr().err.splitlines() if "computed again" in line]
    # Call 6 is slice 1 of step 1, and the seventh call computes it again.
    assert lines == [
        f"holdfast: worker 0: slice {place} is computed again, with memory freed: CUDA out of memory. Tried to allocate 2.00 GiB."
        for place in ("1 of step 1", "1 of step 4")
    ]


def test_without_memory_for_the_second_time_the_error_reaches_the_script():
    model = Model()

    with pytest.raises(torch.OutOfMemoryError):
        train(model, failing(model, 6, 7))


def loop(model, *calls, error=SHORT, where="backward"):
    """Train in a plain loop in which these slices, counted from 1, raise in their pass; return all tensors of the model."""
    count = 0

    def strike(_):
        raise error

    def compute(step, x, y):
        nonlocal count
        count += 1
        out = model(x)
        if count in calls and where == "forward":
            strike(out)
        if count in calls:
            out.register_hook(strike)
        loss = F.cross_entropy(out, y)
        step.backward(loss)
        step.log(loss_again=loss.detach())

    return trained(model, lambda step: [compute(step, x, y) for x, y in step])


def test_a_loop_over_the_step_gets_a_slice_again_whose_backward_pass_ran_out_of_memory(capsys):
    expected = train(Model())

    got = loop(Model(), 6, 19)

    assert same(got, expected)
    lines = [line for line in capsys.readouterr().err.splitlines() if "computed again" in line]
    assert len(lines) == 2
    assert lines[0].startswith("holdfast: worker 0: slice 1 of step 1 is computed again, with memory freed: CUDA out")


class Saved:
    """What a graph has saved of a forward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_nothing_keeps_what_the_failed_pass_had_computed():
    model, kept, count = Model(), weakref.WeakSet(), 0

    def pack(tensor):
        saved = Saved(tensor.detach())  # not a cycle through its graph
        kept.add(saved)
        return saved

    def compute(step, x, y):
        nonlocal count
        count += 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = F.cross_entropy(model(x), y)
        if count == 6:
            loss.register_hook(lambda _: (_ for _ in ()).throw(SHORT))
            assert kept
        step.backward(loss)
        if count == 6:
            gc.collect()
            assert not kept

    trained(model, lambda step: [compute(step, x, y) for x, y in step])

    assert count == 3 * (SAMPLES // 16) * SLICES + 1


@pytest.mark.parametrize(
    ("calls", "error", "where"),
    [
        ((6, 7), SHORT, "backward"),
        ((6,), SHORT, "forward"),
        ((6,), LOST, "backward"),
        ((6,), RuntimeError("a bug"), "backward"),
    ],
    ids=["twice", "in-the-forward-pass", "a-lost-device", "a-bug"],
)
def test_any_other_error_reaches_the_script(calls, error, where):
    with pytest.raises(type(error)):
        loop(Model(), *calls, error=error, where=where)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), LOST], ids=repr)
def test_any_other_error_is_not_tried_again(error):
    model, calls = Model(), []
    forward = failing(model, 6, error=error)

    with pytest.raises(type(error)):
        train(model, lambda x: (calls.append(1), forward(x))[1])

    assert len(calls) == 6


@pytest.mark.parametrize(
    ("error", "ended"), [(LOST, ["worker", "job"]), (SHORT, ["job"]), (ValueError(), ["job"])], ids=repr
)
def test_without_a_launcher_a_lost_device_ends_the_worker_and_another_error_the_job(monkeypatch, error, ended):
    """Ending the worker does not return, but here both are only written down."""
    done, hooks = [], {}
    monkeypatch.setattr(exits, "kill_self", lambda: done.append("worker"))
    monkeypatch.setattr(exits, "end_job", lambda: done.append("job"))
    monkeypatch.setattr(exits.sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(exits.atexit, "register", lambda at_exit: hooks.setdefault("exit", at_exit))

    exits.end_job_on_errors(lambda: None)
    exits.sys.excepthook(type(error), error, None)

    assert done == ended
