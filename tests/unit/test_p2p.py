"""Messages inside a step: what holds them, when it is used again, and what stands between a late message and its reader."""

import os
import threading
import time

import pytest
import torch
from threads import PATIENCE_S, Threads, side_by_side

from holdfast.comm import Mailbox, OrderedAllReduce, SlotSpan, VirtualCommunicator
from holdfast.comm import shm_p2p as outbox
from holdfast.comm.memory import OpenSegments
from holdfast.comm.shm_p2p import ShmInbox, ShmOutbox
from holdfast.errors import InternalError, PeerFailed, ScriptError

ME, OTHER = 0, 1


class Messages(Threads):
    """Threads that post to each other, too."""

    def post(self, rank, data):
        self.meeting.posted(self.local_ranks[0], rank).put(data)

    def take(self, rank, data):
        data.view(-1).copy_(self.meeting.posted(rank, self.local_ranks[0]).get(timeout=PATIENCE_S).view(-1))


def pair():
    """An outbox, and how another worker of this host sees it."""
    box = ShmOutbox(lambda held, more: True)
    return box, ShmInbox(OTHER, os.getpid(), box.renew(), OpenSegments())


def exchange(box, inbox, attempt, messages):
    """All messages of an attempt, as they arrive, and where they lie."""
    box.begin(attempt)
    inbox.begin(attempt)
    for data in messages:
        assert box.put([OTHER], data)
    found = []
    for _ in messages:
        assert inbox.has_next()
        found.append(inbox.take())
    assert not inbox.has_next()
    return found


# -- the outbox


def test_messages_of_any_number_and_size_come_whole_and_later_steps_need_no_more_memory(monkeypatch):
    monkeypatch.setattr(outbox, "_LEAST_BYTES", 4096)
    box, inbox = pair()
    messages = [torch.randn(n % 7, 100 + n) for n in range(600)]  # more than two tables hold
    exchange(box, inbox, 1, messages)
    files = os.listdir("/proc/self/fd")
    first = [id(part.segment) for part in box._parts]
    assert len(first) > 2
    assert len(box._tables) == 3

    for attempt in (2, 3):
        found = exchange(box, inbox, attempt, messages)
        assert all(torch.equal(a, b) for a, b in zip(found, messages, strict=True))

    assert [id(part.segment) for part in box._parts] == first
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_a_message_of_the_attempt_before_is_not_taken_for_one_of_this():
    box, inbox = pair()
    exchange(box, inbox, 1, [torch.ones(3)])

    inbox.begin(2)
    box.begin(2)

    assert not inbox.has_next()
    box.put([OTHER], torch.zeros(3))
    assert inbox.has_next()
    assert torch.equal(inbox.take(), torch.zeros(3))


def test_messages_for_others_are_passed_over():
    box, inbox = pair()
    box.begin(1)
    inbox.begin(1)
    for n in range(300):
        box.put([OTHER if n == 299 else 2], torch.full((), n))

    assert inbox.has_next()
    assert inbox.take() == 299


def test_the_word_that_tells_of_a_message_is_written_when_all_of_it_is_there(monkeypatch):
    box, inbox = pair()
    box.begin(1)
    inbox.begin(1)
    seen = []
    say = ShmOutbox._append

    def look_before(self, to, words):
        seen.append((inbox.has_next(), box._parts[0].segment.bytes[:20].view(torch.float32).tolist()))
        say(self, to, words)

    monkeypatch.setattr(ShmOutbox, "_append", look_before)

    box.put([OTHER], torch.ones(5))

    assert seen == [(False, [1.0] * 5)]
    assert inbox.has_next()


def test_a_segment_is_mapped_once_though_tables_are_fresh_in_every_generation():
    opened, box = OpenSegments(), ShmOutbox(lambda held, more: True)
    places = set()
    for _ in range(3):
        inbox = ShmInbox(OTHER, os.getpid(), box.renew(), opened)
        (found,) = exchange(box, inbox, 1, [torch.ones(1000)])
        places.add(found.data_ptr())
        opened.forget_others()

    assert len(places) == 1


