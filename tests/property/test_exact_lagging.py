"""The same bits with gradients that are not in host memory: the tests of exactness, on a device whose copies lag."""

import random

import pytest
import reference
import torch
import torch.nn.functional as F
from drawn_plans import draw_plan
from exact import reference_hash
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lagging import AddingDevice, LaggingDevice, lagging
from torch import nn
from torch.utils.data import TensorDataset
from train_reference import train

import holdfast
from holdfast.comm import VirtualCommunicator
from holdfast.comm import device as devices
from holdfast.comm.device import DeviceStream, Wait
from holdfast.faults.plan import FaultPlan, parse
from holdfast.models.training_state import model_sha256
from holdfast.testing.contract import check_ordered_sum

BUCKETS = {"mlp": 2, "cnn": 3}
EVERY = [(m, o) for m in reference.MODELS for o in reference.OPTIMIZERS]
KILL = "kill:rank=1,step=3,phase=allreduce,bucket=1"
FLIP_MESSAGE = "flip:rank=1,step=3,target=message,bucket=1,count=4,bits=22"


def plan(*specs):
    return FaultPlan(tuple(map(parse, specs))).to_json()


def train_late(*arguments, seed=0, skips=(), **options):
    """Train on a lagging device; return the hash of the state."""
    with lagging(seed=seed, skips=skips, longest_s=0.001) as made:
        _, state = train(*arguments, **options)
    (device,) = made
    device.settle()
    assert device.copies
    return state


@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), case=st.sampled_from(EVERY), strategy=st.sampled_from(["rollback", "restart"]))
def test_any_deaths_give_the_bits_of_the_undisturbed_run(seed, case, strategy):
    faults = draw_plan(seed, 4, reference.STEPS, 3, BUCKETS[case[0]])
    lucky = random.Random(seed)
    comm = VirtualCommunicator(4, reached=lambda _: [r for r in range(4) if lucky.random() < 0.3])

    state = train_late(*case, seed=seed, comm=comm, faults=faults.to_json(), strategy=strategy)

    assume(len(comm.members) < 4)
    assert state == reference_hash(*case), faults.to_specs()


SETTINGS = {
    "checksums": {"guard_sums": True},
    "overlapped-optimizer": {"overlap_optimizer": True},
    "tree": {"order": "tree"},
    "messages": {"shared_bytes": 0},
    "forward": {"faults": plan(KILL), "strategy": "forward"},
    "scaler-clip-average": {"features": ("scaler", "clip", "average")},
    "flip-gradients": {"faults": plan("flip:rank=1,step=3,target=gradients,count=4,bits=22"), "guard": "off"},
    "flip-message": {"faults": plan(FLIP_MESSAGE), "guard": "off"},
    "heal-message": {"faults": plan(FLIP_MESSAGE), "guard_sums": True, "guard": "heal"},
}
OTHER_BITS = ("tree", "forward", "scaler-clip-average", "flip-gradients", "flip-message")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_are_those_of_host_memory(name):
    state = train_late("cnn", "adam", workers=4, **SETTINGS[name])

    assert state == train("cnn", "adam", workers=4, **SETTINGS[name])[1]
    assert (state != reference_hash("cnn", "adam")) is (name in OTHER_BITS)


def train_parts(kind, *specs):
    """Train a model whose parts are on several workers; return the sha256 of its weights."""
    module = reference.make_model("cnn")
    model = {
        "sharded": lambda: holdfast.Sharded(module),
        "pipeline": lambda: holdfast.Pipeline([module[:3], module[3:]], F.cross_entropy),
    }[kind]()
    session = holdfast.Session(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        workers=4,
        slices=4,
        bucket_bytes=4096,
        seed=reference.SEED,
        faults=plan(*specs),
    )
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, 1):
        if kind == "pipeline":
            step.compute()
        else:
            for x, y in step:
                step.backward(F.cross_entropy(module(x), y))
    return model_sha256(module if kind == "sharded" else model.module)


