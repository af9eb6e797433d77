"""All-reduces that begin during the backward pass: which ones, in which order, and what happens if they must not have."""

import functools
import threading
import time

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from train_reference import train

import holdfast
from holdfast.comm import VirtualCommunicator
from holdfast.comm.reduce_thread import AllReduceThread
from holdfast.comm.waiting import waiting
from holdfast.errors import PeerFailed
from holdfast.models.backward_overlap import BackwardOverlap

DEADLINE_S = 20


class Owned:
    """Which thread owns the communicator."""

    def __init__(self):
        self.thread = threading.current_thread()

    def change_thread(self, thread):
        self.thread = thread


class Movable(VirtualCommunicator):
    """Virtual workers whose all-reduces may run in another thread."""

    def change_thread(self, thread):
        pass


def of_two(model, overlap):
    """A session of two such workers with four slices and several buckets."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    words = {"workers": 2, "slices": 4, "bucket_bytes": 4096, "overlap": overlap}
    return holdfast.Session(model, optimizer, comm=Movable(2), **words)


# -- the thread


def test_what_is_begun_runs_in_order_in_the_thread_that_owns_the_communicator():
    comm, seen = Owned(), []
    thread = AllReduceThread(comm)

    for number in range(3):
        thread.begin(lambda number=number: seen.append((number, threading.current_thread() is comm.thread)) or number)

    assert comm.thread is not threading.current_thread()
    assert [thread.finish() for _ in range(3)] == [0, 1, 2]
    assert seen == [(0, True), (1, True), (2, True)]
    assert comm.thread is threading.current_thread()
    assert thread.num_begun == 0


def test_nothing_runs_behind_a_failure_and_the_next_step_begins_afresh():
    comm, ran = Owned(), []
    thread = AllReduceThread(comm)

    def fail():
        raise PeerFailed("rank 1 died")

    for act in (lambda: 0, fail, lambda: ran.append(2), lambda: ran.append(3)):
        thread.begin(act)

    assert thread.finish() == 0
    with pytest.raises(PeerFailed, match="rank 1 died"):
        thread.finish()
    assert thread.num_begun == 0
    assert comm.thread is threading.current_thread()
    thread.begin(lambda: "again")
    assert thread.finish() == "again"
    assert ran == []


def test_the_process_waits_only_when_its_owner_does():
    thread, reports, entered, leave = AllReduceThread(Owned()), [], threading.Event(), threading.Event()

    def wait_in_thread():
        with waiting:
            entered.set()
            assert leave.wait(DEADLINE_S)

    waiting.on_wait(reports.append)
    try:
        thread.begin(wait_in_thread)
        assert entered.wait(DEADLINE_S)
        assert reports == []
        threading.Timer(0.05, leave.set).start()
        thread.finish()
    finally:
        waiting.on_wait(None)
    assert reports == [True, False]


def test_a_closed_thread_ends_and_runs_nothing_that_was_only_queued():
    before, ran, entered, leave = threading.active_count(), [], threading.Event(), threading.Event()
    thread = AllReduceThread(Owned())

    thread.begin(lambda: entered.set() or leave.wait(DEADLINE_S))
    thread.begin(lambda: ran.append(1))
    assert entered.wait(DEADLINE_S)
    thread.close()
    leave.set()

    ends_s = time.monotonic() + DEADLINE_S
    while threading.active_count() > before and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert ran == []


# -- a session


@pytest.fixture
def counts(monkeypatch):
    """How many buckets were begun early, and how many were not."""
    found = {"early": 0, "late": 0}
    finish = BackwardOverlap.finish

    def counted(overlap, bucket):
        result = finish(overlap, bucket)
        found["late" if result is None else "early"] += 1
        return result

    monkeypatch.setattr(BackwardOverlap, "finish", counted)
    return found


@functools.cache
def undisturbed(model="mlp"):
    return reference.train(model, "adam")


def trained(model="mlp", optimizer="adam", workers=2, **arguments):
    return train(model, optimizer, comm=Movable(workers), workers=workers, overlap="on", **arguments)[1]


@pytest.mark.parametrize(("model", "compute"), [("mlp", True), ("cnn", False)])
def test_the_bits_are_those_of_the_reference(counts, model, compute):
    assert trained(model, compute=compute) == undisturbed(model)

    assert counts["early"] >= reference.STEPS - 1, "the first step only looks"


def test_no_thread_outlives_its_loop():
    before = threading.active_count()

    trained()

    ends_s = time.monotonic() + DEADLINE_S
    while threading.active_count() > before and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize(("order", "slices"), [("fold", 8), ("tree", 16)])
def test_slices_that_share_a_row_are_added_before_the_row_is_reduced(counts, order, slices):
    without = train("mlp", "adam", workers=1, comm=VirtualCommunicator(1), order=order, slices=slices)[1]

    assert trained(workers=1, order=order, slices=slices) == without

    assert counts["early"] >= reference.STEPS - 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"overlap": "off"}, "it is off"),
        ({"guard": "heal"}, "compares gradients"),
        ({"bucket_bytes": 1 << 30}, "one bucket"),
        ({"comm": VirtualCommunicator(2)}, "the fabric"),
    ],
    ids=["off", "heal", "one-bucket", "fabric"],
)
def test_where_it_cannot_be_nothing_is_begun_early_and_a_request_is_answered(counts, capsys, settings, why):
    arguments = {"comm": Movable(2), "overlap": "on", **settings}

    assert train("mlp", "adam", workers=2, **arguments)[1] == undisturbed()

    assert counts["early"] == 0
    said = capsys.readouterr().err
    assert ("--overlap on has no effect" in said and why in said) == (arguments["overlap"] == "on"), said


def test_shared_memory_alone_begins_nothing_early_unless_asked(counts):
    assert train("mlp", "adam", workers=2, comm=Movable(2))[1] == undisturbed()

    assert counts["early"] == 0
    assert counts["late"] > 0


# -- scripts that change gradients


def steps(spoil, overlap):
    """Train with ``spoil(step, model)`` after each backward pass; return the attempts and the final parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    session, attempts = of_two(model, overlap), []
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, shuffle=False):
        attempts.append(step.number)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
            spoil(step, model)
    return attempts, torch.cat([p.detach().flatten() for p in model.parameters()])


