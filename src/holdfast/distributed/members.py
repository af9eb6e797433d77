"""A group of ranks as the communication thread sees it: its members, their progress, and the memory of its all-reduces."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from holdfast.comm.allreduce.ordered import OrderedAllReduce, SlotSpan
from holdfast.comm.base import Collectives

_LEAST_BYTES = 1 << 16

WORLD = 1
"""Key of the group of all ranks."""


@dataclass(slots=True)
class GroupReducer:
    """All-reduces of vectors of any length, in memory that grows on demand: see :class:`~holdfast.comm.OrderedAllReduce`."""

    comm: Collectives
    shared_bytes: int = -1
    size_bytes: int = 0
    sums: OrderedAllReduce | None = None

    def up_to(self, span: SlotSpan, order: str) -> OrderedAllReduce:
        """Return the all-reduce for vectors that end where ``span`` does; ``ScriptError`` if members' calls differ."""
        size_bytes = span.end
        if self.sums is not None and size_bytes > self.size_bytes:
            self.sums.check_same(span, order)  # before a single rank starts to set up more memory
        if self.sums is None or size_bytes > self.size_bytes:
            self.size_bytes = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
            self.sums = OrderedAllReduce(self.comm, "wide", self.size_bytes, shared_bytes=self.shared_bytes)
        return self.sums

    def result(self, span: SlotSpan) -> torch.Tensor:
        """Return the last result; it is valid until the next all-reduce over the same bytes."""
        assert self.sums is not None, "no all-reduce has been made yet"
        return self.sums.result(span)


@dataclass(slots=True)
class GroupMembers:
    """A group of ranks, as the communication thread sees it.

    Args:
        key: The same number on all members, and different for any other group.
        ranks: Initial global ranks, ascending.
        comm: Collectives among the survivors.
        adder: For collectives whose result is copied to its destination before the next one.
        lender: For DDP's buckets, which lie one after another: DDP reads the results in place, after its backward pass.
        completed: Number of collectives that have ended on this rank, including failed ones.
        broken: A collective of the group timed out; the progress of each rank is no longer known.
        failed: Numbers of collectives that fail on all ranks, including ranks that have not called them yet.
    """

    key: int
    ranks: tuple[int, ...]
    comm: Collectives
    adder: GroupReducer
    lender: GroupReducer
    completed: int = 0
    failed: set[int] = field(default_factory=set)
    broken: bool = False

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that are alive."""
        return self.comm.members

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that have failed."""
        alive = self.comm.members
        return tuple(rank for rank in self.ranks if rank not in alive)
