"""Dissemination: after a logarithm of rounds every process has heard from every other, whatever their number."""

import math

import pytest
from host_threads import Fabric, Thread

from holdfast.comm.dissemination import dissemination_rounds
from holdfast.comm.subgroup import Subgroup


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 128])
def test_every_process_hears_from_every_other_and_each_receives_what_is_sent_to_it(count):
    rounds = [list(dissemination_rounds(place, count)) for place in range(count)]
    heard = [{place} for place in range(count)]

    for number in range(len(rounds[0])):
        sources = [rounds[place][number][1] for place in range(count)]
        assert all(rounds[source][number][0] == place for place, source in enumerate(sources))
        heard = [heard[place] | heard[source] for place, source in enumerate(sources)]

    assert heard == [set(range(count))] * count
    assert {len(its) for its in rounds} == {math.ceil(math.log2(count))}


@pytest.mark.parametrize("ranks", [(0, 2), (0, 1, 3), (0, 1, 2, 3, 4)])
def test_the_maximum_of_a_group_takes_a_logarithm_of_messages_of_each_member(ranks):
    class Tagged(Thread):
        def sendrecv(self, send, receive, tag=0):
            super().sendrecv(send, receive)

    fabric = Fabric(range(5))

    def work(comm):
        return Subgroup(comm, ranks).maximum([comm.me, -comm.me, 2**62]) if comm.me in ranks else None

    expected = [max(ranks), -min(ranks), 2**62]
    assert fabric.run(work, Tagged) == [expected if rank in ranks else None for rank in range(5)]
    messages = math.ceil(math.log2(len(ranks)))
    assert fabric.messages_by_process() == [messages if rank in ranks else 0 for rank in range(5)]


def test_a_group_of_one_has_nothing_to_send_and_still_hears_of_failures():
    asked = []

    class Alone(Thread):
        def sendrecv(self, send, receive, tag=0):
            asked.append((list(send), list(receive)))

    assert Subgroup(Alone(Fabric([0, 1]), 0), (0,)).maximum([7]) == [7]
    assert asked == [([], [])]
