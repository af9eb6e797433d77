"""The sum by messages: slices that their holder may add first go as one, and no bit knows of it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads, side_by_side

from holdfast.comm import OrderedAllReduce, SlotSpan, VirtualCommunicator
from holdfast.comm.allreduce.adding import ORDERS, addable
from holdfast.comm.allreduce.alltoall import AllToAllReduce

LENGTH = 3000


class Post(Threads):
    """Threads that send messages, and count the bytes."""

    sent_bytes = 0
    spoil = staticmethod(lambda rank, received: None)

    def alltoall(self, send, out):
        everybodys = torch.empty(len(self.members), *send.shape, dtype=send.dtype)
        self.allgather(send, everybodys)
        out.copy_(everybodys[:, self.members.index(self.local_ranks[0])])
        self.sent_bytes += send.numel() * send.element_size()
        self.spoil(self.local_ranks[0], out)


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


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(["fold", "tree"]),
    owners=st.dictionaries(st.integers(0, 20), st.integers(0, 2), min_size=1, max_size=14),
)
def test_what_is_added_before_it_is_sent_changes_no_bit(order, owners):
    groups = addable(owners, order)
    sums = []
    for group in groups:
        assert len({owners[n] for n in group}) == 1, "nobody adds what it has not"
        sums.append((group[0], torch.empty(LENGTH)))
        ORDERS[order]([(n, term(n)) for n in group], sums[-1][1])
    whole = torch.empty(LENGTH)
    ORDERS[order](sums, whole)

    assert sorted(itertools.chain(*groups)) == sorted(owners)
    assert torch.equal(whole, in_one_hand(order, owners))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("order", ["fold", "tree"])
@pytest.mark.parametrize(
    "owners",
    [
        {n: n * 3 // 16 for n in range(16)},
        {n: n % 3 for n in range(7)},
        {n: 0 if n < 13 else 1 for n in range(14)},
        {0: 2, 1: 2, 4: 0, 5: 1, 6: 1, 7: 1},
    ],
    ids=["runs", "scattered", "uneven", "with gaps"],
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

    class Lossy(Post):
        spoil = staticmethod(lambda rank, received: flip(received[2, 0], 7) if rank == 1 else None)

    assert exchange("tree", owners, checked=True, alter=alter)[2] == ([], [], [3])
    assert exchange("tree", owners, checked=True, kind=Lossy)[2] == ([], [2], [])


def test_in_a_tree_many_slices_are_sent_like_one_and_in_a_fold_each_by_itself():
    """But for those at the beginning, which may be added in a fold, too."""

    def rows(order, owners):
        alone = {n: n for n in range(max(owners.values()) + 1)}
        return exchange(order, owners)[1][0] / exchange(order, alone)[1][0]

    halves, thirds = {n: n // 8 for n in range(16)}, {n: n * 3 // 16 for n in range(16)}
    assert (rows("tree", halves), rows("fold", halves)) == (1, 8)
    assert (rows("tree", thirds), rows("fold", thirds)) == (3, 5)
    assert rows("fold", {0: 0, 1: 0, 2: 0, 3: 1}) == 1
    assert not torch.equal(in_one_hand("tree", range(16)), in_one_hand("fold", range(16))), "the order shows"


# -- buffers


def made_in(rounds, spans, slot_bytes):
    """Return how many buffers are made in each round of sums of some spans."""
    add = AllToAllReduce(VirtualCommunicator(1), [torch.zeros(slot_bytes, dtype=torch.uint8)], slot_bytes)
    made = []
    make = add._make_buffers
    add._make_buffers = lambda *arguments: made.append(1) or make(*arguments)
    counts = []
    for _ in range(rounds):
        for span in spans:
            add(span, ((0,),), "fold", None, lambda: None)
        counts.append(len(made))
        made.clear()
    return counts, add


def test_the_buffers_of_all_buckets_of_a_model_are_kept():
    spans = [SlotSpan(start, 16, torch.float32) for start in range(0, 64 * 100, 64)]

    assert made_in(3, spans, 64 * 100)[0] == [100, 0, 0]


def test_buffers_of_collectives_of_many_lengths_take_no_more_memory_than_a_slot():
    spans = [SlotSpan(0, length, torch.float32) for length in range(16, 1616, 16)]

    counts, add = made_in(2, spans, 6400)

    assert counts == [100, 100]
    assert sum(span.end - span.start for span, _ in add._buffers) <= 6400
    assert len(add._buffers) == 1
    assert len(made_in(1, spans[:20], 6400)[1]._buffers) == 5, "of 256 to 320 numbers"
