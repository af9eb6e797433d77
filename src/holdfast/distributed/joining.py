"""How a newcomer takes the seat of a failed rank: the part of each worker, on both of its threads.

The script's thread passes the boundaries between steps, in :meth:`Joining.arrive`. The communication thread regroups,
and transfers the state. No lock is on the step's path: the script's thread first says that it passes a boundary, and
then looks whether a regrouping is in progress; the communication thread first announces a regrouping, and then reads
what the script's thread has said. So one of them sees the other, and no rank passes a boundary that others stop at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from holdfast.comm.seated import SeatedCommunicator
from holdfast.comm.subgroup import Subgroup
from holdfast.distributed.seating import NO_SEAT, Seating, SeatRow, decide
from holdfast.errors import HoldfastError

_WIDTH = len(SeatRow().pack())


class Joining:
    """The seat of this worker, or how it gets one.

    Args:
        world: The communicator, whose seats this object sets.
    """

    def __init__(self, world: SeatedCommunicator) -> None:
        self._world = world
        self._me = world.base.local_ranks[0]
        self._row = SeatRow(seat=world.local_ranks[0] if world.local_ranks else NO_SEAT)
        self._news: dict[int, tuple[int, bool]] = {}
        self._settled = threading.Event()
        self._settled.set()
        self.seating = Seating(holders=dict(world.holders))
        self.at = 0
        """Number of the last boundary that this worker has reached."""
        self.is_stopped = False
        self.state: Any = None
        """The state to give, or the state received."""
        self.num_seated = 0
        """Number of newcomers that have taken a seat since this worker holds one."""
        self.has_news = False
        """Whether the last regrouping brought news of newcomers, so that it need not have another cause."""
        self.offered = threading.Event()
        """Set once this worker has a seat, or will never have one."""

    @property
    def is_seated(self) -> bool:
        """Whether this worker holds a seat."""
        return self._row.seat != NO_SEAT

    @property
    def seat(self) -> int:
        """The seat that this worker holds or will take, -1 if none is empty."""
        return max(self._row.seat, self._row.offered)

    @property
    def must_meet(self) -> bool:
        """Whether this worker has stopped at a boundary at which newcomers wait."""
        return self.at >= self.seating.join_at

    @property
    def takes_part(self) -> bool:
        """Whether this worker gives the state, receives it, or waits for those that do."""
        return self._me in self.seating.takes_part

    # -- the script's thread

    def arrive(self, meet: Callable[[], None], timeout_s: float) -> None:
        """Pass the boundary before the next step; if newcomers wait there, call ``meet``, which seats them.

        Raises:
            HoldfastError: if a recovery takes longer than ``timeout_s``.
        """
        self.at += 1
        while not self._settled.is_set() or self.must_meet:
            self.is_stopped = True
            if not self._settled.wait(timeout_s):
                raise HoldfastError(f"a recovery did not end within {timeout_s:g} s")
            if self.must_meet:
                meet()
            self.is_stopped = False

    # -- the communication thread

    def begin(self) -> None:
        """Announce a regrouping."""
        self._settled.clear()

    def share(self) -> dict[int, SeatRow]:
        """Return the rows of all workers; ``PeerFailed`` if that did not complete here."""
        row, base = self._row, self._world.base
        row.stopped = self.is_stopped  # first: the script increments `at` before it stops, so `passed` is never too low
        row.passed = self.at - row.stopped
        whole = torch.empty(len(base.processes), _WIDTH, dtype=torch.int64)
        base.allgather(torch.tensor(row.pack(), dtype=torch.int64), whole)
        return dict(zip(base.members, map(SeatRow.unpack, whole.tolist()), strict=True))

    def settle(self, rows: dict[int, SeatRow]) -> None:
        """Carry out the decision of a regrouping, whose end it is."""
        row = self._row
        self.seating = decide(rows, self._world.first_size)
        offers = {worker: (rows[worker].offered, rows[worker].ready) for worker in self.seating.offered}
        news = {worker: offer for worker, offer in offers.items() if offer != (NO_SEAT, False)}
        self._news, self.has_news = news, news != self._news or bool(self.seating.seated)
        self._world.arrange(self.seating.holders)
        if self._me in self.seating.seated:
            # As the others: it has stopped at this boundary, and passes it if no other newcomer waits there.
            self.at, self.is_stopped, row.seat = row.received, True, row.offered
        row.offered = self.seating.offered.get(self._me, NO_SEAT)
        self.num_seated += len(self.seating.seated)
        if self.seat != NO_SEAT or self.seating.ends:
            self.offered.set()
        self._settled.set()

    def be_ready(self) -> None:
        """Share from now on that this newcomer waits for the state."""
        self._row.ready = True

    def be_at_end(self) -> None:
        """Share from now on that the script of every seat has ended."""
        self._row.ends = True

    def transfer(self) -> None:
        """Give or receive the state, or wait for others that do; ``PeerFailed`` if that did not complete here."""
        from holdfast.state.transfer import receive_part, send_part

        base, seating = self._world.base, self.seating
        if self._me == seating.giver:
            for worker in seating.awaits:
                send_part(base, worker, self.state)
        elif self._me in seating.awaits:
            self.state = receive_part(base, seating.giver)
            self._row.received = seating.join_at
        Subgroup(base, sorted(seating.takes_part)).barrier()

    def pass_on(self) -> None:
        """Leave the boundary at which this newcomer took its seat, with the state."""
        self.is_stopped, self._row.received = False, -1
