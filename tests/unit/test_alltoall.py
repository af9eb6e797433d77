"""The sum by messages: slices that their holder may add first go as one, and no bit knows of it."""

import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads, side_by_side

from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan
from holdfast.comm.allreduce import alltoall
from holdfast.comm.allreduce.adding import ORDERS, addable
from holdfast.comm.allreduce.parts import divide
from holdfast.data.assignment import assign_slices

LENGTH = 3840


class Post(Threads):
    """Threads that send messages, and count the bytes."""

    sent_bytes = 0

    def sendrecv(self, send, receive, tag=0):
        self.sent_bytes += sum(data.numel() * data.element_size() for _, data in send)
        super().sendrecv(send, receive, tag)


def term(number):
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number % 5)


def exchange(order, owners, *, checked=False, alter=lambda add, rank, span: None, kind=Post):
    """The sum at each of the workers, how many bytes each has given away for it, and what it found to be altered."""
    span = SlotSpan(0, LENGTH, torch.float32, checked=checked)

    def work(comm):
        add = OrderedAllReduce(comm, order, span.end, shared_bytes=0)
        mine = sorted(n for n, owner in owners.items() if owner in comm.local_ranks)
        for row, number in enumerate(mine):
            span.of(add.room(row)).copy_(term(number))
        add.seal(span, len(mine))
        alter(add, comm.local_ranks[0], span)
        found = []
        result = add(span, owners, altered=found.append).clone()
        return result, comm.sent_bytes, sorted(set(found))

    ranks = tuple(range(max(owners.values()) + 1))
    done = side_by_side(ranks, work, kind=kind)
    for worker in done.values():
        assert not isinstance(worker, Exception), worker
    results, sent_bytes, found = zip(*(done[rank] for rank in ranks), strict=True)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0], sent_bytes, found


