"""Whatever wanders, however it is saved: what a running checkpoint promises for any rows, and any losses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.priority import PriorityPolicy, RunningCheckpoint
from holdfast.checkpoint.priority_choice import highest

UNHURRIED = settings(deadline=None, max_examples=60)

savings = st.builds(
    PriorityPolicy,
    every=st.integers(8, 20),
    fraction=st.sampled_from([1, 0.7, 1 / 2, 1 / 4, 1 / 8]),
    choice=st.sampled_from(["priority", "round-robin", "random"]),
    predictor=st.sampled_from(["last", "line"]),
    codec=st.sampled_from(["exact", "int8"]),
    seed=st.integers(0, 3),
)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])


def make_rows(generator, blocks, widths, kinds, scale):
    return [
        (torch.randn(blocks, width, generator=generator) * scale).to(kind)
        for width, kind in zip(widths, kinds, strict=True)
    ]


@UNHURRIED
@given(savings, st.integers(1, 40), st.lists(st.tuples(st.integers(1, 20), dtypes), min_size=1, max_size=3),
       st.sampled_from([1e-6, 1.0, 100.0]), st.integers(0, 2**32), st.data())  # fmt: skip
def test_a_saved_block_is_what_it_was_and_no_farther_than_before_and_peers_are_equal(
    saving, blocks, shapes, scale, seed, data
):
    generator = torch.Generator().manual_seed(seed)
    widths, kinds = zip(*shapes, strict=True)
    owner, peer = (
        RunningCheckpoint(make_rows(torch.Generator().manual_seed(seed), blocks, widths, kinds, scale), saving)
        for _ in "ab"
    )
    step = 0
    for _ in range(data.draw(st.integers(1, 6))):
        step += data.draw(st.integers(1, 5))
        rows = make_rows(generator, blocks, widths, kinds, scale)
        everything = torch.arange(blocks)
        before = owner.recover(everything, step)

        saved = owner.save(rows, step)
        peer.put(saved)

        chosen, after = saved.blocks, owner.recover(everything, step)
        rest = torch.ones(blocks, dtype=torch.bool).index_fill(0, chosen, value=False)
        assert (owner.saved_at[chosen] == step).all()
        for row, was, now, same in zip(rows, before, after, peer.recover(everything, step), strict=True):
            assert torch.equal(now, same)
            assert torch.equal(now[rest], was[rest])
            if saving.codec == "exact" or not row.is_floating_point():
                assert torch.equal(now[chosen], row[chosen])
            wide = torch.float64
            slack = 4 * torch.finfo(row.dtype).eps * scale * 8 if row.is_floating_point() else 0
            far = (was.to(wide) - row.to(wide)).abs()[chosen]
            if saving.codec == "int8" and (row[chosen] >= 0).all():  # then nothing is less than half a step
                far = far.maximum(1.001 * far.amax(1, keepdim=True) / 254)
            assert ((now.to(wide) - row.to(wide)).abs()[chosen] <= far + slack).all()


@UNHURRIED
@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0]), st.integers(0, 9)), min_size=1, max_size=30),
       st.integers(0, 120), st.booleans())  # fmt: skip
def test_the_partial_selection_is_what_sorting_everything_would_take(blocks, room, equal):
    sizes = [4 if equal else size for _, size in blocks]
    wanted, left = [], room
    for score, number in sorted((-score, number) for number, (score, _) in enumerate(blocks)):
        if score > 0 or sizes[number] > left:
            break
        wanted.append(number)
        left -= sizes[number]

    given_sizes = torch.tensor([4] if equal else sizes)
    found = highest(torch.tensor([score for score, _ in blocks]), given_sizes, room)

    assert found.tolist() == sorted(wanted)


@pytest.mark.parametrize("lost", [1 / 4, 1 / 2, 3 / 4])
def test_losing_a_random_share_perturbs_by_that_share_of_the_squared_distance(lost):
    """E||d'||^2 = p ||d||^2, d the way back of everything (Qiao et al. 2019, section 4)."""
    generator = torch.Generator().manual_seed(0)
    blocks, trials = 200, 2000
    rows = [torch.randn(blocks, 8, generator=generator) * torch.rand(blocks, 1, generator=generator)]
    running = RunningCheckpoint([torch.zeros_like(rows[0])], PriorityPolicy(every=16, fraction=1 / 8))
    running.save(rows, 2)
    whole = (running.recover(torch.arange(blocks), 2)[0] - rows[0]).square().sum()

    shares = []
    for _ in range(trials):
        gone = torch.randperm(blocks, generator=generator)[: int(lost * blocks)]
        perturbed = rows[0].clone()
        perturbed[gone] = running.recover(gone, 2)[0]
        shares.append(float((perturbed - rows[0]).square().sum() / whole))

    mean, error = torch.tensor(shares).mean(), torch.tensor(shares).std() / trials**0.5
    assert abs(mean - lost) < 4 * error
    assert error < 0.01
