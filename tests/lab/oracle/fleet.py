"""Which workers are up, and which of those are members."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_lab.simulate.failures import Outages

NOBODY = -1
"""No member yet: a time before all others."""


class Hit(NamedTuple):
    """What an outage struck.

    Args:
        members: How many of them died.
        newcomers: How many died of those who were about to be let in.
    """

    members: int
    newcomers: int


class Fleet:
    """Workers are up until something that they are part of goes down, and again when a new one waits in their place.

    Whoever was ready when members were last let in is a member, unless it has gone down since: so one number for each worker is
    enough, when it is ready, or was.

    Args:
        total: Workers and spares.
        outages: Who is down and when.
        spawn: From the end of an outage until a new worker waits, nanoseconds.
    """

    def __init__(self, total: int, outages: Outages, spawn: int) -> None:
        self._first, self._width = outages.first.tolist(), outages.width.tolist()
        self.ready: list[int] = outages.ready(spawn).tolist()
        """When a new worker waits, by outage."""
        self._ready_at = [0] * total
        self.available = total
        """How many are up."""
        self.admitted = NOBODY
        """When members were last let in."""
        self.admitting = NOBODY
        """Since when newcomers are being let in."""

    def go_down(self, now: int, outage: int) -> Hit:
        """Let an outage begin."""
        first, ready = self._first[outage], self.ready[outage]
        ready_at, members, newcomers = self._ready_at, 0, 0
        for worker in range(first, first + self._width[outage]):
            since = ready_at[worker]
            self.available -= since <= now
            if since <= self.admitted:
                members += 1
            elif since <= self.admitting:
                newcomers += 1
            ready_at[worker] = max(ready, since)
        return Hit(members, newcomers)

    def come_up(self, now: int, outage: int) -> int:
        """Let new workers wait after an outage, where nothing else holds them down; return how many."""
        first = self._first[outage]
        came = self._ready_at[first : first + self._width[outage]].count(now)
        self.available += came
        return came