def clip_all(step, model):
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.001, 0.001)


def clip_from_third(step, model):
    if step.number >= 3:
        clip_all(step, model)


def replace_in_third(step, model):
    if step.number == 3:
        model[3].weight.grad = model[3].weight.grad * 2


def drop_in_third(step, model):
    if step.number == 3:
        model[3].bias.grad = None


def another_pass_in_third(step, model):
    if step.number == 3:
        (model[3].weight.sum() * 0.1).backward()


@pytest.mark.parametrize(
    "spoil", [clip_from_third, replace_in_third, drop_in_third, another_pass_in_third], ids=lambda f: f.__name__
)
def test_a_step_whose_gradients_change_too_late_is_computed_again_with_the_same_bits(counts, capsys, spoil):
    attempts, early = steps(spoil, overlap="on")
    begun = counts["early"]
    plainly, late = steps(spoil, overlap="off")

    assert torch.equal(early, late)
    assert plainly == list(range(len(plainly)))
    assert attempts == [0, 1, 2, 3, *range(3, len(plainly))], "the third step is repeated, and no other"
    assert begun == 3, "in the second, third and fourth step, and then never again"


def test_gradients_that_always_change_cost_no_step(counts):
    attempts, early = steps(clip_all, overlap="on")
    _, late = steps(clip_all, overlap="off")

    assert torch.equal(early, late)
    assert attempts == list(range(len(attempts)))
    assert counts["early"] == 0


def test_gradients_may_be_read_until_the_slice_ends():
    seen = {"on": [], "off": []}
    for overlap, norms in seen.items():
        steps(
            lambda step, model, norms=norms: norms.append([float(p.grad.norm()) for p in model.parameters()]),
            overlap=overlap,
        )

    assert seen["on"] == seen["off"]


def test_a_slice_that_is_computed_again_for_want_of_memory_has_the_same_bits(counts):
    def run(overlap):
        ran_out = []

        class Hungry(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                if counted["passes"] == 4 * 3 + 4:  # the last slice of the fourth step
                    ran_out.append(1)
                    raise torch.OutOfMemoryError("out of memory")
                return gradient

        counted = {"passes": 0}
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        session = of_two(model, overlap)
        for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, shuffle=False):
            for x, y in step:
                counted["passes"] += 1
                step.backward(F.cross_entropy(model(Hungry.apply(x.requires_grad_())), y))
        assert ran_out, "it never ran out of memory"
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run("on"), run("off"))
    assert counts["early"] == 3, "in the second, third and fourth step; then the fourth is computed again"


def test_unused_parameters_leave_their_bucket_to_the_end_of_the_pass(counts):
    def run(overlap):
        torch.manual_seed(3)
        model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)])
        session = of_two(model, overlap)
        for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, shuffle=False):
            for x, y in step:
                hidden = model[0](x.flatten(1))
                hidden = hidden if step.number % 2 else model[1](hidden)
                step.backward(F.cross_entropy(model[2](hidden), y))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run("on"), run("off"))
    assert counts["early"] > 0
