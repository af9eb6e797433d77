"""The contract of every communicator, as checks that raise AssertionError.

All processes of the communicator call :func:`check_communicator` at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from holdfast.comm import (
    Communicator,
    Mailbox,
    MeanDivisor,
    OrderedAllReduce,
    SlotSpan,
    Subgroup,
    device_of,
    make_allreduce,
)
from holdfast.comm.base import Collectives
from holdfast.comm.device import Device
from holdfast.errors import PeerFailed
from holdfast.recovery.messages import Note, Progress

SPAN = SlotSpan(0, 1003, torch.float32)
SECOND = SlotSpan(SPAN.end, 1003, torch.float32)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def check_communicator(comm: Communicator, die: Callable[[int], None], victims: tuple[int, ...]) -> None:
    """Check the collectives among all members, then again after each of ``victims`` has failed.

    Args:
        comm: A communicator of at least ``len(victims) + 1`` workers.
        die: Kills a worker; called on every process, whichever process runs that worker.
        victims: The workers to kill, one after another, none of them twice.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    _check_all(comm)
    for victim in victims:
        check_death(comm, die, victim)
        _check_all(comm)


def _check_all(comm: Communicator) -> None:
    check_collectives(comm)
    check_ordered_sum(comm)
    check_subgroups(comm)
    check_mail(comm)
    if len(comm.processes) > 1 or len(comm.members) > 1:
        _check_post(comm)


def check_collectives(comm: Communicator) -> None:
    """Check that every collective gives the right result among the members."""
    assert comm.members == tuple(sorted(comm.members))
    assert tuple(sorted(r for ranks in comm.processes for r in ranks)) == comm.members
    assert comm.local_ranks in comm.processes
    assert comm.failed() == ()
    for dtype in DTYPES:
        _check_exchange(comm, dtype)
    _check_sendrecv(comm)
    lowest, highest = min(comm.local_ranks), max(comm.local_ranks)
    assert comm.maximum([lowest, -highest, 1 << 62, -(1 << 62)]) == [
        max(ranks[0] for ranks in comm.processes),
        max(-ranks[-1] for ranks in comm.processes),
        1 << 62,
        -(1 << 62),
    ]
    for root in comm.members:
        data = torch.tensor([-0.0, float("nan"), root if root in comm.local_ranks else -1.0])
        comm.broadcast(data, root)
        assert data[2] == root
        assert torch.signbit(data[0]), "a broadcast must keep every bit, including the sign of zero"
        assert data[1].isnan()
    digest = 1 << 61
    progress = comm.share_progress(
        Progress(lowest + 7, computed=lowest % 2 == 0, flags=Note.LEAVE, heard=digest - lowest)
    )
    expected = {
        r: Progress(ranks[0] + 7, ranks[0] % 2 == 0, Note.LEAVE, digest - ranks[0])
        for ranks in comm.processes
        for r in ranks
    }
    assert dict(progress) == expected
    comm.barrier()
    assert comm.agree(True)
    assert not comm.agree(False)
    assert not comm.agree(lowest != comm.members[0]), "agree must be False on all members if any flag is False"


def _check_exchange(comm: Collectives, dtype: torch.dtype) -> None:
    count, me = len(comm.processes), comm.processes.index(comm.local_ranks)
    send = torch.tensor([[10 * me + i, me] for i in range(count)], dtype=dtype)
    before = send.clone()
    out = torch.zeros_like(send)
    comm.alltoall(send, out)
    assert torch.equal(out, torch.tensor([[10 * i + me, i] for i in range(count)], dtype=dtype))
    assert torch.equal(send, before), "alltoall must not modify its input"
    gathered = torch.zeros(count, 3, dtype=dtype)
    comm.allgather(torch.full((3,), me + 1, dtype=dtype), gathered)
    assert torch.equal(gathered, torch.arange(1, count + 1, dtype=dtype)[:, None].expand(count, 3))