def test_what_nobody_asks_for_any_more_is_unmapped():
    opened, box = OpenSegments(), ShmOutbox(lambda held, more: True)
    inbox = ShmInbox(OTHER, os.getpid(), box.renew(), opened)
    exchange(box, inbox, 1, [torch.ones(1000)])
    assert len(opened._known) == 1

    opened.forget_others()
    opened.forget_others()

    assert opened._known == {}


# -- mail


def test_a_new_generation_takes_no_message_of_the_old_one_even_from_the_same_place():
    mails = {}

    def first(comm):
        mail = mails[comm.local_ranks[0]] = Mailbox(comm)
        mail.begin()
        if comm.local_ranks == (ME,):
            mail.send(OTHER, torch.ones(3))  # which nobody receives
        comm.barrier()

    def second(comm):
        mail = mails[comm.local_ranks[0]]
        mail._comm = comm
        mail.begin()
        if comm.local_ranks == (ME,):
            comm.barrier()
            mail.send(OTHER, torch.zeros(3))
            return None
        assert not mail._inboxes[ME].has_next()
        comm.barrier()
        return mail.receive(ME).clone()

    side_by_side((ME, OTHER), first, kind=Messages)
    assert torch.equal(side_by_side((ME, OTHER), second, generation=1, kind=Messages)[OTHER], torch.zeros(3))


@pytest.mark.parametrize("shared_bytes", [-1, 0, 100_000], ids=["memory", "messages", "too-little-memory"])
def test_who_has_no_memory_sends_messages_and_what_nobody_took_is_forgotten(shared_bytes):
    counts = {}

    def work(comm):
        mail = Mailbox(comm, shared_bytes=shared_bytes if comm.local_ranks == (ME,) else -1)
        for attempt in (1, 2):
            mail.begin()
            if comm.local_ranks == (ME,):
                mail.send(OTHER, torch.full((1000,), attempt))
                mail.send(OTHER, torch.full((1000,), 10 * attempt))
            got = [mail.receive(ME).clone()] if comm.local_ranks == (OTHER,) else []
            comm.barrier()
        counts[comm.local_ranks[0]] = sum(line.qsize() for line in comm.meeting.lines.values())
        return got

    results = side_by_side((ME, OTHER), work, kind=Messages)

    assert [got.unique().tolist() for got in results[OTHER]] == [[2]]
    # Left over: a header and the numbers of the last message, where they were sent.
    assert counts[OTHER] == (0 if shared_bytes == -1 else 2)


def test_who_waits_for_a_message_hears_of_a_death():
    has_begun = threading.Event()

    def work(comm):
        mail = Mailbox(comm)
        mail.begin()
        if comm.local_ranks == (ME,):
            has_begun.wait(10)  # else the other one may still be in begin()
            raise RuntimeError("dead")
        has_begun.set()
        mail.receive(ME)

    assert isinstance(side_by_side((ME, OTHER), work, kind=Messages)[OTHER], PeerFailed)


def test_a_message_that_cannot_be_sent_is_refused():
    mail = Mailbox(VirtualCommunicator(1))

    with pytest.raises(InternalError, match=r"before begin\(\)"):
        mail.send(0, torch.ones(1))
    mail.begin()
    with pytest.raises(
        ScriptError, match=r"at most 8 dimensions, got the shape \(1, 1, 1, 1, 1, 1, 1, 1, 2\): flatten"
    ):
        mail.send(0, torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 2))
    with pytest.raises(InternalError, match=r"worker 1 is not a member"):
        mail.send(1, torch.ones(1))
    with pytest.raises(InternalError, match="waits for a message from worker 0"):
        mail.receive(0)


def test_virtual_workers_say_who_sends_and_a_death_ends_the_waiting():
    comm = VirtualCommunicator(3)
    mail = Mailbox(comm)
    mail.begin()
    with pytest.raises(InternalError, match="pass the sender or receiver as `me`"):
        mail.send(1, torch.ones(1))
    mail.send(1, torch.full((2,), 7.0), me=0)
    mail.send(1, torch.full((2,), 8.0), me=2)
    assert mail.receive(2, me=1).tolist() == [8.0, 8.0]

    comm.fail(0)

    with pytest.raises(PeerFailed):
        mail.receive(2, me=1)
    comm.shrink()
    mail.begin()
    with pytest.raises(InternalError, match="not a member"):
        mail.receive(0, me=1)


