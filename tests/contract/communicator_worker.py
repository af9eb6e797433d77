"""One worker of the contract tests over a fabric: ``communicator_worker.py contract|building|rebuilding|stranded``."""

import os
import signal
import sys
import time

import torch

from holdfast.comm import connect, groups, links
from holdfast.config import Settings
from holdfast.engine.endpoint import endpoint_of
from holdfast.errors import PeerFailed
from holdfast.testing.contract import check_communicator

REBUILDS = 30
WITHIN_S = 60.0


def die(victim):
    if victim in comm.local_ranks:
        os.kill(os.getpid(), signal.SIGKILL)


def expect_failure(act):
    try:
        act()
    except PeerFailed:
        return
    raise AssertionError("with a dead member it must fail")


def recover():
    comm.revoke()
    comm.agree(False)
    comm.shrink()
    assert comm.agree(True)


def contract():
    """All promises, and again after each of two deaths."""
    check_communicator(comm, die, (0, 2))


def building():
    """Workers die while members connect: the others, some of whom they owe a connection, do not wait for them."""
    assert comm.agree(True)
    if comm.local_ranks == (2,):  # it has told its own address when it asks for those of the others
        links.Links.meet = lambda own, addresses: die(2)
    expect_failure(comm.barrier)
    recover()
    assert comm.maximum([comm.local_ranks[0]]) == [3]
    if comm.local_ranks == (1,):
        groups.AddressExchange.get = lambda meeting, key: die(1)
    expect_failure(lambda: comm.broadcast(torch.zeros(1), 0))
    recover()
    data = torch.tensor([float(comm.local_ranks[0])])
    comm.broadcast(data, 3)
    assert data == 3


def open_things():
    """Threads and file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def give_up_taking(rank):
    """Wait for what that worker never posts, until somebody says that it is dead."""
    look = comm.check_failures
    ends_s = time.monotonic() + 0.01

    def dies():
        if time.monotonic() > ends_s:
            raise PeerFailed("it is dead")

    comm.check_failures = dies
    expect_failure(lambda: comm.take(rank, torch.zeros(1)))
    comm.check_failures = look


def rebuilding():
    """Group after group, given up with a sum, a post and a take that nobody completes, leaves nothing behind."""
    comm.barrier()
    before = open_things()
    for _ in range(REBUILDS):
        comm.barrier()
        if comm.local_ranks == (1,):
            comm._connect_all().allreduce([torch.zeros(1000)])
        comm.post((comm.local_ranks[0] + 1) % 3, torch.zeros(1 << 18))
        give_up_taking((comm.local_ranks[0] + 1) % 3)
        assert comm.agree(True)
        comm.shrink()
    comm.barrier()
    ends_s = time.monotonic() + WITHIN_S
    while any(now > then for now, then in zip(open_things(), before, strict=True)):  # they are ended aside
        assert time.monotonic() < ends_s, f"threads and files were {before}, are {open_things()}"
        time.sleep(0.05)


def lose_store_when_told(key):
    """Lose the store in the moment in which it tells of ``key``, which is not heard any more."""
    store = comm._store
    note = store._note

    def hear(told, value):
        if told == key:
            store._lose("it is gone")
        else:
            note(told, value)

    store._note = hear


def stranded():
    """The store goes in the moment of an agreement: two have heard the outcome, and sum, while the third asks for it."""
    me = comm.local_ranks[0]
    comm.barrier()
    if me == 2:
        lose_store_when_told("g/0/act/1/decision")
    assert comm.agree(me != 1) is False, "one of them had said no"
    if me != 2:
        comm._store._lose("it is gone")
    assert comm.maximum([me, -me]) == [2, 0]
    assert comm.agree(True)
    assert comm.agree(me != 0) is False
    comm.barrier()
    assert comm.agree(True)


settings = Settings.from_env()
comm = connect(settings.fabric, endpoint_of(settings))
{"contract": contract, "building": building, "rebuilding": rebuilding, "stranded": stranded}[sys.argv[1]]()
sys.stdout.write(f"passed {comm.local_ranks[0]} of {comm.members}\n")  # at once: others write to the same pipe
sys.stdout.flush()
os._exit(0)