def _check_sendrecv(comm: Collectives) -> None:
    """Send two tensors of different sizes to the next process, and one to the one after it: order must be kept."""
    count, me = len(comm.processes), comm.processes.index(comm.local_ranks)
    steps = ((1, 3), (1, 2), (2, 1))
    send = [((me + step) % count, torch.full((size,), 10 * me + i)) for i, (step, size) in enumerate(steps)]
    receive = [((me - step) % count, torch.zeros(size, dtype=torch.int64)) for step, size in steps]
    comm.sendrecv(send, receive)
    for i, (place, taken) in enumerate(receive):
        assert torch.equal(taken, torch.full_like(taken, 10 * place + i)), (
            "sendrecv must deliver the tensor that was sent to this process"
        )
    comm.sendrecv([], [])


def _check_post(comm: Communicator) -> None:
    """Post twice to the next process before any take: messages must arrive in the order of posting."""
    count, me = len(comm.processes), comm.processes.index(comm.local_ranks)
    sizes = (3, 1 << 18)
    for size in sizes:
        comm.post(comm.processes[(me + 1) % count][0], torch.full((size,), 10 * me + size))
    before = comm.processes[(me - 1) % count][0]
    for size in sizes:
        taken = torch.zeros(size, dtype=torch.int64)
        comm.take(before, taken)
        assert torch.equal(taken, torch.full_like(taken, 10 * ((me - 1) % count) + size)), "posts must keep their order"
    comm.barrier()  # a process that ends loses its posted messages
    comm.post(comm.processes[(me + 1) % count][0], torch.zeros(1 << 18))  # never taken, which must block no process


def check_subgroups(comm: Communicator) -> None:
    """Check collectives among some of the members; the other members do not take part, and must not be waited for."""
    members = comm.members
    for ranks in (members[:2], members[1:], members[-1:]):
        if not set(ranks) & set(comm.local_ranks):
            continue
        group = Subgroup(comm, ranks)
        assert group.members == ranks
        for dtype in DTYPES:
            _check_exchange(group, dtype)
        _check_sendrecv(group)
        assert group.maximum([min(group.local_ranks), 7]) == [max(some[0] for some in group.processes), 7]
        group.barrier()
        for shared_bytes in (-1, 0):
            add = OrderedAllReduce(group, "fold", SPAN.end, shared_bytes=shared_bytes)
            terms = {n: torch.randn(1003, generator=torch.Generator().manual_seed(n)) * 10.0**n for n in range(3)}
            owners = {n: ranks[n % len(ranks)] for n in range(3)}
            for _ in range(2):
                assert torch.equal(_sum(group, add, terms, owners), (terms[0] + terms[1]) + terms[2])
            _check_maxima(group, add)


def _check_maxima(comm: Collectives, add: OrderedAllReduce) -> None:
    """Take one maximum after another: no process may write the next numbers while another reads these."""
    lowest, highest = comm.processes[0][0], comm.processes[-1][0]
    for n in range(50):
        assert add.maximum([n + min(comm.local_ranks), n - min(comm.local_ranks)]) == [n + highest, n - lowest]


def check_mail(comm: Communicator) -> None:
    """Check that messages inside a step arrive unchanged, through shared memory and over the communicator."""
    for shared_bytes in (-1, 0, 1 << 20):  # the last one is too small for all messages
        mailbox = Mailbox(comm, shared_bytes=shared_bytes)
        for attempt in range(3):
            mailbox.begin()
            for me in comm.local_ranks:
                for to in comm.members:
                    _send_some(mailbox, me, to, attempt)
            for me in comm.local_ranks:
                for source in comm.members:
                    _receive_some(mailbox, me, source, attempt)
            comm.barrier()  # like a commit vote, before any process begins the next step


def _letters(source: int, to: int, attempt: int) -> list[torch.Tensor]:
    number = 100 * attempt + 10 * source + to
    return [
        torch.full((), number, dtype=torch.int64),
        torch.full((300, 301), number, dtype=torch.float32),
        torch.full((2, 1, 3), number % 2, dtype=torch.bool),
        torch.zeros(0, 5),
        torch.full((1, 1, 1, 1, 1, 1, 1, 70_000), number % 100, dtype=torch.bfloat16),
    ]