# -- maxima one after another


class Counting(Threads):
    """Counts what goes by messages."""

    def maximum(self, values):
        self.meeting.desk["maxima"] = self.meeting.desk.get("maxima", 0) + 1
        return super().maximum(values)


def test_maxima_without_a_sum_cost_no_message_once_the_memory_is_open():
    def work(comm):
        add = OrderedAllReduce(comm, "fold", 64)
        add.open()
        comm.barrier()
        before = comm.meeting.desk["maxima"]
        me = comm.local_ranks[0]
        found = [add.maximum([n * (1 + me), -n]) for n in range(300)]
        comm.barrier()
        assert comm.meeting.desk["maxima"] == before
        add.open()
        assert comm.meeting.desk["maxima"] == before, "it is open"
        return found

    for found in side_by_side((0, 1, 2), work, kind=Counting).values():
        assert found == [[3 * n, -n] for n in range(300)]


def test_nobody_overtakes_who_still_reads_the_maximum_before():
    """One worker is held up between its meeting and its reading, until the other has written its next numbers."""
    rounds = 3

    def work(comm):
        add = OrderedAllReduce(comm, "fold", 64)
        add.open()
        path = add._path
        if comm.local_ranks == (0,):
            meet = type(path)._barrier.__get__(path)

            def meet_late():
                meet()
                ends_s = time.monotonic() + PATIENCE_S
                while path._words[1, 2] <= path._phase < rounds:
                    assert time.monotonic() < ends_s, "the other one never came to its next meeting"
                    time.sleep(0.001)

            path._barrier = meet_late
        return [add.maximum([n]) for n in range(rounds)]

    for found in side_by_side((0, 1), work).values():
        assert found == [[n] for n in range(rounds)]


def test_a_worker_without_a_slice_has_a_slot_that_all_have_mapped_before_it_is_needed():
    span = SlotSpan(0, 1000, torch.float32)
    adders = {}

    def first(comm):
        add = adders[comm.local_ranks[0]] = OrderedAllReduce(comm, "fold", span.end)
        if comm.local_ranks != (2,):
            span.of(add.room(0)).fill_(1.0)
        add(span, {0: 0, 1: 1})
        return [memory.data_ptr() for terms in add._path._memory.terms for memory in terms]

    def second(comm):
        add = adders[comm.local_ranks[0]]
        add._comm = comm
        span.of(add.room(0)).fill_(2.0)
        assert torch.equal(add(span, {0: 0, 1: 2}), torch.full((1000,), 4.0))
        return [
            memory.data_ptr() for terms in add._path._memory.terms for memory in terms
        ], add._path._memory.result.data_ptr()

    before = side_by_side((0, 1, 2), first)
    results = {rank: add._path._memory.result for rank, add in adders.items()}
    after = side_by_side((0, 2), second, generation=1)

    for rank in (0, 2):
        assert after[rank][0] == [before[rank][0], before[rank][2]], "mapped once"
        assert after[rank][1] != results[rank].data_ptr(), "the result is fresh"


def test_what_is_sent_to_several_is_copied_once_and_reaches_each_in_its_own_way():
    def work(comm):
        mail = Mailbox(comm, shared_bytes=0 if comm.local_ranks == (2,) else -1)
        mail.begin()
        if comm.local_ranks == (0,):
            mail._readers -= {3}  # as if that one could not open the memory
            mail.send((0, 1, 2, 3), torch.arange(100))
            used = sum(part.used for part in mail._outbox._parts)
            assert used == 832, "one copy of 800 bytes, in whole cache lines"
        if comm.local_ranks == (3,):
            mail._inboxes.pop(0)
        got = mail.receive(0).clone()
        comm.barrier()
        return got

    for got in side_by_side((0, 1, 2, 3), work, kind=Messages).values():
        assert torch.equal(got, torch.arange(100))
