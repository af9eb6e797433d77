"""Movers: how workers on several hosts exchange group sums and results. A mover only moves bytes; it adds nothing.

:class:`~holdfast.comm.allreduce.hierarchical.HierarchicalReduce` decides which bytes go where, and in which order they
are added, so the mover cannot change a bit of the result. Barriers do not go through the mover: a failure is found by
the fabric, whichever mover is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from holdfast.comm.base import Collectives, Placed, Round, RoundMessages

Copies = Sequence[tuple[Sequence[int], torch.Tensor]]
"""Contiguous tensors, each with the processes that receive a copy; see :data:`~holdfast.comm.base.Placed`."""


FABRIC = "fabric"
"""The value of ``Settings.between_hosts`` for messages of the fabric."""


class Mover(Protocol):
    """Moves tensors in host memory between processes, as many bytes to each as there are: nothing is padded.

    Methods return when all of ``receive`` has arrived, and raise :class:`~holdfast.errors.PeerFailed` if it will
    not. The n-th tensor from a process matches the n-th that it sends to this one, and has the same size. After a
    failure the contents of ``receive`` are undefined, and may still change.
    """

    def exchange(self, send: Placed, receive: Placed) -> None:
        """Send different tensors to some processes, and receive from some (an all-to-all with uneven parts)."""

    def gather(self, send: Copies, receive: Placed) -> None:
        """Send the same tensor to several processes, and receive theirs (an all-gather with uneven parts)."""

    def abort(self) -> None:
        """End what is still under way, for good. Does not block for long; see each mover for its deadline."""


@runtime_checkable
class RoundMover(Mover, Protocol):
    """A mover that can exchange a vector in rounds."""

    most_rounds: int
    """Maximum number of rounds, the same on every process."""

    def pipeline(self, rounds: Sequence[Round], add: Callable[[int], None]) -> None:
        """Exchange the terms of each round, ``add`` them, and gather results; later rounds are on their way meanwhile.

        Args:
            rounds: Not more than :attr:`most_rounds`.
            add: Called with the number of each round, ascending, once its terms have arrived.
        """


MOST_ROUNDS = 8
"""Rounds in which a vector is exchanged where several can be on their way."""


class FabricMover:
    """Sends messages of the fabric: TCP by Gloo, whatever Open MPI has chosen under ``ulfm``."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self.most_rounds = MOST_ROUNDS if isinstance(comm, RoundMessages) else 1
        """See :attr:`RoundMover.most_rounds`."""

    def exchange(self, send: Placed, receive: Placed) -> None:
        self._comm.sendrecv(send, receive)

    def gather(self, send: Copies, receive: Placed) -> None:
        """See :meth:`Mover.gather`; each copy is a message of its own."""
        self._comm.sendrecv([(place, data) for places, data in send for place in places], receive)

    def pipeline(self, rounds: Sequence[Round], add: Callable[[int], None]) -> None:
        assert isinstance(self._comm, RoundMessages), f"{len(rounds)} rounds"
        self._comm.sendrecv_rounds(rounds, add)

    def abort(self) -> None:
        """Do nothing: the fabric ends its own messages when a generation is revoked."""


MakeMover = Callable[[Collectives, Sequence[int]], Mover]
"""Makes the mover of a generation for its members, given the host of each process; a collective."""


def fabric_mover(comm: Collectives, hosts: Sequence[int]) -> Mover:
    """Make a :class:`FabricMover`."""
    return FabricMover(comm)
