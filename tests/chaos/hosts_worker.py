"""One worker of the tests between hosts: ``hosts_worker.py contract|deaths|traffic``, see test_hosts.py and test_hosts_gloo.py."""

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from host_sums import LENGTH, SLICES, expected, sha256, terms_of

from holdfast.comm import OrderedAllReduce, SlotSpan, connect
from holdfast.comm.allreduce import hierarchical
from holdfast.config import Settings
from holdfast.engine.endpoint import endpoint_of
from holdfast.errors import PeerFailed
from holdfast.testing.contract import check_communicator
from holdfast_lab.counting import CountingCommunicator

hierarchical.ROUND_BYTES = 1 << 15  # so that there are several rounds, over fabrics that can have them
SPAN = SlotSpan(0, LENGTH, torch.float32)
POINTS = ("before barrier A", "before its sums", "before its results", "before barrier B", "in barrier B")
"""Where a worker may die in a sum between hosts; the last one, which only the first worker of a host reaches, after all
workers of its host have arrived and before it has told another host."""


class Dying:
    """Ends the process at a point of a sum between hosts."""

    def __init__(self, add, point):
        self.path, self.barriers = add._taken, 0
        self.victim, self.point = comm.local_ranks[0], POINTS[point]
        self.barrier, self.mover = self.path._barrier, self.path._mover
        self.path._barrier = self.pass_barrier
        self.path._mover = self

    def reach(self, point):
        if self.point == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def pass_barrier(self, values=()):
        self.barriers += 1
        if self.barriers == 1:
            self.reach("before barrier A")
        else:
            self.reach("before barrier B")
            self.barrier._between_hosts = lambda largest: self.reach("in barrier B")
        return self.barrier(values)

    def exchange(self, send, receive):
        self.reach("before its sums")
        self.mover.exchange(send, receive)

    def pipeline(self, rounds, add):
        def add_and_reach(number):
            add(number)
            self.reach("before its results")

        self.reach("before its sums")
        self.mover.pipeline(rounds, add_and_reach)

    def gather(self, send, receive):
        self.reach("before its results")
        self.mover.gather(send, receive)


def die(victim):
    if victim in comm.local_ranks:
        os.kill(os.getpid(), signal.SIGKILL)


def owners():
    return {n: comm.members[n * len(comm.members) // SLICES] for n in range(SLICES)}


def fill(add):
    mine = [n for n, rank in owners().items() if rank in comm.local_ranks]
    for row, n in enumerate(mine):
        SPAN.of(add.room(row)).copy_(terms_of(n))


def make_sum(order, counting=None, **arguments):
    add = OrderedAllReduce(counting or comm, order, SPAN.end, **arguments)
    fill(add)
    return add


def report(*words):
    sys.stdout.write(
        " ".join(map(str, ("says", comm.local_ranks[0], *words))) + "\n"
    )  # at once: others write to the same pipe
    sys.stdout.flush()


def taken(add):
    return type(add._taken).__name__


def contract(*victims):
    """All promises, and after each death again; which way sums go, and what they are."""
    check_communicator(comm, die, tuple(map(int, victims)))
    for order in ("fold", "tree"):
        add = make_sum(order)
        state = sha256(add(SPAN, owners()))  # before it is asked which way it took
        report(order, taken(add), state, "in-place" if add.in_place else "copied")


def recover():
    """What the recovery of training does, in short."""
    comm.revoke()
    comm.agree(False)
    while True:
        comm.shrink()
        if comm.agree(True):
            return


def deaths(*plan):
    """A worker dies in a sum, at the n-th of POINTS; the others make the sum again: RANK:N ..."""
    add = make_sum("tree")
    for rank, at in (map(int, entry.split(":")) for entry in plan):
        add(SPAN, owners())
        if rank in comm.local_ranks:
            Dying(add, at)
        failed = False
        try:
            add(SPAN, owners())
        except PeerFailed:
            failed = True
        recover()  # whose agreement lets everybody write its terms again
        fill(add)
        again = add(SPAN, owners())
        report("without", rank, taken(add), torch.equal(again, expected("tree")), "failed" if failed else "completed")


def traffic(order, rounds, victim=-1):
    """Sums, and what they put on the wire of this host; after the death of a worker, if one is given."""
    counting = CountingCommunicator(comm)
    add = make_sum(order, counting)
    if int(victim) >= 0:
        add(SPAN, owners())
        die(int(victim))
        with contextlib.suppress(PeerFailed):
            add(SPAN, owners())
        recover()
        fill(add)
    add(SPAN, owners())  # connections are made, memory is shared
    comm.barrier()
    before, calls = sent_on_wire(), counting.calls.copy()
    for _ in range(int(rounds)):
        add(SPAN, owners())
    comm.barrier()
    per_sum = (sent_on_wire() - before) / int(rounds) / (4 * LENGTH)
    report(taken(add), f"{per_sum:.3f}", *(f"{name}={n}" for name, n in (counting.calls - calls).items()))


def sent_on_wire():
    with open("/proc/net/dev") as table:
        return sum(int(line.split(":")[1].split()[8]) for line in table if line.strip().startswith("eth0"))


settings = Settings.from_env()
# Without what tells a fabric of a death before its own messages do: they are what is tested.
comm = connect(settings.fabric or "ulfm", dataclasses.replace(endpoint_of(settings), end_notes=None, run_dir=""))
{"contract": contract, "deaths": deaths, "traffic": traffic}[sys.argv[1]](*sys.argv[2:])
while not comm.agree(True):
    recover()
sys.stdout.flush()
os._exit(0)
