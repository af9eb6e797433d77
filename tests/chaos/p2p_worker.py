"""One worker of test_p2p.py: ``p2p_worker.py ulfm|gloo killed|outside|stopped FOLDER``; ``stopped`` over gloo only."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from holdfast.comm import Mailbox, OrderedAllReduce, Subgroup, connect
from holdfast.comm.allreduce.shm import SharedMemoryReduce
from holdfast.comm.shm_p2p import ShmOutbox
from holdfast.config import Settings
from holdfast.engine.endpoint import endpoint_of
from holdfast.errors import PeerFailed

WITHIN_S = 60.0
STOPPED = 1
NUMBERS = 100_000
POISON = -1.0


def full(value):
    return torch.full((NUMBERS,), float(value))


def ring():
    """Who sends to this worker, and to whom it sends."""
    members, me = comm.members, comm.members.index(comm.local_ranks[0])
    return members[me - 1], members[(me + 1) % len(members)]


def go_round(mail, step):
    """A step: a message around the ring, each worker adds its number before it hands it on."""
    mail.begin()
    before, after = ring()
    mail.send(after, full(1000 * step + comm.local_ranks[0]))
    got = mail.receive(before)
    assert torch.equal(got, full(1000 * step + before)), f"step {step}: {got.unique().tolist()} from {before}"
    comm.barrier()


def recover():
    comm.revoke()
    comm.agree(False)
    comm.shrink()
    assert comm.agree(True)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail(mail, victim):
    """The victim dies between its message and the word that tells of it; all others wait, for it or for each other."""
    mail.begin()
    me, before, after = comm.local_ranks[0], *ring()
    if me == victim:
        ShmOutbox._append = lambda *_: die()
        mail._comm.post = lambda *_: die()
    mail.send(after, full(POISON))  # some of these are never received
    try:
        if before == victim:
            mail.receive(victim)
        mail.receive(before)
        mail.receive(before)  # which nobody sends: only a look at the others can end it
    except PeerFailed:
        return
    raise AssertionError("nobody has sent this")


def killed():
    """Through memory, then by messages: each time one dies in the middle."""
    for shared_bytes, victim in ((-1, 1), (0, 3)):
        mail = Mailbox(comm, shared_bytes=shared_bytes)
        for step in range(3):
            go_round(mail, step)
        assert bool(mail._inboxes) == bool(shared_bytes)
        fail(mail, victim)
        recover()
        for step in range(3, 6):
            go_round(mail, step)


def outside():
    """Two of four wait for each other, by messages and in memory, while one dies who is not of their group."""
    group = Subgroup(comm, (0, 1))
    for victim in (2, 3):
        comm.barrier()
        if comm.local_ranks == (0,):
            add = OrderedAllReduce(group, "fold", 64)
            add.open()
            assert isinstance(add._path, SharedMemoryReduce)
        elif comm.local_ranks == (1,):
            OrderedAllReduce(group, "fold", 64).open()
        comm.barrier()
        if comm.local_ranks == (victim,):
            die()
        if comm.local_ranks == (0,):
            try:
                group.barrier() if victim == 2 else add.maximum([1])
            except PeerFailed:
                appear(f"heard-of-{victim}")
        else:  # nothing that could wake worker 0
            wait_for(f"heard-of-{victim}")
        recover()


def appear(name):
    begun = folder / f"{name}-{os.getpid()}"
    begun.write_text(str(os.getpid()))
    begun.rename(folder / name)  # a reader that waits for it reads it at once


def wait_for(name):
    ends_s = time.monotonic() + WITHIN_S
    while not (folder / name).exists():
        assert time.monotonic() < ends_s, f"{name} never came"
        time.sleep(0.002)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def be_stopped(mail):
    """Stop before the word that tells of a message; once woken, send everybody as much as there was memory for."""
    say = ShmOutbox._append

    def stop(*args):
        ShmOutbox._append = say
        appear("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        say(*args)

    ShmOutbox._append = stop
    for _ in range(20):
        for to in (0, 2):
            mail.send(to, full(POISON))
    appear("written")
    wait_for("seen")
    die()


def stopped():
    """A sender is stopped, taken for dead, and woken when the others have received messages of a later step."""
    mail = Mailbox(comm)
    for step in range(3):
        go_round(mail, step)
    mail.begin()
    appear(f"ready-{comm.local_ranks[0]}")
    if comm.local_ranks == (STOPPED,):
        for rank in comm.members:  # a barrier may have ended here and not yet there
            wait_for(f"ready-{rank}")
        be_stopped(mail)
    wait_for("stopping")
    pid = int((folder / "stopping").read_text())
    lead = comm.local_ranks == (0,)
    if lead:
        while state_of(pid) != "T":
            time.sleep(0.001)
        comm._store.put(f"dead/{STOPPED}", "it is stopped")
    try:
        mail.receive(STOPPED)
    except PeerFailed:
        recover()
    go_round(mail, 3)
    mail.begin()
    before, after = ring()
    mail.send(after, full(before))
    got = mail.receive(before)
    comm.barrier()
    if lead:
        assert state_of(pid) == "T", "it was stopped"
        os.kill(pid, signal.SIGCONT)
    wait_for("written")
    assert torch.equal(got, full(comm.local_ranks[0])), "a message that was received is not written to"
    comm.barrier()
    for step in range(4, 30):
        go_round(mail, step)
    appear("seen")


comm = connect("ulfm") if sys.argv[1] == "ulfm" else connect("gloo", endpoint_of(Settings.from_env()))
folder = Path(sys.argv[3])
{"killed": killed, "outside": outside, "stopped": stopped}[sys.argv[2]]()
comm.agree(True)
sys.stdout.write(f"passed {comm.local_ranks[0]} of {comm.members}\n")
sys.stdout.flush()
os._exit(0)
