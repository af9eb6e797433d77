"""One worker of test_shared_memory.py: ``memory_worker.py WHAT [ARGUMENT]``; all make the same sums."""

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

SPAN = SlotSpan(0, 50_001, torch.float32)
CLONE_NEWUTS = 0x04000000
NOBODY = 65534


def plain():
    return {}


def limited(rank, size_bytes="4096"):
    """The kernel refuses this worker every file that is larger."""
    if int(rank) in comm.local_ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size_bytes), int(size_bytes)))
    return {}


def bounded(shared_bytes):
    return {"shared_bytes": int(shared_bytes)}


def barred(rank):
    """The kernel does not let this worker open the memory of the others."""
    if int(rank) in comm.local_ranks:
        opened = shared.open_segment

        def open_as_nobody(*args, **kwargs):
            os.seteuid(NOBODY)  # for no longer: Open MPI reads the memory of others, too
            try:
                return opened(*args, **kwargs)
            finally:
                os.seteuid(0)

        shared.open_segment = open_as_nobody
    return {}


def elsewhere(*ranks):
    """These one or two workers are on a host of another name; what else is amiss may follow."""
    if {str(rank) for rank in comm.local_ranks} & set(ranks[:2]):
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname("another")
    return limited(*ranks[ranks.index("limited") + 1 :]) if "limited" in ranks else {}


def waits():
    """The sums are made, and then nothing happens."""
    sum_all({})
    print("says", comm.local_ranks[0], os.getpid(), flush=True)
    signal.pause()


def sum_all(arguments):
    members = comm.members
    owners = {n: members[n * len(members) // 5] for n in range(5)}
    lines, digests = [], {}
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
        lines.append(" ".join(["says", str(comm.local_ranks[0]), order, type(add._taken).__name__, state, *said]))
    other = add(SPAN, owners, order="fold")  # another order than this sum was made for
    assert hashlib.sha256(other.numpy().tobytes()).hexdigest() == digests["fold"]
    print("\n".join(lines), flush=True)


kept = []
comm = connect("ulfm")
if sys.argv[1] == "waits":
    waits()
sum_all(globals()[sys.argv[1]](*sys.argv[2:]))
comm.agree(True)
os._exit(0)
