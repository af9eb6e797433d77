"""One worker of the tests between hosts: ``hosts_worker.py contract|deaths|traffic``, see test_hosts.py and test_hosts_gloo.py."""

import hashlib
import os
import signal
import sys

import torch

from holdfast.comm import OrderedAllReduce, SlotSpan, connect
from holdfast.comm.allreduce import adding
from holdfast.config import Settings
from holdfast.errors import PeerFailed
from holdfast.testing.contract import check_communicator
from holdfast_lab.counting import CountingCommunicator

SLICES, LENGTH = 7, 100_003
SPAN = SlotSpan(0, LENGTH, torch.float32)
POINTS = ("allgather", "swap", "swap", "allgather")
"""What a sum between hosts calls, in this order."""


class Mortal(CountingCommunicator):
    """Ends the process instead of making the collective with a given number; -1: never."""

    def __init__(self, comm):
        super().__init__(comm)
        self.dies_at = -1
        self.made = []

    def _count(self, name, size_bytes):
        super()._count(name, size_bytes)
        if self.dies_at == len(self.made):
            die(self.local_ranks[0])
        self.made.append(name)


def die(victim):
    if victim in comm.local_ranks:
        os.kill(os.getpid(), signal.SIGKILL)


def terms_of(number):
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(number)) * 10.0**number


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


def expected(order):
    out = torch.empty(LENGTH)
    adding.ORDERS[order]([(n, terms_of(n)) for n in range(SLICES)], out)
    return out


def contract(*victims):
    """All promises, and after each death again; which way sums go, and what they are."""
    check_communicator(comm, die, tuple(map(int, victims)))
    for order in ("fold", "tree"):
        add = make_sum(order)
        state = hashlib.sha256(add(SPAN, owners()).numpy().tobytes()).hexdigest()
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
    """A worker dies in a sum, just before its n-th collective; the others make the sum again: RANK:N ..."""
    counting = Mortal(comm)
    add = make_sum("tree", counting)
    for rank, at in (map(int, entry.split(":")) for entry in plan):
        add(SPAN, owners())
        counting.made.clear()
        if rank in comm.local_ranks:
            counting.dies_at = at
        failed = False
        try:
            add(SPAN, owners())
        except PeerFailed:
            failed = True
        recover()  # whose agreement lets everybody write its terms again
        fill(add)
        again = add(SPAN, owners())
        report("without", rank, taken(add), torch.equal(again, expected("tree")), "failed" if failed else "completed")


def traffic(order, rounds):
    """Sums, and what they put on the wire of this host."""
    counting = Mortal(comm)
    add = make_sum(order, counting)
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
at = {"rank": settings.rank, "store": settings.store, "token": settings.token}
comm = connect(settings.fabric or "ulfm", settings.workers, settings.ranks, **at)
{"contract": contract, "deaths": deaths, "traffic": traffic}[sys.argv[1]](*sys.argv[2:])
while not comm.agree(True):
    recover()
sys.stdout.flush()
os._exit(0)
