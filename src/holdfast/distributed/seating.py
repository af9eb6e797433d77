"""Which worker takes which seat, and before which step. Pure: what workers share in a regrouping decides it.

Every worker shares one :class:`SeatRow` in each regrouping, so all know the same table, and :func:`decide` gives the
same decision on all. A worker without a seat is given one of those that are empty; it prepares itself and says that it
is ready. Workers count the *boundaries* between steps that they have passed. At the first boundary that none has passed,
all stop, the newcomer receives the state, and a last regrouping, with all of them at that boundary, seats it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

NEVER = sys.maxsize
"""A boundary that is never reached."""
NO_SEAT = -1


@dataclass(slots=True)
class SeatRow:
    """What one worker shares.

    Args:
        seat: The seat that it holds, or -1.
        offered: The seat that it will take, or -1.
        ready: It has built its objects, and waits for the state.
        passed: Number of boundaries passed. A worker that has stopped at one has not passed it.
        stopped: It has stopped at a boundary, and waits there for newcomers.
        received: The boundary of the state that it has received and not taken over yet, or -1.
        ends: It knows that the script of every seat has ended.
    """

    seat: int = NO_SEAT
    offered: int = NO_SEAT
    ready: bool = False
    passed: int = 0
    stopped: bool = False
    received: int = -1
    ends: bool = False

    def pack(self) -> list[int]:
        """Return the row as integers."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def unpack(cls, values: list[int]) -> SeatRow:
        """Return the row that :meth:`pack` packed."""
        seat, offered, ready, passed, stopped, received, ends = values
        return cls(seat, offered, bool(ready), passed, bool(stopped), received, bool(ends))


@dataclass(frozen=True, slots=True)
class Seating:
    """The decision of a regrouping.

    Args:
        holders: The worker of each seat that is taken.
        seated: The workers that have just taken a seat.
        offered: The seat of each worker that will take one.
        giver: The worker that gives the state; -1 if none has taken it over that is alive.
        awaits: Workers that are ready, and receive the state, ascending.
        join_at: The boundary at which they receive it.
        ends: The script of every seat has ended.
    """

    holders: dict[int, int] = field(default_factory=dict)
    seated: tuple[int, ...] = ()
    offered: dict[int, int] = field(default_factory=dict)
    giver: int = -1
    awaits: tuple[int, ...] = ()
    join_at: int = NEVER
    ends: bool = False

    @property
    def takes_part(self) -> frozenset[int]:
        """The workers that meet at the boundary."""
        return frozenset({*self.holders.values(), *self.awaits})


def decide(rows: Mapping[int, SeatRow], num_seats: int) -> Seating:
    """Return the decision that follows from the rows of all workers."""
    holders = {row.seat: worker for worker, row in rows.items() if row.seat != NO_SEAT}
    before = [rows[worker] for worker in holders.values()]
    offered = {worker: row.offered for worker, row in rows.items() if row.seat == NO_SEAT and row.offered != NO_SEAT}
    boundary = max((row.passed for row in before), default=0) + 1
    all_stopped = bool(before) and all(row.stopped and row.passed == boundary - 1 for row in before)
    seated = tuple(worker for worker in sorted(offered) if all_stopped and rows[worker].received == boundary)
    holders |= {offered.pop(worker): worker for worker in seated}
    empty = sorted(set(range(num_seats)) - holders.keys() - set(offered.values()))
    unoffered = sorted(worker for worker, row in rows.items() if worker not in {*holders.values(), *offered})
    offered |= dict(zip(unoffered, empty, strict=False))
    giver = min((worker for worker in holders.values() if rows[worker].received < 0), default=-1)
    awaits = tuple(worker for worker in sorted(offered) if rows[worker].ready and giver >= 0)
    return Seating(
        holders=holders,
        seated=seated,
        offered=offered,
        giver=giver,
        awaits=awaits,
        join_at=boundary if awaits else NEVER,
        ends=any(row.ends for row in before),
    )
