"""The all-reduce between hosts, whose workers are threads here: barriers, pieces, bytes, and what a death does."""

import math
import threading
import time
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from host_threads import SUM_TYPE, Fabric, Thread
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.base.orders import is_rounded
from holdfast.comm import MeanDivisor, SlotSpan
from holdfast.comm.allreduce import adding, chain, hierarchical
from holdfast.comm.allreduce.chain import ChainReduce
from holdfast.comm.allreduce.hierarchical import HierarchicalReduce, pieces, rails
from holdfast.comm.allreduce.mover import FabricMover
from holdfast.comm.allreduce.path import ReduceCall, aligned
from holdfast.comm.allreduce.shm import HostMemory
from holdfast.errors import PeerFailed, ScriptError


def some_terms(numbers):
    return {n: torch.randn(3, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 7) for n in numbers}


def added(terms):
    out = torch.empty(3)
    adding.tree(sorted(terms.items()), out)
    return out


# -- who adds which part of the vector


workers_of_hosts = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@settings(max_examples=150, deadline=None)
@given(workers_of_hosts, st.integers(0, 200), st.sampled_from([8, 16]))
@example([1, 2], 8, 8).via("the cut at the end is none")
def test_pieces_cover_the_vector_once_and_each_is_in_one_share_of_every_host(sizes, length, line):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]

    cut = list(pieces(of_process, length, line))

    assert [n for piece in cut for n in range(piece.part.start, piece.part.stop)] == list(range(length))
    assert all(piece.part.start % line == 0 for piece in cut)
    for piece in cut:
        assert [of_process[worker] for worker in piece.workers] == list(range(len(sizes)))
    for process in range(len(of_process)):
        mine = [piece.part for piece in cut if process in piece.workers]
        assert all(a.stop == b.start for a, b in pairwise(mine)), "a share is in one piece"


# -- workers on several hosts


class InRounds(FabricMover):
    """Exchanges in a few rounds, one after another."""

    def __init__(self, comm):
        super().__init__(comm)
        self.most_rounds = 3

    def pipeline(self, rounds, add):
        assert 1 < len(rounds) <= self.most_rounds
        for number, each in enumerate(rounds):
            self.exchange(each.give, each.take)
            add(number)
            self.exchange(each.give_results, each.take_results)


def sums_of_threads(fabric, terms, slots, length, mean=None, comm=Thread, times=1, mover=FabricMover, order="tree"):
    """Return each process's sum, or what it raised; the numbers of all results start as NaN."""
    span, of_process = SlotSpan(64, length, SUM_TYPE), fabric.of_process
    room = torch.full((span.end,), 255, dtype=torch.uint8)
    memory = []
    for held in slots:
        memory.append([room.clone() for _ in held])
        for n, of_slot in zip(held, memory[-1], strict=True):
            span.of(of_slot).copy_(terms[n])
    results = [room.clone() for _ in set(of_process)]

    def work(comm):
        mine = of_process[comm.me]
        reach = [m if of_process[p] == mine else [] for p, m in enumerate(memory)]
        of_host = HostMemory(reach, results[mine], results[mine], fabric.words[mine], range(fabric.count))
        kind = ChainReduce if order == "fold" else HierarchicalReduce
        add = kind(comm, of_process, of_host, mover(comm))
        return [add(span, slots, ReduceCall(order, mean)).clone() for _ in range(times)][-1]

    return fabric.run(work, comm)


