"""Slices that are added as soon as they are computed: fewer rows of memory, the same bits."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.comm.allreduce.adding import ORDERS, plan_rows
from holdfast.models import gradients
from holdfast.models.gradients import BucketLayout
from holdfast.models.step_gradients import StepGradients

MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))


class Worker:
    """The gradients of one worker, and the memory of its rows."""

    def __init__(self, plan):
        self.model = copy.deepcopy(MODEL)
        self.layout = BucketLayout(self.model, bucket_bytes=64)
        self.rows = []
        self.gradients = StepGradients(self.layout, self.rows)
        self.gradients.plan = plan

    def room(self, row):
        return torch.zeros(self.layout.size_bytes, dtype=torch.uint8)

    def compute(self, number):
        """Compute a slice: its gradients are random, and one parameter may have none."""
        self.gradients.begin_slice(number, self.room, is_first=False)
        drawn = torch.Generator().manual_seed(number)
        for i, parameter in enumerate(self.model.parameters()):
            if (number + i) % 5:
                parameter.grad = torch.randn(parameter.shape, generator=drawn) * 10.0 ** (number % 4)
        self.gradients.end_slice(number, {"loss": 0.1 * number}, 3)

    def terms(self):
        return {number: [flat.clone() for flat in row.flat] for number, row in self.gradients.terms.items()}


def computed(owners, plan):
    """The rows of all workers, by their first slice."""
    found = {}
    for rank in set(owners.values()):
        worker, mine = Worker(plan), sorted(n for n in owners if owners[n] == rank)
        for number in mine:
            worker.compute(number)
            worker.gradients.add_up(number)
        assert [row.row for row in worker.gradients.terms.values()] == list(range(len(worker.gradients.terms)))
        found |= worker.terms()
    return found


def added(terms, order):
    sums = []
    for i in range(len(next(iter(terms.values())))):
        sums.append(torch.empty_like(next(iter(terms.values()))[i]))
        ORDERS[order]([(n, terms[n][i]) for n in sorted(terms)], sums[-1])
    return sums


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(["fold", "tree"]),
    owners=st.dictionaries(st.integers(0, 20), st.integers(0, 2), min_size=1, max_size=16),
    lost=st.sampled_from([None, 0, 1, 2]),
)
def test_rows_that_are_shared_have_the_bits_of_single_slices(order, owners, lost):
    plan = plan_rows(owners, order)
    rows, single = computed(owners, plan), computed(owners, plan_rows({}, order))
    assert rows.keys() == plan.rows(owners).keys()

    left = {number for number in owners if owners[number] != lost}  # a step may continue without a rank's slices
    for mine, one_by_one in ((rows.keys(), owners.keys()), (rows.keys() & left, left)):
        if mine:
            expected = added({n: single[n] for n in one_by_one}, order)
            got = added({n: rows[n] for n in mine}, order)
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(
    ("order", "owners", "rows"),
    [
        ("tree", dict.fromkeys(range(8), 0), 3),
        ("tree", dict.fromkeys(range(64), 0), 6),
        ("tree", dict.fromkeys(range(2), 0), 2),
        ("tree", {n: n // 4 for n in range(8)}, 2),
        ("tree", {n: n % 2 for n in range(8)}, 4),
        ("fold", dict.fromkeys(range(8), 0), 1),
        ("fold", {n: n // 4 for n in range(8)}, 1),
    ],
)
def test_a_worker_of_many_slices_needs_few_rows(order, owners, rows):
    worker = Worker(plan_rows(owners, order))
    for number in (n for n in owners if owners[n] == 0):
        worker.compute(number)
        worker.gradients.add_up(number)

    assert len(worker.rows) == rows


def test_two_slices_are_added_in_the_all_reduce_because_adding_them_before_would_save_no_row():
    assert plan_rows({0: 0, 1: 0, 2: 1, 3: 1}, "tree").additions == {}
    assert plan_rows(dict.fromkeys(range(4), 0), "tree").additions == {1: 1, 3: 2}


def test_the_slice_that_is_computed_has_its_own_gradient():
    worker = Worker(plan_rows(dict.fromkeys(range(8), 0), "tree"))
    for number in range(8):
        worker.compute(number)
        alone = Worker(plan_rows({}, "tree"))
        alone.compute(number)
        mine, other = worker.gradients.of_slice(number), alone.gradients.of_slice(number)
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        worker.gradients.add_up(number)


@settings(max_examples=30, deadline=None)
@given(
    order=st.sampled_from(["fold", "tree"]),
    slices=st.integers(1, 16),
    workers=st.integers(1, 3),
    small=st.booleans(),
    alters=st.booleans(),
)
def test_the_bits_are_those_of_one_slice_after_another_whatever_the_script_does_to_gradients(
    order, slices, workers, small, alters
):
    """With real backward passes, by hooks and without; a gradient is altered, replaced or dropped after the pass."""
    owners = {n: n * workers // slices for n in range(slices)}

    def of_worker(rank, plan):
        worker = Worker(plan)
        for number in (n for n in owners if owners[n] == rank):
            worker.gradients.begin_slice(number, worker.room, is_first=False)
            given = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            (worker.model(given) * 10.0 ** (number % 4)).square().sum().backward()
            first, second, third = worker.model.parameters()
            if alters:
                first.grad.clamp_(-1.0, 1.0)
                second.grad = second.grad * 3
                third.grad = None if number % 3 == 1 else third.grad
            seen = [None if p.grad is None else p.grad.clone() for p in worker.model.parameters()]
            worker.gradients.end_slice(number, {"loss": 0.1 * number}, 3)
            named = worker.gradients.of_slice(number)
            for name, grad in zip(("0.weight", "0.bias", "1.weight"), seen, strict=True):
                assert torch.equal(named[name], torch.full_like(named[name], -0.0) if grad is None else grad)
            worker.gradients.add_up(number)
        return worker.terms()

    def all_rows(plan):
        return {number: row for rank in set(owners.values()) for number, row in of_worker(rank, plan).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "SMALL_BYTES", 1 << 30 if small else 0)
        rows, single = all_rows(plan_rows(owners, order)), all_rows(plan_rows({}, order))
    for mine, expected in zip(added(rows, order), added(single, order), strict=True):
        assert torch.equal(mine.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_are_aligned_on_a_device_and_close_together_in_host_memory(device):
    model = nn.Sequential(*(nn.Linear(3 + i, 5 + i) for i in range(9))).to(device)

    (bucket,) = BucketLayout(model, bucket_bytes=1 << 20).layouts

    starts = [4 * (bucket.span.start + place.start) for place in bucket.places]
    assert all(start % 64 == 0 for start in starts) is (device == "meta")
    ends = [place.start + place.numel for place in bucket.places]
    gaps = [start - end for start, end in zip([p.start for p in bucket.places][1:], ends, strict=False)]
    assert max(gaps) < 16 if device == "meta" else set(gaps) == {0}
    assert bucket.places[0].presence == bucket.gradients_end == ends[-1]
