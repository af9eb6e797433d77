"""One worker of test_shared_memory.py: ``memory_worker.py waits|SCENE...``; all make the same sums in every scene."""

import contextlib
import ctypes
import hashlib
import os
import resource
import signal
import socket
import sys
import warnings

import torch

from holdfast.comm import OrderedAllReduce, SlotSpan, connect
from holdfast.comm.allreduce import shm as shared
from holdfast.comm.memory import host_id

SPAN = SlotSpan(0, 50_001, torch.float32)
CLONE_NEWUTS = 0x04000000
NOBODY = 65534


@contextlib.contextmanager
def plain():
    yield {}


@contextlib.contextmanager
def limited(rank, size_bytes="4096"):
    """The kernel refuses this worker every file that is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(rank) in comm.local_ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size_bytes), before[1]))
    yield {}
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def bounded(shared_bytes):
    yield {"shared_bytes": int(shared_bytes)}


@contextlib.contextmanager
def barred(rank):
    """The kernel does not let this worker open the memory of the others."""
    opened = shared.open_segment

    def open_as_nobody(*args, **kwargs):
        os.seteuid(NOBODY)  # for no longer: Open MPI reads the memory of others, too
        try:
            return opened(*args, **kwargs)
        finally:
            os.seteuid(0)

    if int(rank) in comm.local_ranks:
        shared.open_segment = open_as_nobody
    yield {}
    shared.open_segment = opened


@contextlib.contextmanager
def elsewhere(*ranks):
    """These one or two workers are on a host of another name; what else is amiss may follow."""
    name = socket.gethostname()
    if {str(rank) for rank in comm.local_ranks} & set(ranks[:2]):
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname("another")
        host_id.cache_clear()
    with limited(*ranks[ranks.index("limited") + 1 :]) if "limited" in ranks else plain():
        yield {}
    if socket.gethostname() != name:
        socket.sethostname(name)
        host_id.cache_clear()


def waits():
    """The sums are made, and then nothing happens."""
    kept = sum_all("plain")
    print("says", comm.local_ranks[0], os.getpid(), flush=True)
    signal.pause()
    del kept


def sum_all(scene):
    """Print of each order of adding in a scene, such as ``limited:0``, what was done, and with what result; return what holds the memory."""
    name, *words = scene.split(":")
    with globals()[name](*words) as arguments:
        kept = sums_in(scene, arguments)
        comm.agree(True)
    return kept


def sums_in(scene, arguments):
    members = comm.members
    owners = {n: members[n * len(members) // 5] for n in range(5)}
    lines, digests, kept = [], {}, []
    for order in ("fold", "tree"):
        add = OrderedAllReduce(comm, order, SPAN.end, **arguments)
        kept.append(add)
        for row, n in enumerate(n for n, rank in owners.items() if rank in comm.local_ranks):
            SPAN.of(add.room(row)).copy_(torch.randn(50_001, generator=torch.Generator().manual_seed(n)) * 10.0**n)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = add(SPAN, owners)
        state = hashlib.sha256(result.numpy().tobytes()).hexdigest()
        said = [str(w.message).partition("slower: ")[2].replace(" ", "_") for w in warned] or ["silently"]
        digests[order] = state
        lines.append(
            " ".join(["says", scene, str(comm.local_ranks[0]), order, type(add._taken).__name__, state, *said])
        )
    other = add(SPAN, owners, order="fold")  # another order than this sum was made for
    assert hashlib.sha256(other.numpy().tobytes()).hexdigest() == digests["fold"]
    print("\n".join(lines), flush=True)
    return kept


comm = connect("ulfm")
if sys.argv[1] == "waits":
    waits()
for each in sys.argv[1:]:
    sum_all(each)
os._exit(0)