def _send_some(mailbox: Mailbox, me: int, to: int, attempt: int) -> None:
    for letter in _letters(me, to, attempt):
        mailbox.send(to, letter, me=me)
        letter.zero_()  # it has been copied


def _receive_some(mailbox: Mailbox, me: int, source: int, attempt: int) -> None:
    for expected in _letters(source, me, attempt):
        letter = mailbox.receive(source, me=me)
        assert letter.dtype == expected.dtype, "a message must keep its dtype"
        assert letter.shape == expected.shape, "a message must keep its shape"
        assert torch.equal(letter, expected), "messages must arrive complete and in order"


def check_ordered_sum(comm: Communicator, device: Device | None = None) -> None:
    """Check that the all-reduce has the bits of plain accumulation in slice order, whichever ranks own the slices.

    The terms are in the memory of ``device``; default: the CPU's.
    """
    device = device or device_of(torch.device("cpu"))
    slices = 5
    terms = {n: torch.randn(1003, generator=torch.Generator().manual_seed(n)) * 10.0**n for n in range(slices)}
    expected = terms[0].clone()
    for n in range(1, slices):
        expected += terms[n]
    tree = ((terms[0] + terms[1]) + (terms[2] + terms[3])) + terms[4]
    assert not torch.equal(expected, tree), "the terms must make the order of additions visible"
    members = comm.members
    for shared_bytes in (-1, 0):  # through shared memory if there is any; by messages
        fold = make_allreduce(comm, "fold", 2 * SPAN.end, device=device, shared_bytes=shared_bytes)
        treelike = make_allreduce(comm, "tree", SPAN.end, device=device, shared_bytes=shared_bytes)
        for owners in (
            {n: members[n * len(members) // slices] for n in range(slices)},
            {n: members[n % len(members)] for n in range(slices)},
            dict.fromkeys(range(slices), members[-1]),
        ):
            assert torch.equal(_sum(comm, fold, terms, owners), expected)
            assert torch.equal(_sum(comm, fold, terms, owners, SECOND), expected), "another span of the same memory"
            assert torch.equal(_sum(comm, fold, terms, owners), expected), "a second all-reduce with the same memory"
            assert torch.equal(_sum(comm, treelike, terms, owners), tree)
            divided = _sum(comm, fold, terms, owners, mean=MeanDivisor(3, 500))
            assert torch.equal(divided, torch.cat([expected[:500] / 3, expected[500:]])), "the mean of a part"
        without = {n: rank for n, rank in owners.items() if n != 2} | {2: -1}
        rest = ((terms[0] + terms[1]) + terms[3]) + terms[4]
        assert torch.equal(_sum(comm, fold, terms, without), rest), "a slice without an owner must be left out"


def _sum(
    comm: Collectives,
    add: OrderedAllReduce,
    terms: Mapping[int, torch.Tensor],
    owners: Mapping[int, int],
    span: SlotSpan = SPAN,
    mean: MeanDivisor | None = None,
) -> torch.Tensor:
    numbers = sorted(n for n, rank in owners.items() if rank in comm.local_ranks)
    add.begin()
    for row, n in enumerate(numbers):
        span.of(add.room(row)).copy_(terms[n])
    result = add(span, owners, mean=mean).clone().cpu()
    comm.barrier()  # no process may write the next terms before all have used these
    for row, n in enumerate(numbers):
        assert torch.equal(span.of(add.room(row)).cpu(), terms[n]), "an all-reduce must not modify its terms"
    return result


def check_death(comm: Communicator, die: Callable[[int], None], victim: int) -> None:
    """Check that all members see a failure, and that the survivors can continue."""
    before, generation = comm.members, comm.generation
    comm.barrier()
    die(victim)
    _expect_failure(comm)
    comm.revoke()
    assert not comm.agree(True), "agree must be False in a group with a failed member"
    comm.shrink()
    assert comm.agree(True)
    assert comm.members == tuple(r for r in before if r != victim)
    assert comm.generation == generation + 1


def _expect_failure(comm: Communicator) -> None:
    try:
        for _ in range(1_000_000):
            comm.maximum([1])
    except PeerFailed:
        return
    raise AssertionError("collectives kept completing with a failed member")