@settings(max_examples=25, deadline=None)
@given(
    workers_of_hosts,
    st.dictionaries(st.integers(0, 20), st.integers(0, 99)),
    st.integers(0, 300),
    st.integers(0, 300),
    st.randoms(use_true_random=False),
    st.sampled_from(["tree", "tree", "fold", "fold", "tree-bf16-1", "tree-bf16-2", "tree-bf16-8"]),
)
def test_the_sum_between_hosts_has_the_bits_of_the_tree_over_all_slices(sizes, owners, length, divided, chance, order):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]
    chance.shuffle(of_process)  # processes of one host need not be neighbours
    numbers = {host: i for i, host in enumerate(dict.fromkeys(of_process))}
    of_process = [numbers[host] for host in of_process]
    slots = [sorted(n for n, at in owners.items() if at % len(of_process) == p) for p in range(len(of_process))]
    terms = {n: torch.randn(length, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 5) for n in owners}
    expected = torch.empty(length)
    adding.ORDERS[order](sorted(terms.items()), expected)
    expected[:divided] /= 3
    expected = expected.bfloat16().float() if is_rounded(order) else expected

    fabric = Fabric(of_process)
    answers = sums_of_threads(fabric, terms, slots, length, MeanDivisor(3, divided), times=2, order=order)

    for answer in answers:
        assert torch.equal(answer, expected)
        assert torch.equal(answer.signbit(), expected.signbit())
    assert all(of_process[a] != of_process[b] for a, b, *_ in fabric.sent), "inside a host nobody sends"


@pytest.mark.parametrize(("sizes", "length"), [((1, 1), 33), ((2, 2), 5000), ((2, 1, 3), 1000)])
def test_the_bits_are_the_same_in_rounds(monkeypatch, sizes, length):
    monkeypatch.setattr(hierarchical, "ROUND_BYTES", 64)
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]
    terms = {n: torch.randn(length, generator=torch.Generator().manual_seed(n)) for n in range(2 * len(of_process))}
    slots = [[2 * process, 2 * process + 1] for process in range(len(of_process))]

    def sums(mover):
        return sums_of_threads(
            Fabric(of_process), terms, slots, length, MeanDivisor(3, length // 2), mover=mover, times=2
        )

    for at_once, in_rounds in zip(sums(FabricMover), sums(InRounds), strict=True):
        assert torch.equal(at_once, in_rounds)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 3, 4)])