@pytest.mark.parametrize("kind", ["sharded", "pipeline"])
def test_models_in_parts_have_the_bits_of_host_memory(kind):
    expected = train_parts(kind)

    with lagging(longest_s=0.001) as made:
        states = {train_parts(kind), train_parts(kind, "kill:rank=1,step=2,phase=allreduce")}

    assert states == {expected}
    assert made[0].copies


@pytest.mark.parametrize("wait", [Wait.COPIED, Wait.ARRIVED], ids=lambda wait: wait.name)
def test_a_missing_wait_is_seen_in_training(wait):
    try:
        state = train_late("cnn", "sgd", workers=4, skips={wait})
    except Exception:
        return  # a poisoned number may also end in an error
    assert state != reference_hash("cnn", "sgd")


def test_slices_that_are_computed_in_one_call():
    state = train_late(reference.ROWS, "adam", workers=2, compute=True)

    assert state == reference_hash(reference.ROWS, "adam")


class Noting(LaggingDevice):
    """Notes what happens, in order."""

    def __init__(self, device):
        super().__init__(device)
        self.noted = []

    def copy(self, into, source, stream):
        if stream is DeviceStream.TO_HOST:
            self.noted.append("copy")
        super().copy(into, source, stream)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def train_layers(each=lambda model: None, twice=False, noted=None):
    """Train in buckets of one layer; return the sha256 of the weights."""
    model = layers()
    session = holdfast.Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), workers=2, slices=2, bucket_bytes=8 * 9 * 4
    )
    if noted is not None:
        for number, layer in enumerate(model):
            layer.weight.register_hook(lambda _, number=number: noted.append(number))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for step in session.steps(TensorDataset(x, x), 8, 1):
        for x, y in step:
            loss = F.mse_loss(model(x), y)
            if twice:
                step.add_loss(loss * len(x) / 2, loss.detach() / 2)
                loss = F.mse_loss(model(x), y)
                step.add_loss(loss * len(x) / 2, loss.detach() / 2)
            else:
                step.backward(loss)
            each(model)
    return model_sha256(model)


def test_copies_begin_during_the_backward_pass(monkeypatch):
    device = Noting(torch.device("cpu"))
    monkeypatch.setitem(devices.DEVICES, "cpu", lambda _: device)
    devices.device_of.cache_clear()
    try:
        train_layers(noted=device.noted)
    finally:
        monkeypatch.undo()
        devices.device_of.cache_clear()

    first = device.noted[: device.noted.index(0) + 1]  # until the gradient of the first layer's weight
    assert [what for what in first if what != "copy"] == [5, 4, 3, 2, 1, 0]
    assert first.count("copy") == 5, "each bucket but the last is on its way before the pass ends"


def halve(model):
    model[3].weight.grad.mul_(0.5)


@pytest.mark.parametrize("options", [{"each": halve}, {"twice": True}], ids=["script-changes-it", "two-passes"])
def test_a_gradient_that_changes_after_its_copy_began_is_copied_again(options):
    with lagging():
        state = train_layers(**options)

    assert state == train_layers(**options)
    assert options.get("twice") or state != train_layers()


@pytest.mark.parametrize("kind", [LaggingDevice, AddingDevice])
@pytest.mark.parametrize("workers", [2, 4])
def test_the_contract_of_the_sum_holds_on_a_lagging_device(workers, kind):
    check_ordered_sum(VirtualCommunicator(workers), kind(torch.device("cpu")))


@pytest.mark.parametrize("more", [{}, {"guard_sums": True}, {"faults": plan(KILL)}], ids=["plain", "checksums", "kill"])
def test_a_device_that_adds_by_itself_has_the_bits_of_host_memory(more):
    with lagging(AddingDevice, longest_s=0.001) as made:
        _, state = train("cnn", "adam", workers=4, **more)

    assert state == reference_hash("cnn", "adam")
    assert (made[0].additions > 0, made[0].copies) == (True, 0)
