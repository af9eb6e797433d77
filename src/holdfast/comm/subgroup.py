"""A part of the world: collectives among some of its workers, made of messages on the world's communicator.

No communicator of its own: so there is one to revoke and one to shrink, whichever group somebody waits in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from holdfast.comm.ulfm import UlfmCommunicator


class Subgroup:
    """Some of the world's workers, one process each; see :class:`~holdfast.comm.base.Exchange`.

    Args:
        world: Carries the messages.
        ranks: The group, as it was made; those who die leave it.
        tag: Tells its messages from others.
    """

    def __init__(self, world: UlfmCommunicator, ranks: Sequence[int], tag: int) -> None:
        self._world = world
        self._ranks = tuple(sorted(ranks))
        self._tag = tag

    @property
    def members(self) -> tuple[int, ...]:
        """Those of the group who were alive at the world's last shrink, ascending."""
        alive = self._world.members
        return tuple(rank for rank in self._ranks if rank in alive)

    @property
    def here(self) -> tuple[int, ...]:
        """The one worker that this process is."""
        return self._world.here

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """One process a member."""
        return tuple((rank,) for rank in self.members)

    @property
    def generation(self) -> int:
        """Number of shrinks of the world so far."""
        return self._world.generation

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        """Exchange rows; see :meth:`Exchange.alltoall`."""
        places = {rank: i for i, rank in enumerate(self.members)}
        mine = places.pop(self.here[0])
        out[mine].copy_(send[mine])
        self._world.exchange(
            {rank: send[i] for rank, i in places.items()}, {rank: out[i] for rank, i in places.items()}, self._tag
        )

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Collect rows; see :meth:`Exchange.allgather`."""
        places = {rank: i for i, rank in enumerate(self.members)}
        out[places.pop(self.here[0])].copy_(part)
        self._world.exchange(dict.fromkeys(places, part), {rank: out[i] for rank, i in places.items()}, self._tag)

    def swap(self, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Exchange tensors with some; see :meth:`Exchange.swap`."""
        members = self.members
        self._world.transfer(
            [(members[i], data) for i, data in send], [(members[i], data) for i, data in receive], self._tag
        )

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each integer; see :meth:`Exchange.maximum`."""
        everybodys = torch.empty(len(self.members), len(values), dtype=torch.int64)
        self.allgather(torch.from_numpy(np.array(values, dtype=np.int64)), everybodys)
        return [int(value) for value in everybodys.amax(0)]

    def look(self) -> None:
        """Look for deaths in the whole world: a revoke comes from anywhere."""
        self._world.look()

    def barrier(self) -> None:
        """Return when every member has called it: after log2(n) rounds everybody has heard of everybody."""
        members = self.members
        place, count, step = members.index(self.here[0]), len(members), 1
        word, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        while step < count:
            self._world.exchange(
                {members[(place + step) % count]: word}, {members[(place - step) % count]: heard}, self._tag
            )
            step *= 2
