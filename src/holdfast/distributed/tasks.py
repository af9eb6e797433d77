"""What the communication thread of the ``torch.distributed`` backend carries out: collectives and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.base import Message
from holdfast.distributed.members import GroupMembers
from holdfast.distributed.parts import Fate
from holdfast.distributed.work import PendingWork
from holdfast.errors import HoldfastError, PeerFailed, RanksLost
from holdfast.recovery.retry import Retry


def nothing() -> None:
    """The ``finish`` of a collective that needs none."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What a rank wants of a collective.

    Args:
        what: Its name, for messages.
        result: The tensors that it writes.
        exchange: Everything that communicates, including a last barrier.
        finish: Copies the result to its destination; local.
        deliver: Copies it there in ``wait`` instead, where a reader of the future uses it in place.
        fate: What becomes of it after a failure.
        root: Rank in the group whose tensor it needs, or that needs its result.
        like: A tensor whose dtype and shape are the same on all ranks.
        inputs: Tensors that a profiler is told of; without any it is told of ``like``, or of the result.
        layout: Layout that the tensors of the result must have.
        is_batch: It only waits for collectives before it, which are compared with those of the other ranks themselves.
    """

    what: str
    result: list[torch.Tensor]
    exchange: Callable[[], None]
    finish: Callable[[], None] = nothing
    deliver: Callable[[], None] | None = None
    fate: Fate = Fate()  # noqa: RUF009 - frozen
    root: int | None = None
    like: torch.Tensor | None = None
    inputs: Sequence[torch.Tensor] = ()
    layout: torch.layout = torch.strided
    is_batch: bool = False

    @property
    def signature(self) -> str:
        """Description that must be the same on all ranks; "" if they need not compare it."""
        if self.is_batch:
            return ""
        tensor = "" if self.like is None else f" {self.like.dtype} {tuple(self.like.shape)}"
        return f"{self.what}{tensor}" + ("" if self.like is None or self.root is None else f" root {self.root}")

    @property
    def profiled(self) -> Sequence[torch.Tensor]:
        """The tensors that a profiler is told of."""
        return self.inputs or (self.result if self.like is None else [self.like])


@dataclass(slots=True)
class Collective:
    """A collective of all members of a group.

    Args:
        call: What this rank wants of it.
        number: How many collectives of the group came before it, once it has begun; other threads read it here, because
            ``group.completed`` may be that of the next one by then.
    """

    group: GroupMembers
    call: CollectiveCall
    work: PendingWork
    begun_s: float = 0.0
    number: int = -1

    @property
    def what(self) -> str:
        """Its name, for messages."""
        return self.call.what

    @property
    def has_failed(self) -> bool:
        """Whether it fails because of ranks that failed in it, or before in one that the script has not seen fail.

        The latter is the usual case: most ranks fail in a sum of DDP, which recovers in silence.
        """
        group = self.group
        if self.call.fate.recovers or not group.failed:
            return False
        is_late = bool(group.dead) and min(group.failed) < group.completed
        return is_late or group.completed in group.failed


@dataclass(slots=True)
class P2PTransfer:
    """A message between two ranks: started immediately, polled until it completes."""

    group: GroupMembers
    what: str
    begin: Callable[[], Message]
    finish: Callable[[], None]
    work: PendingWork
    message: Message | None = None


def ranks_lost(job: Collective | P2PTransfer) -> RanksLost:
    """Return the error of a collective or message that needs ranks which have failed."""
    dead, alive = job.group.dead, job.group.alive
    ranks = f"rank {dead[0]} has" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} have"
    if not dead:
        return RanksLost(f"{job.what} was interrupted by the recovery of another group", dead, alive)
    advice = ""
    if isinstance(job, Collective):
        root = -1 if job.call.root is None else job.group.ranks[job.call.root]
        advice = job.call.fate.advice(dead, root=root)
    return RanksLost(
        f"{job.what} did not complete: {ranks} failed; alive: {', '.join(map(str, alive))}{advice}", dead, alive
    )


def error_after(answer: Retry, job: Collective, failures: int, error: PeerFailed) -> Exception | None:
    """Return why a collective that is not run again has no result; None if it has one."""
    match answer:
        case Retry.UNUSABLE:
            return HoldfastError(f"{job.what} timed out, or failed on another rank")
        case Retry.LOST:
            return ranks_lost(job)
        case Retry.NO_FAILURE:
            return HoldfastError(f"{job.what} failed {failures} times although no rank failed: {error}")
        case _:
            return None
