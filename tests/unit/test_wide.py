"""Gradients of 16 bits that are added in float32 and rounded once: the same bits whichever ranks own the slices."""

import pytest
import torch
import train_bf16
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads, side_by_side

from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan
from holdfast.comm.allreduce.adding import ORDERS, plan_rows

LENGTH, DIVISOR = 500, 7.0


def term(number, dtype):
    return (torch.randn(LENGTH, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number % 3)).to(dtype)


def defined(order, numbers, dtype):
    """The sum in float32, divided in float32, and rounded once; the last ten numbers are not divided."""
    total = torch.empty(LENGTH)
    ORDERS[order.removesuffix("-wide")]([(n, term(n, dtype).float()) for n in sorted(numbers)], total)
    total[:-10] /= DIVISOR
    return total.to(dtype)


def reduced(order, owners, dtype, shared_bytes, *, keeps_terms=True):
    """The results of three workers, by rank."""
    span = SlotSpan(0, LENGTH, dtype)

    def work(comm):
        add = OrderedAllReduce(comm, order, span.end, shared_bytes=shared_bytes)
        add.keeps_terms = keeps_terms
        for row, number in enumerate(sorted(n for n, owner in owners.items() if owner in comm.local_ranks)):
            span.of(add.room(row)).copy_(term(number, dtype))
        return add(span, owners, mean=MeanDivisor(DIVISOR, LENGTH - 10)).clone()

    return side_by_side((0, 1, 2), work, kind=Threads)


@pytest.mark.parametrize("path", ["shared", "messages"])
@settings(max_examples=20, deadline=None)
@given(
    order=st.sampled_from(["fold-wide", "tree-wide"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    owners=st.dictionaries(st.integers(0, 9), st.integers(0, 2), min_size=1, max_size=8),
    keeps_terms=st.booleans(),
)
def test_the_bits_are_the_same_whichever_ranks_own_the_slices(path, order, dtype, owners, keeps_terms):
    shared_bytes = -1 if path == "shared" else 0
    results = reduced(order, owners, dtype, shared_bytes, keeps_terms=keeps_terms)

    for result in results.values():
        assert not isinstance(result, Exception), result
        assert torch.equal(result, defined(order, owners, dtype))


def test_other_orders_round_after_each_addition():
    owners = {n: n % 3 for n in range(8)}
    exact = sum(term(n, torch.bfloat16).double() for n in owners)[:-10] / DIVISOR

    def error(order):
        return float((reduced(order, owners, torch.bfloat16, -1)[0][:-10].double() - exact).abs().sum())

    assert error("fold-wide") < 0.6 * error("fold")
    assert error("tree-wide") < 0.9 * error("tree")


def test_vectors_of_more_bits_have_the_bits_of_the_plain_order():
    owners = {n: n % 3 for n in range(8)}
    for order in ("fold", "tree"):
        plain, wide = (reduced(name, owners, torch.float32, 0)[0] for name in (order, f"{order}-wide"))
        assert torch.equal(plain, wide)


def test_no_sum_of_slices_is_kept_in_16_bits():
    assert plan_rows(dict.fromkeys(range(8), 0), "tree-wide").first_of == {}


@pytest.mark.parametrize("order", ["fold", "tree"])
def test_training_in_bfloat16_ends_with_the_same_bits_for_any_number_of_workers(order):
    plain, wide = (
        {train_bf16.train(order=name, workers=workers) for workers in (1, 3)} for name in (order, f"{order}-wide")
    )

    assert len(plain) == len(wide) == 1
    assert plain != wide, "the setting does something"