def in_one_hand(order, numbers):
    out = torch.empty(LENGTH)
    ORDERS[order]([(n, term(n)) for n in sorted(numbers)], out)
    return out


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("order", ["fold", "tree"])
@pytest.mark.parametrize(
    "owners",
    [{n: n * 3 // 16 for n in range(16)}, {n: n % 3 for n in range(7)}, {0: 2, 1: 2, 4: 0, 5: 1, 6: 1, 7: 1}],
    ids=["runs", "scattered", "with gaps"],
)
def test_the_sum_by_messages_has_the_bits_of_one_worker(order, owners, checked):
    result, _, found = exchange(order, owners, checked=checked)

    assert torch.equal(result, in_one_hand(order, owners))
    assert not any(found)


def test_what_changes_before_it_is_added_is_found_by_its_holder_and_what_changes_on_the_way_by_who_takes_it():
    owners = {0: 0, 1: 1, 2: 2, 3: 2}  # the last two go as one

    def flip(numbers, index):
        numbers.view(torch.int32)[index] ^= 1 << 22

    def alter(add, rank, span):
        if rank == 2:
            flip(span.of(add.room(1)), 1500)

    spoiled = []

    class Lossy(Post):
        def sendrecv(self, send, receive, tag=0):
            super().sendrecv(send, receive, tag)
            if self.local_ranks == (1,) and not spoiled:
                spoiled.append(next(data for place, data in receive if place == 2))
                flip(spoiled[0], 7)

    assert exchange("tree", owners, checked=True, alter=alter)[2] == ([], [], [3])
    assert exchange("tree", owners, checked=True, kind=Lossy)[2] == ([], [2], [])


def rows_sent(order, owners):
    """How many vectors each worker sends, as parts of them to the others; one is the result."""
    workers = max(owners.values()) + 1
    return [sent / (4 * LENGTH * (workers - 1) / workers) - 1 for sent in exchange(order, owners)[1]]


def test_in_a_tree_many_slices_are_sent_like_one_and_in_a_fold_each_by_itself():
    """But for those at the beginning, which may be added in a fold, too."""
    halves, thirds = {n: n // 8 for n in range(16)}, {n: n * 3 // 16 for n in range(16)}

    assert (rows_sent("tree", halves), rows_sent("fold", halves)) == ([1, 1], [1, 8])
    assert (rows_sent("tree", thirds), rows_sent("fold", thirds)) == ([2, 3, 2], [1, 5, 5])
    assert rows_sent("fold", {0: 0, 1: 0, 2: 0, 3: 1}) == [1, 1]
    assert not torch.equal(in_one_hand("tree", range(16)), in_one_hand("fold", range(16))), "the order shows"


@pytest.mark.parametrize("workers", [2, 5])
def test_after_a_loss_only_the_worker_that_took_over_the_slice_sends_more(workers):
    for order, owners in {
        "fold": {n: min(n, workers - 1) for n in range(workers + 1)},
        "tree": {n: (n + 1) % workers for n in range(workers + 1)},
    }.items():
        assert sorted(rows_sent(order, owners)) == [1] * (workers - 1) + [2]


# -- balanced parts


def after_a_loss(workers, lost, order):
    """The owner of each slice once one of some workers, each with a slice, is dead; ranks have no gap."""
    usual = {rank: (rank, rank + 1) for rank in range(workers) if rank != lost}
    owners = assign_slices(workers, usual, {}, aligned=order == "tree")
    return {n: owner - (owner > lost) for n, owner in enumerate(owners)}


@pytest.mark.parametrize("order", ["fold", "tree"])
@pytest.mark.parametrize("workers", [3, 8])
def test_after_a_loss_no_worker_sends_more_than_one_and_an_nth_of_what_a_ring_sends(monkeypatch, workers, order):
    for lost in (0, workers // 2, workers - 1):
        owners, left = after_a_loss(workers, lost, order), workers - 1
        ring = 2 * 4 * LENGTH * (left - 1) / left

        monkeypatch.setattr(alltoall, "BALANCED_BYTES", 1 << 30)
        even, sent_evenly, _ = exchange(order, owners)
        monkeypatch.setattr(alltoall, "BALANCED_BYTES", 0)
        balanced, sent, _ = exchange(order, owners)

        rows = Counter(owners[group[0]] for group in addable(owners, order))
        assert max(sent_evenly) == pytest.approx((1 + max(rows.values())) / 2 * ring, rel=0.03), "1.5 with two rows"
        assert max(sent) <= (1 + 1 / workers) * ring * 1.01, "parts end at lines of 16 numbers"
        assert torch.equal(balanced, even)


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(0, 5000),
    line=st.sampled_from([1, 16]),
    loads=st.lists(st.sampled_from([0, 0.5, 1, 1, 1, 2, 2, 3, 7]), min_size=1, max_size=9),
)
def test_balanced_parts_cover_the_vector_and_each_result_is_relayed_once(length, line, loads):
    parts, relays = divide(length, line, loads)

    assert [n for part in parts for n in range(part.start, part.stop)] == list(range(length))
    assert all(part.start % line == 0 or part.start == length for part in parts)
    for source in {relay.source for relay in relays}:
        pieces = [relay.piece for relay in relays if relay.source == source]
        assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(
            range(parts[source].start, parts[source].stop)
        )
        assert source not in {relay.by for relay in relays}


@settings(max_examples=25, deadline=None)
@given(
    order=st.sampled_from(["fold", "tree", "fold-bf16", "tree-bf16-4"]),
    owners=st.dictionaries(st.integers(0, 12), st.integers(0, 4), min_size=1, max_size=12),
    checked=st.booleans(),
)
def test_balanced_parts_change_no_bit(order, owners, checked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alltoall, "BALANCED_BYTES", 0)
        result, _, found = exchange(order, owners, checked=checked)

    expected = in_one_hand(order, owners)
    assert torch.equal(result, expected.bfloat16().float() if "bf16" in order else expected)
    assert not any(found)


# -- memory


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("order", ["fold", "tree"])
@settings(max_examples=10, deadline=None)
@given(
    owners=st.dictionaries(st.integers(0, 9), st.integers(0, 2), min_size=1, max_size=8),
    length=st.sampled_from([1, 17, LENGTH]),
)
def test_the_result_may_take_the_place_of_a_workers_own_first_slice(order, checked, owners, length):
    span = SlotSpan(64, length, torch.float32, checked=checked)

    def work(comm):
        add = OrderedAllReduce(comm, order, span.end, shared_bytes=0)
        add.keeps_terms = False
        mine = sorted(n for n, owner in owners.items() if owner in comm.local_ranks)
        results = []
        for _ in range(2):
            for row, number in enumerate(mine):
                span.of(add.room(row)).copy_(term(number)[:length])
            add.seal(span, len(mine))
            found = []
            result = add(span, owners, mean=MeanDivisor(3.0, length), altered=found.append)
            assert not found
            assert result.data_ptr() == span.of(add.room(0)).data_ptr()
            results.append(result.clone())
        return results

    done = side_by_side((0, 1, 2), work, kind=Post)
    expected = in_one_hand(order, owners)[:length] / 3.0
    for results in done.values():
        assert not isinstance(results, Exception), results
        for result in results:
            assert torch.equal(result, expected)


def test_no_worker_has_a_result_before_all_have_begun():
    """Also where the vector has fewer lines than there are workers, and some have no slice."""
    begun, span = [], SlotSpan(0, 3, torch.float32)

    def work(comm):
        add = OrderedAllReduce(comm, "fold", span.end, shared_bytes=0)
        add(span, {0: 0})
        comm.barrier()
        if comm.local_ranks == (2,):
            time.sleep(0.2)
        begun.append(comm.local_ranks[0])
        add(span, {0: 0})
        return sorted(begun)

    done = side_by_side((0, 1, 2), work, kind=Post)

    assert done == {rank: [0, 1, 2] for rank in range(3)}


def test_all_buckets_use_one_buffer_in_turn():
    lengths = [1600, 800, 3200, 16]
    spans = [SlotSpan(0, length, torch.float32) for length in lengths]

    def work(comm):
        add = OrderedAllReduce(comm, "fold", 4 * 3200, shared_bytes=0)
        add.keeps_terms = False
        for span in spans:
            add(span, {0: 0, 1: 1})
        buffer = add._taken.buffers[0].data_ptr()
        for _ in range(2):
            for span in spans:
                add(span, {0: 0, 1: 1})
        assert add._taken.buffers[0].data_ptr() == buffer
        return [memory.numel() for memory in add._taken.buffers]

    done = side_by_side((0, 1), work, kind=Post)

    assert done == {rank: [4 * (3200 // 2 + 3200)] for rank in range(2)}, "half of the other's vector, and the result"
