"""What the communication thread of the ``torch.distributed`` backend carries out: collectives and messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.comm.base import Message
from holdfast.distributed.members import GroupMembers
from holdfast.distributed.work import PendingWork


@dataclass(slots=True)
class Collective:
    """A collective of all members of a group.

    Args:
        exchange: Everything that communicates, including a last barrier.
        finish: Copies the result to its destination; local.
        recovers: It is retried over the survivors after a failure.
        signature: Description that must be the same on all ranks.
    """

    group: GroupMembers
    what: str
    exchange: Callable[[], None]
    finish: Callable[[], None]
    recovers: bool
    work: PendingWork
    signature: str = ""
    begun_s: float = 0.0


@dataclass(slots=True)
class P2PTransfer:
    """A message between two ranks: started immediately, polled until it completes."""

    group: GroupMembers
    what: str
    begin: Callable[[], Message]
    finish: Callable[[], None]
    work: PendingWork
    message: Message | None = None
