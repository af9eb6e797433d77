"""Gradients that travel in 16 bits: where they are rounded is part of the order, so the bits depend on no worker."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads, side_by_side
from torch.utils.data import TensorDataset
from train_reference import train

from holdfast import Session
from holdfast.base.orders import ORDERS, ROUNDED_ORDERS, base_of, is_rounded, rounded_order, unit_of
from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan
from holdfast.comm.allreduce import alltoall
from holdfast.comm.allreduce.adding import addable, plan_rows, tree
from holdfast.comm.allreduce.ordered_add import add_by_torch
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.state.order_choice import choose_order, known_order, largest_unit, order_of_checkpoint

LENGTH, DIVISOR = 500, 7.0
SPAN = SlotSpan(0, LENGTH, torch.float32)


def term(number):
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number % 3)


def rounded(numbers):
    return numbers.to(torch.bfloat16).to(torch.float32)


def defined(order, numbers):
    """Units rounded, added in float32, divided, and rounded; the last ten numbers are not divided."""
    unit, sums = unit_of(order), {}
    for n in sorted(numbers):
        sums.setdefault(n // unit, []).append((n, term(n)))
    units = []
    for number, terms in sums.items():
        total = torch.empty(LENGTH)
        tree(terms, total)
        units.append((number, rounded(total)))
    total = units[0][1].clone()
    if base_of(order) == "fold":
        for _, more in units[1:]:
            total = total + more
    else:
        tree(units, total)
    total[:-10] /= DIVISOR
    return rounded(total)


class Counting(Threads):
    """Threads that count the bytes of their messages."""

    sent_bytes = 0

    def sendrecv(self, send, receive, tag=0):
        self.sent_bytes += sum(data.numel() * data.element_size() for _, data in send)
        super().sendrecv(send, receive, tag)


def reduced(order, owners, shared_bytes, *, in_rows=False):
    """The result of each of three workers, and what it sent; ``in_rows``: each has added what it may."""
    plan = plan_rows(owners, order) if in_rows else plan_rows({}, "fold")

    def work(comm):
        add = OrderedAllReduce(comm, order, SPAN.end, shared_bytes=shared_bytes)
        mine = sorted(n for n, owner in owners.items() if owner in comm.local_ranks)
        first = [n for n in mine if n in plan.rows(owners)]
        for row, number in enumerate(first):
            terms = [(n, term(n)) for n in mine if plan.first_of.get(n, n) == number]
            tree(terms, SPAN.of(add.room(row)))
        result = add(SPAN, plan.rows(owners), rows=first, mean=MeanDivisor(DIVISOR, LENGTH - 10))
        return result.clone(), comm.sent_bytes

    done = side_by_side((0, 1, 2), work, kind=Counting)
    for worker in done.values():
        assert not isinstance(worker, Exception), worker
    return [done[rank] for rank in range(3)]


@pytest.mark.parametrize("path", ["shared", "messages"])
@settings(max_examples=25, deadline=None)
@given(
    order=st.sampled_from(["fold-bf16", "tree-bf16-1", "tree-bf16-2", "tree-bf16-8"]),
    owners=st.dictionaries(st.integers(0, 17), st.integers(0, 2), min_size=1, max_size=12),
    in_rows=st.booleans(),
)
def test_the_bits_are_the_same_whichever_ranks_own_the_slices(path, order, owners, in_rows):
    for result, _ in reduced(order, owners, -1 if path == "shared" else 0, in_rows=in_rows):
        assert torch.equal(result, defined(order, owners))


@pytest.mark.parametrize(("order", "base"), [("fold-bf16", "fold"), ("tree-bf16-1", "tree"), ("tree-bf16-4", "tree")])
def test_each_worker_sends_half_the_bytes(order, base):
    owners = {n: n // unit_of(order) for n in range(3 * unit_of(order))}

    half, whole = ([sent for _, sent in reduced(name, owners, 0)] for name in (order, base))

    assert half == [sent / 2 for sent in whole]


def test_rounding_what_a_worker_happens_to_hold_would_show(monkeypatch):
    """The negative control: sums of parts of a unit are sent in 16 bits, too."""
    monkeypatch.setattr(alltoall, "row_type", lambda *_: torch.bfloat16)

    together = reduced("tree-bf16-4", {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}, 0)[0][0]
    apart = reduced("tree-bf16-4", {0: 0, 1: 0, 2: 1, 3: 2, 4: 1}, 0)[0][0]

    assert torch.equal(together, defined("tree-bf16-4", range(5)))
    assert not torch.equal(apart, together)


def test_no_row_is_larger_than_a_unit():
    assert plan_rows(dict.fromkeys(range(8), 0), "fold-bf16").first_of == {}
    assert addable(dict.fromkeys(range(6), 0), "tree-bf16-4") == [(0, 1, 2, 3), (4, 5)]
    assert {*plan_rows(dict.fromkeys(range(8), 0), "tree-bf16-4").first_of.values()} == {0, 4}


def test_the_names_say_what_is_rounded():
    assert [order for order in ORDERS if is_rounded(order)] == [*ROUNDED_ORDERS]
    for order in ROUNDED_ORDERS:
        assert rounded_order(base_of(order), unit_of(order)) == order
    assert (base_of("tree-wide"), unit_of("tree-wide"), unit_of("tree")) == ("tree-wide", 0, 0)


@pytest.mark.parametrize("order", ["fold-bf16", "tree-bf16-4"])
def test_a_device_that_adds_whole_vectors_has_the_same_bits(order):
    out = torch.empty(LENGTH)

    add_by_torch([(n, term(n)) for n in range(7)], out, order, MeanDivisor(DIVISOR, LENGTH - 10))

    assert torch.equal(out, defined(order, range(7)))


# -- the choice


@pytest.mark.parametrize(
    ("hosts", "slices", "unit"),
    [
        ([7, 7, 8, 8], 4, 2),
        ([7, 7, 7, 7, 8, 8, 8, 8], 8, 4),
        ([7, 8], 16, 8),
        ([7, 7, 7, 8, 8, 8], 6, 1),
        ([7, 7, 7, 8], 4, 1),
        ([7, 8, 7, 8], 4, 1),
        ([7, 7, 8, 8], 12, 2),
        ([7, 7], 2, 2),
    ],
)
def test_a_unit_is_as_large_as_no_two_hosts_share_it(hosts, slices, unit):
    assert largest_unit(hosts, slices) == unit


def of(known="", **given):
    """A job of one process with these settings, whose state knows this order."""
    comm = SimpleNamespace(processes=((0,),))
    return SimpleNamespace(settings=Settings(**given), loops=SimpleNamespace(order=known), comm=comm)


def test_the_settings_decide_as_far_as_they_can():
    assert known_order(Settings(wire="bf16", order="fold")) == "fold-bf16"
    assert known_order(Settings(wire="bf16", order="tree")) == known_order(Settings(wire="bf16")) == ""
    assert choose_order(of(wire="bf16")) == "fold-bf16"
    assert choose_order(of(wire="bf16", order="tree")) == "tree-bf16-1"
    assert choose_order(of("tree-bf16-8", wire="bf16", order="tree")) == "tree-bf16-8"


def test_a_state_of_another_wire_is_refused():
    with pytest.raises(ConfigError, match=r"job with wire=bf16 \(order=tree-bf16-4\): give --wire bf16"):
        order_of_checkpoint(of(), "tree-bf16-4")
    with pytest.raises(ConfigError, match=r"job with wire=fp32 \(order=fold\): leave out --wire bf16"):
        choose_order(of("fold", wire="bf16"))
    with pytest.raises(ConfigError, match=r"job with wire=fp32 \(order=fold\): leave out --order fold-bf16$"):
        order_of_checkpoint(of(order="fold-bf16"), "fold")
    with pytest.raises(ConfigError, match=r"leave out --order fold-bf16 and --wire bf16$"):
        order_of_checkpoint(of(order="fold-bf16", wire="bf16"), "fold")
    with pytest.raises(ConfigError, match="made with order=tree-bf16-4, but this run has order=tree-bf16-2"):
        order_of_checkpoint(of(order="tree-bf16-2"), "tree-bf16-4")
    with pytest.raises(ConfigError, match="order tree-wide is for those that have 16 bits"):
        Settings(wire="bf16", order="tree-wide")
    assert order_of_checkpoint(of(wire="bf16", order="tree"), "tree-bf16-4") == "tree-bf16-4"
    with pytest.raises(ConfigError, match=r"tree-bf16-N \(N: a power of two, at most 1024\), got 'tree-bf16-3'"):
        Settings(order="tree-bf16-3")


# -- training


@pytest.mark.parametrize("given", [{"wire": "bf16"}, {"order": "tree-bf16-2"}])
def test_training_ends_with_the_same_bits_for_any_number_of_workers(given):
    ends = {train("mlp", "adam", workers=workers, slices=4, **given)[1] for workers in (1, 3)}

    assert len(ends) == 1
    assert ends != {train("mlp", "adam", workers=4, order=base_of(given.get("order", "fold")))[1]}, "it is rounded"


def test_metrics_are_not_rounded():
    """Without learning, gradients do not matter."""
    data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), torch.ones(24, 1))

    def losses(**given):
        model = torch.nn.Linear(3, 1)
        model.load_state_dict({"weight": torch.tensor([[0.1, 0.2, 0.3]]), "bias": torch.zeros(1)})
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.0), fabric="virtual", workers=3, **given)
        found = []
        for step in session.steps(data, batch_size=8):
            for x, y in step:
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            found.append(session.metrics.get("loss"))
        return [*found, session.metrics["loss"]]

    assert losses(wire="bf16") == losses()
