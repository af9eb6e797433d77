"""The same bits, whatever happens: virtual workers against the torch-only reference."""

import functools
import random

import pytest
import reference
import torch
from drawn_plans import draw_plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from train_reference import train

from holdfast.comm import VirtualCommunicator
from holdfast.comm.allreduce import adding
from holdfast.data import loader as loading
from holdfast.data import plan as batches
from holdfast.data import position as place
from holdfast.engine import recovering
from holdfast.faults.plan import FaultPlan, parse

reference_hash = functools.cache(reference.train)
BUCKETS = {"mlp": 2, "cnn": 3}
EVERY = [(m, o) for m in reference.MODELS for o in reference.OPTIMIZERS]


def plan(*specs):
    return FaultPlan(tuple(parse(spec) for spec in specs)).to_json()


@pytest.mark.parametrize(("model", "optimizer"), EVERY)
@pytest.mark.parametrize("workers", [1, 3, 6])
def test_any_number_of_workers_gives_the_bits_of_the_reference(model, optimizer, workers):
    session, state = train(model, optimizer, workers=workers)

    assert state == reference_hash(model, optimizer)
    account = session._job.loops.totals
    assert (account.planned, account.committed, account.lost, account.repeated) == (406, 406, 0, 0)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), case=st.sampled_from(EVERY), strategy=st.sampled_from(["rollback", "restart"]))
def test_any_deaths_give_the_bits_of_the_undisturbed_run(seed, case, strategy):
    """Sums complete at a random part of the survivors."""
    faults = draw_plan(seed, 4, reference.STEPS, 3, BUCKETS[case[0]])
    lucky = random.Random(seed)
    comm = VirtualCommunicator(4, reached=lambda _: [r for r in range(4) if lucky.random() < 0.3])

    session, state = train(*case, comm=comm, faults=faults.to_json(), strategy=strategy)

    assume(len(comm.members) < 4)  # a fault at a checkpoint strikes only who writes one
    assert state == reference_hash(*case), faults.to_specs()
    assert session._job.loops.totals.repeated == 0
    assert session._job.loops.totals.committed == 406


def test_the_only_one_whom_a_sum_reached_may_die_too():
    faults = plan(*(f"kill:rank={rank},step=3,phase=allreduce,bucket=2" for rank in (2, 3)))  # in the closing sum
    comm = VirtualCommunicator([1, 2, 3], reached=lambda _: [3])

    _, state = train("cnn", "sgd", comm=comm, faults=faults, slices=4)

    assert comm.members == (1,)
    assert state == train("cnn", "sgd", workers=3, slices=4)[1]


def broken_order(terms, out):
    """Adds in the order in which slices happened to arrive: here, the last one first."""
    adding.fold(terms[::-1], out)


class SkippingBatches(batches.BatchCutter):
    """Leaves out one sample of the third step."""

    def mini_batch(self, step, cursor, members):
        batch = super().mini_batch(step, cursor, members)
        if batch is None or step != 3:
            return batch
        slices = (batch.slices[0][1:], *batch.slices[1:])
        return type(batch)(
            step=batch.step,
            epoch=batch.epoch,
            slices=slices,
            owners=batch.owners,
            full_size=batch.full_size,
            after=batch.after,
        )


def test_a_sum_in_order_of_arrival_is_found_out(monkeypatch):
    monkeypatch.setitem(adding.ORDERS, "fold", broken_order)

    _, state = train("mlp", "sgd", workers=4)

    assert state != reference_hash("mlp", "sgd")


def test_a_skipped_sample_is_found_out(monkeypatch):
    monkeypatch.setattr(place, "BatchCutter", SkippingBatches)

    session, state = train("mlp", "sgd", workers=4)

    assert state != reference_hash("mlp", "sgd")
    assert session._job.loops.totals.lost == 1


def test_a_random_number_drawn_twice_is_found_out(monkeypatch):
    seed_slice = loading.seed_slice

    def draw_once_more(seed, step, slice_):
        seed_slice(seed, step, slice_)
        if (step, slice_) == (2, 1):
            torch.rand(1)

    monkeypatch.setattr(loading, "seed_slice", draw_once_more)

    _, state = train("mlp", "sgd", workers=4)

    assert state != reference_hash("mlp", "sgd")


def test_a_step_that_is_not_taken_back_is_found_out(monkeypatch):
    """The negative control of rollback: batch norm's buffers keep what the failed attempt made of them."""
    monkeypatch.setattr(recovering.RecoveringLoop, "_discard", lambda self: None)

    _, state = train("cnn", "sgd", workers=4, faults=plan("kill:rank=1,step=3,phase=allreduce,bucket=0"))

    assert state != reference_hash("cnn", "sgd")


def test_the_tree_order_has_bits_of_its_own_and_they_survive_too():
    _, undisturbed = train("mlp", "adam", workers=4, order="tree")

    _, disturbed = train("mlp", "adam", workers=4, order="tree", faults=plan("kill:rank=0,step=5,phase=backward"))

    assert disturbed == undisturbed
    assert undisturbed != reference_hash("mlp", "adam")
