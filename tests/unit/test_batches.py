"""Who computes what, when workers are spare, come, go, or are slow: whole slices, none lost, none twice."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from holdfast.data.plan import BatchCutter, SamplePlan
from holdfast.data.position import DataPosition

PLAN = SamplePlan(
    num_samples=96, batch_size=24, first_epoch=0, epochs=1, seed=0, shuffle=True, drop_last=False, slices=4,
    members=(0, 1, 2, 3), split="slices", batch="global",
)  # fmt: skip


def first(plan, members):
    """The first mini-batch among these."""
    batch = BatchCutter(plan).mini_batch(0, plan.start, members)
    assert batch is not None
    return batch


def counts(plan, members):
    """How many samples each of them computes."""
    batch = first(plan, members)
    return {rank: batch.samples_of([n for n, owner in batch.owners.items() if owner == rank]) for rank in members}


def with_(**values):
    return dataclasses.replace(PLAN, **values)


def test_spares_have_nothing_to_do_until_somebody_below_them_is_gone():
    assert counts(PLAN, (0, 1, 2, 3, 4, 5)) == {0: 6, 1: 6, 2: 6, 3: 6, 4: 0, 5: 0}
    assert counts(PLAN, (0, 2, 3, 4, 5)) == {0: 6, 2: 6, 3: 6, 4: 6, 5: 0}
    assert counts(PLAN, (2, 5)) == {2: 12, 5: 12}


def test_the_slices_are_the_same_whoever_computes_them():
    whole = first(PLAN, (0, 1, 2, 3)).slices
    for members in ((7,), (1, 2), (0, 1, 2, 3, 4), (4, 5, 6)):
        for mine, theirs in zip(whole, first(PLAN, members).slices, strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("split", ["slices", "even"])
@pytest.mark.parametrize("batch", ["global", "local"])
def test_every_sample_of_the_mini_batch_is_computed_once_by_somebody_who_is_there(split, batch):
    groups = ((0,), (1, 3), (0, 1, 2, 3), (2, 4, 5), (0, 1, 2, 3, 4, 5), (8, 9))
    for workers, members in itertools.product((-1, 1, 2, 3, 6), groups):
        made = first(with_(split=split, batch=batch, workers=workers), members)

        held = np.concatenate([made.slices[number] for number in made.owners])
        assert sorted(held) == sorted(made.ids)
        assert len(set(held)) == len(held) == made.after.offset
        assert set(made.owners.values()) <= set(members)


def test_a_job_that_grows_beyond_its_slices_has_workers_that_stand_by_but_for_an_even_split():
    members = tuple(range(6))

    assert sorted(counts(with_(workers=6), members).values()) == [0, 0, 6, 6, 6, 6]
    assert counts(with_(workers=6, split="even"), members) == dict.fromkeys(members, 4)


def test_a_job_that_shrinks_on_request_is_cut_as_after_a_death():
    for split, batch in (("slices", "global"), ("even", "global"), ("slices", "local")):
        plan = with_(split=split, batch=batch)
        asked, died = first(dataclasses.replace(plan, workers=3), (0, 1, 2)), first(plan, (0, 1, 2))
        assert asked.owners == died.owners
        assert len(asked.ids) == len(died.ids)


def test_with_a_local_batch_each_worker_keeps_its_size():
    plan = with_(batch="local")

    assert counts(plan, (0, 1, 3)) == {0: 6, 1: 6, 3: 6}
    assert counts(dataclasses.replace(plan, workers=2), (0, 1)) == {0: 6, 1: 6}
    assert counts(plan, (0, 1, 3, 4)) == {0: 6, 1: 6, 3: 6, 4: 6}  # a newcomer takes the free seat


def test_slow_workers_get_fewer_slices_and_the_others_the_rest():
    plan = with_(slices=12, speeds={1: 0.5})  # two samples a slice

    assert counts(plan, (0, 1, 2, 3)) == {0: 6, 1: 4, 2: 8, 3: 6}
    assert counts(plan, (0, 2, 3)) == {0: 8, 2: 8, 3: 8}


def test_with_an_even_split_slow_workers_get_a_smaller_share():
    plan = with_(split="even", speeds={1: 0.5, 3: 1.5})

    assert counts(plan, (0, 1, 2, 3)) == {0: 6, 1: 3, 2: 6, 3: 9}
    assert counts(plan, (1, 2, 3)) == {1: 4, 2: 8, 3: 12}


def place(changes=()):
    return DataPosition(PLAN, dict(changes))


def test_changes_are_in_force_together_and_again_in_the_next_loop():
    now = place()
    now.change({"batch_size": 12, "workers": 2, "speeds": {"1": 0.5}})
    later = place({"batch_size": 12, "workers": 2, "speeds": {"1": 0.5}})

    assert now.plan == later.plan
    assert (now.plan.batch_size, now.plan.seats, now.plan.speeds) == (12, 2, {1: 0.5})


def test_a_changed_batch_size_is_no_reason_to_refuse_a_checkpoint_and_keeps_the_ledger_right():
    one = place()
    one.commit(one.next_batch(0, (0,)), ())
    one.change({"batch_size": 36})
    one.commit(one.next_batch(1, (0,)), ())

    two = place()
    two.restore(one.info(), one.state_dict(), keep_slices=True)
    two.change({"batch_size": 36})
    two.commit(two.next_batch(2, (1, 2)), ())

    assert two.next_batch(3, (1, 2)) is None
    assert dataclasses.astuple(two.account()) == (96, 96, 0, 0)


def test_a_changed_batch_size_does_not_change_what_is_left_out_at_the_end_of_an_epoch():
    one = DataPosition(with_(num_samples=100, drop_last=True), {})
    one.commit(one.next_batch(0, (0,)), ())
    one.change({"batch_size": 50})

    second = one.next_batch(1, (0,))
    one.commit(second, ())
    third = one.next_batch(2, (0,))
    one.commit(third, ())

    assert [len(batch.ids) for batch in (second, third)] == [50, 22]  # 96 of 100, as with mini-batches of 24
    assert one.next_batch(3, (0,)) is None
    assert dataclasses.astuple(one.account()) == (96, 96, 0, 0)