def test_each_chunk_crosses_once_however_many_workers_a_host_has(sizes):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]
    terms, length = some_terms(range(8)), 1200
    terms = {n: term.repeat(length // 3) for n, term in terms.items()}
    firsts = list(accumulate(sizes, initial=0))[:-1]
    slots = [[] for _ in of_process]
    for n in terms:  # contiguous and aligned: the first host half of them, the others what is left
        slots[firsts[0 if n < 4 else 1 if n < 6 or len(sizes) == 2 else 2]].append(n)

    fabric = Fabric(of_process)
    sums_of_threads(fabric, terms, slots, length)

    each_way = (len(sizes) - 1) * 4 * length  # a vector's sums to who finishes them, and its results to all hosts
    assert sum(fabric.bytes_by_host()) == 2 * each_way


def bytes_of(hosts, workers, owner_of, order="tree"):
    """What each host sends, in vectors, if slice ``n`` of as many as there are workers belongs to ``owner_of(n)``."""
    of_process = [host for host in range(hosts) for _ in range(workers)]
    terms = {n: torch.full((hosts * workers * 160,), 1.0 + n) for n in range(len(of_process))}
    slots = [[n for n in terms if owner_of(n) == process] for process in range(len(of_process))]
    fabric, length = Fabric(of_process), len(terms[0])
    answers = sums_of_threads(fabric, terms, slots, length, order=order)
    assert all(answer[0] == sum(range(1, len(terms) + 1)) for answer in answers)
    return [sent / (4 * length) for sent in fabric.bytes_by_host()]


def test_eight_hosts_of_even_slices_send_a_vector_and_three_quarters_each_however_many_workers_they_have():
    assert bytes_of(8, 1, lambda n: n) == [1.75] * 8
    assert bytes_of(8, 2, lambda n: n) == [1.75] * 8


def test_units_of_a_host_and_results_are_sent_in_16_bits_and_a_unit_on_two_hosts_in_32():
    assert bytes_of(8, 2, lambda n: n, "tree-bf16-2") == [1.75 / 2] * 8
    assert bytes_of(2, 4, lambda n: n, "tree-bf16-4") == [0.5] * 2
    assert bytes_of(2, 4, lambda n: 4 if n == 3 else n, "tree-bf16-4") == [1.0 + 0.25, 0.75 + 0.25]


def test_in_a_fold_a_host_sends_its_running_sum_and_the_result_once():
    flat = 4 * 0.5 * 2  # what two hosts of four would send slice by slice

    assert bytes_of(2, 4, lambda n: n, "fold") == [1.0, 1.0] < [flat, flat]
    assert bytes_of(4, 2, lambda n: n, "fold") == [2.0, 2.0, 1.0, 1.0]
    assert bytes_of(2, 4, lambda n: 5 if n == 3 else n, "fold") == [1.0, 1.0], "still consecutive after a loss"
    assert bytes_of(2, 2, lambda n: 2 if n == 0 else n, "fold") == [1.0, 2.0], "its slices are no run"


@pytest.mark.parametrize("length", [1, 5000])
def test_a_running_sum_of_many_pieces_has_the_bits_of_the_fold(monkeypatch, length):
    monkeypatch.setattr(chain, "PIECE_BYTES", 64)
    of_process, terms = [0, 0, 1, 1, 2, 2, 2], {}
    for n in range(14):
        terms[n] = torch.randn(length, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 5)
    expected = torch.empty(length)
    adding.fold(sorted(terms.items()), expected)

    answers = sums_of_threads(Fabric(of_process), terms, [[2 * p, 2 * p + 1] for p in range(7)], length, order="fold")

    assert all(torch.equal(answer, expected) for answer in answers)


def test_after_a_loss_only_the_host_that_holds_a_group_more_sends_more():
    """The messages of one path for all would be as long as the longest."""
    own_host = bytes_of(4, 2, lambda n: 2 if n == 3 else n)
    other_host = bytes_of(4, 2, lambda n: 7 if n == 0 else n)

    assert own_host == [1.5] * 4, "its second worker took the slice over: the group is what it was"
    assert other_host == [1.5, 1.5, 1.5, 1.5 + 0.75]


@pytest.mark.parametrize(("sizes", "found"), [((3, 3), [(0, 3), (1, 4), (2, 5)]), ((2, 1), [(0, 1, 2)])])
def test_every_piece_stays_on_its_rail(sizes, found):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]

    assert rails(of_process) == found
    for piece in pieces(of_process, 1000, 16):
        assert any(set(piece.workers) <= set(rail) for rail in found)


def test_adding_slices_together_that_are_no_subtree_is_found_out(monkeypatch):
    """The negative control: a host adds everything that it holds."""
    holders = {n: n // 3 for n in range(6)}
    terms, slots = some_terms(holders), [[0, 1, 2], [3, 4, 5]]
    monkeypatch.setattr(hierarchical, "addable", lambda *_: [(0, 1, 2), (3, 4, 5)])

    answers = sums_of_threads(Fabric([0, 1]), terms, slots, 3)

    assert not torch.equal(answers[0], added(terms))


def test_vectors_of_different_lengths_are_refused_by_all():
    fabric = Fabric([0, 0, 1])
    results = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]

    def work(comm):
        mine = fabric.of_process[comm.me]
        of_host = HostMemory([[]] * 3, results[mine], results[mine], fabric.words[mine], range(3))
        add = HierarchicalReduce(comm, fabric.of_process, of_host, FabricMover(comm))
        add(SlotSpan(0, 3 + (comm.me == 1), SUM_TYPE), ((),) * 3, ReduceCall("tree"))

    answers = fabric.run(work)

    assert {str(answer) for answer in answers} == {"the workers all-reduce vectors of different lengths, from 3 to 4"}
    assert {type(answer) for answer in answers} == {ScriptError}


# -- the barrier


@settings(max_examples=30, deadline=None)
@given(workers_of_hosts, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=15), st.randoms(use_true_random=False))
def test_the_barrier_takes_the_maximum_of_each_integer_over_all_workers(sizes, values, chance):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]
    given = [[chance.choice((value, -(2**63))) for value in values] for _ in of_process]
    fabric = Fabric(of_process)

    def work(comm):
        barrier = fabric.barrier(comm)
        return [barrier(given[comm.me]), barrier(), barrier([comm.me, -comm.me])]

    last = len(of_process) - 1
    expected = [[max(column) for column in zip(*given, strict=True)], [], [last, 0]]
    assert fabric.run(work) == [expected] * len(of_process)


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_a_barrier_takes_a_logarithm_of_messages_for_each_host_and_none_inside(hosts):
    fabric = Fabric([process // 3 for process in range(3 * hosts)])

    fabric.run(lambda comm: fabric.barrier(comm)())

    assert fabric.messages_by_process() == [math.ceil(math.log2(hosts)), 0, 0] * hosts


@pytest.mark.parametrize("late", [0, 1, 4])
def test_no_worker_leaves_the_barrier_before_the_last_has_entered(late):
    fabric, entered = Fabric([0, 0, 1, 1, 2]), threading.Event()

    def work(comm):
        barrier = fabric.barrier(comm)
        barrier()
        if comm.me == late:
            time.sleep(0.1)
            entered.set()
        barrier()
        return entered.is_set()

    assert fabric.run(work) == [True] * 5


@pytest.mark.parametrize("dead", [0, 1, 4])
def test_a_worker_that_never_comes_fails_the_barrier_of_all_others(dead):
    fabric = Fabric([0, 0, 1, 1, 2])

    def work(comm):
        barrier = fabric.barrier(comm)
        barrier()
        if comm.me == dead:
            time.sleep(0.05)
            raise SystemError("killed")
        barrier()

    answers = fabric.run(work)

    assert [type(answer) for answer in answers] == [SystemError if me == dead else PeerFailed for me in range(5)]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["another-process", "another-generation", "an-earlier-phase"])
@pytest.mark.parametrize("where", ["words", "message"])
def test_a_word_that_is_not_of_now_is_no_arrival(number, where):
    class Stale(Thread):
        def sendrecv(self, send, receive):
            super().sendrecv(send, receive)
            if where == "message" and self.me == 0:
                receive[0][1][number] -= 1

    fabric = Fabric([0, 0, 1])
    if where == "words":
        fabric.words[0][1, :2] -= np.array([number == 0, number == 1])

    def work(comm):
        barrier = fabric.barrier(comm)
        if number == 2 and where == "words":  # a wait returns wrongly, and the second worker is late
            barrier._wait = lambda is_so: None
            time.sleep(0.05 * (comm.me == 1))
        return barrier()

    assert PeerFailed in map(type, fabric.run(work, Stale))


def test_a_fabric_whose_maximum_is_of_another_phase_fails_the_barrier():
    class Late(Thread):
        def maximum(self, values):
            phase, *others = super().maximum(values)
            return [phase + 1, *others]

    fabric = Fabric([0, 1])

    answers = fabric.run(lambda comm: fabric.barrier(comm)(), Late)

    assert {type(answer) for answer in answers} == {PeerFailed}
    assert "processes are in phases from 1 to 2, and not all in 1" in map(str, answers)


# -- memory


@pytest.mark.parametrize(("hosts", "slices", "order"), [(2, 1, "tree"), (8, 2, "tree"), (8, 1, "tree-bf16-1")])
def test_the_sums_of_all_spans_lie_in_one_buffer_in_turn(hosts, slices, order):
    lengths = [1600, 800, 3200, 16]
    spans = [SlotSpan(0, length, SUM_TYPE) for length in lengths]
    fabric, results = Fabric(range(hosts)), [torch.zeros(4 * 3200, dtype=torch.uint8) for _ in range(hosts)]
    slots = [list(range(slices * host, slices * (host + 1))) for host in range(hosts)]
    terms = {n: torch.randn(3200, generator=torch.Generator().manual_seed(n)) for n in range(slices * hosts)}

    def work(comm):
        mine = [terms[n].clone().view(torch.uint8) for n in slots[comm.me]]
        reach = [mine if process == comm.me else [] for process in range(hosts)]
        memory = HostMemory(reach, results[comm.me], results[comm.me], fabric.words[comm.me], range(hosts))
        add = HierarchicalReduce(comm, range(hosts), memory, FabricMover(comm))
        for _ in range(2):
            for span in spans:
                expected = torch.empty(span.length)
                adding.ORDERS[order]([(n, term[: span.length]) for n, term in terms.items()], expected)
                expected = expected.bfloat16().float() if is_rounded(order) else expected
                assert torch.equal(add(span, slots, ReduceCall(order)), expected)
        return [buffer.numel() for buffer in add.buffers]

    chunk = aligned((2 if is_rounded(order) else 4) * 3200 // hosts)
    received = (hosts - 1) * chunk
    sent = received if slices > 1 or is_rounded(order) else 0  # a single slice is sent from where it is
    packed = hosts * chunk if is_rounded(order) else 0
    assert fabric.run(work) == [[received + sent + packed]] * hosts


class LosesABit(Thread):
    """Process 2, of the host in the middle, receives a bit of the first running sum wrongly."""

    is_lost = False

    def sendrecv(self, send, receive):
        super().sendrecv(send, receive)
        numbers = [data for _, data in receive if data.is_floating_point()]
        if self.me == 2 and numbers and not self.is_lost:
            self.is_lost = True
            numbers[0].view(torch.int32)[5] ^= 1


def running_sums(slots, kind=Thread, *, checked):
    """Reduce some spans twice in a chain of three hosts of two; return each process's buffers and altered slices."""
    fabric, spans, end = Fabric([0, 0, 1, 1, 2, 2]), [], 0
    for length in [1600, 9600, 16]:
        spans.append(SlotSpan(end, length, SUM_TYPE, checked=checked))
        end = spans[-1].end
    terms = {n: torch.zeros(end, dtype=torch.uint8) for n in range(12)}
    results = [torch.zeros(end, dtype=torch.uint8) for _ in range(3)]
    expected = {}
    for span in spans:
        for n, term in terms.items():
            span.of(term).normal_(generator=torch.Generator().manual_seed(n)).mul_(10.0 ** (n % 5))
            span.vector(term).seal()
        expected[span] = torch.empty(span.length)
        adding.fold([(n, span.of(term)) for n, term in terms.items()], expected[span])

    def work(comm):
        host, found = comm.me // 2, []
        reach = [[terms[n] for n in held] if p // 2 == host else [] for p, held in enumerate(slots)]
        memory = HostMemory(reach, results[host], results[host], fabric.words[host], range(6))
        add = ChainReduce(comm, fabric.of_process, memory, FabricMover(comm))
        for _ in range(2):
            for span in spans:
                result = add(span, slots, ReduceCall("fold", altered=found.append))
                assert kind is LosesABit or torch.equal(result, expected[span])
        return [buffer.numel() for buffer in add.buffers], found

    return fabric.run(work, kind)


@pytest.mark.parametrize("visits", [1, 2])
@pytest.mark.parametrize("checked", [False, True])
def test_the_running_sums_of_all_spans_lie_in_one_buffer_in_turn(visits, checked):
    slots = [[2 * p, 2 * p + 1] if visits == 1 else [p, p + 6] for p in range(6)]

    answers = running_sums(slots, checked=checked)

    shares = [4 * 5120 + 3 * 64, 4 * 4480 + 3 * 64] if checked else [4 * 4800] * 2  # of the longest, three pieces each
    assert answers == [([visits * share], []) for share in shares * 3]


def test_a_running_sum_is_verified_before_slices_are_added_to_it_in_place():
    answers = running_sums([[2 * p, 2 * p + 1] for p in range(6)], LosesABit, checked=True)

    assert [found for _, found in answers] == [[], [], [0], [], [], []]
