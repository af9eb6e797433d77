"""Collectives among some workers of the world, built from messages on the world's communicator.

A subgroup has no communicator of its own, so there is only one to revoke and one to shrink, whichever group a worker
waits in. A worker in several groups must call their collectives in the same order as the other members of these groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from holdfast.comm.base import Collectives, Placed
from holdfast.comm.dissemination import dissemination_rounds


class TaggedCollectives(Collectives, Protocol):
    """Collectives whose messages have tags."""

    def sendrecv(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        """Exchange tensors; see :meth:`Communicator.sendrecv`."""


class Subgroup:
    """Some workers of the world; see :class:`~holdfast.comm.base.Collectives`. Only its members create and call it.

    Args:
        world: Carries the messages; all its members have completed a collective in this generation before.
        ranks: The initial members; failed ones are removed.
        tag: Separates its messages from others, for groups that are not called in the same order on every rank.
    """

    def __init__(self, world: TaggedCollectives, ranks: Sequence[int], tag: int = 0) -> None:
        self._world = world
        self._ranks = frozenset(ranks)
        self._tag = tag

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the group that were alive at the world's last shrink, ascending."""
        return self._of(self._world.members)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Members that run in this process."""
        return self._of(self._world.local_ranks)

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The members in each process, without processes that have none."""
        return tuple(ranks for ranks in map(self._of, self._world.processes) if ranks)

    @property
    def num_processes(self) -> int:
        """Number of processes of the world: several groups may run the same operation at the same time."""
        return self._world.num_processes

    @property
    def generation(self) -> int:
        return self._world.generation

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        self._exchange(list(send), out)

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        self._exchange([part] * len(out), out)

    def _exchange(self, gives: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        me = self.processes.index(self.local_ranks)
        out[me].copy_(gives[me])
        peers = [i for i in range(len(out)) if i != me]
        self.sendrecv([(i, gives[i]) for i in peers], [(i, out[i]) for i in peers])

    def sendrecv(self, send: Placed, receive: Placed) -> None:
        places = [i for i, ranks in enumerate(self._world.processes) if self._of(ranks)]
        gives, takes = ([(places[i], data) for i, data in side] for side in (send, receive))
        self._world.sendrecv(gives, takes, tag=self._tag)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each integer, by log2(n) rounds of messages."""
        count, place = len(self.processes), self.processes.index(self.local_ranks)
        largest = torch.from_numpy(np.array(values, dtype=np.int64))
        peer_values = torch.empty_like(largest)
        for to, source in dissemination_rounds(place, count):
            self.sendrecv([(to, largest)], [(source, peer_values)])
            torch.maximum(largest, peer_values, out=largest)
        if count == 1:
            self.sendrecv([], [])  # there is no peer to wait for, but this raises if a worker has failed
        return largest.tolist()

    def check_failures(self) -> None:
        """Check for failures in the whole world: any worker may have revoked the generation."""
        self._world.check_failures()

    def barrier(self) -> None:
        self.maximum([0])

    def _of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self._ranks)
