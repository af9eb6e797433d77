"""The ranks of the ``torch.distributed`` backend as seats: a seat keeps its number while another worker takes it.

A job has as many seats as ranks at its start. Workers that hold no seat, such as spares, take part in agreements and
shrinks, but not in collectives. While there are such workers, collectives are made of messages between the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holdfast.comm.base import Collectives, Message, MessageCommunicator, Placed
from holdfast.comm.subgroup import Subgroup


class SeatedCommunicator:
    """Collectives among the workers that hold a seat; :class:`~holdfast.comm.base.Collectives`, by seat.

    Args:
        base: The communicator of all workers, by worker. Its owner calls this object, too.
        holders: The workers that hold the seats at the start, in the order of seats.
    """

    def __init__(self, base: MessageCommunicator, holders: Sequence[int]) -> None:
        self.base = base
        self.first_size = len(holders)
        self._arrange(dict(enumerate(holders)))

    def arrange(self, holders: Mapping[int, int]) -> None:
        """Set the worker of each seat, right after a regrouping and the same on all workers."""
        if dict(holders) != self.holders:
            self._arrange(dict(holders))

    # -- membership

    def shrink(self) -> None:
        """Start a new generation; workers that wait to join are admitted, without a seat."""
        self.base.shrink(admits=0)
        self._arrange(self.holders)

    def _arrange(self, holders: dict[int, int]) -> None:
        """Compute what depends on the members."""
        alive = self.base.members
        self.holders = {seat: worker for seat, worker in sorted(holders.items()) if worker in alive}
        """The worker of each seat that is taken."""
        self.members = tuple(self.holders)
        self.processes = tuple((seat,) for seat in self.members)
        self.local_ranks = tuple(seat for seat, worker in self.holders.items() if worker in self.base.local_ranks)
        workers = list(self.holders.values())
        self._places = [alive.index(worker) for worker in workers]
        self._among: Collectives = self.base if len(workers) == len(alive) else Subgroup(self.base, workers)
        order = sorted(workers)
        self._rows = [order.index(worker) for worker in workers]
        """Row of each seat in collectives of ``_among``, which orders rows by worker."""
        self._is_by_seat = workers == order

    @property
    def unseated(self) -> tuple[int, ...]:
        """The workers that hold no seat, ascending."""
        return tuple(worker for worker in self.base.members if worker not in self.holders.values())

    @property
    def num_processes(self) -> int:
        """Number of workers, including those without a seat."""
        return self.base.num_processes

    @property
    def generation(self) -> int:
        return self.base.generation

    # -- collectives

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        if self._is_by_seat:
            self._among.alltoall(send, out)
            return
        ordered, received = torch.empty_like(send), torch.empty_like(out)
        ordered[self._rows] = send
        self._among.alltoall(ordered, received)
        out.copy_(received[self._rows])

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        if self._is_by_seat:
            self._among.allgather(part, out)
            return
        received = torch.empty_like(out)
        self._among.allgather(part, received)
        out.copy_(received[self._rows])

    def sendrecv(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        gives, takes = ([(self._places[place], data) for place, data in side] for side in (send, receive))
        self.base.sendrecv(gives, takes, tag)

    def maximum(self, values: Sequence[int]) -> list[int]:
        return self._among.maximum(values)

    def barrier(self) -> None:
        self._among.barrier()

    def check_failures(self) -> None:
        self.base.check_failures()

    # -- messages

    def start_send(self, data: torch.Tensor, seat: int, tag: int) -> Message:
        return self.base.start_send(data, self.holders[seat], tag)

    def start_receive(self, data: torch.Tensor, seat: int | None, tag: int) -> Message:
        return self.base.start_receive(data, None if seat is None else self.holders[seat], tag)

    def test(self, message: Message) -> int | None:
        source = self.base.test(message)
        if source is None or source < 0:
            return source
        return next(seat for seat, worker in self.holders.items() if worker == source)
