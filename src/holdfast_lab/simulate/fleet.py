"""Available workers and members of many histories at once.

A worker is up until a unit that contains it goes down, and again when its replacement is ready. A worker that was ready
at the last admission is a member, unless it has gone down since. So one number per worker is enough: when it is or was
ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.failures import Outages

Ticks = npt.NDArray[np.int64]
NEVER = np.int64(1 << 62)
"""Later than every event."""


class Losses(NamedTuple):
    """The workers that an outage hit; shape ``(histories,)``.

    Args:
        gone: Workers that were up.
        members: Members that failed.
        newcomers: Workers that failed while they were being admitted.
    """

    gone: Ticks
    members: Ticks
    newcomers: Ticks


class Fleet(Protocol):
    """Applies the outages of many histories one by one."""

    def go_down(self, outage: Ticks, now: Ticks, admitted: Ticks, admitting: Ticks) -> Losses:
        """Begin one outage in each of some histories."""
        ...

    def come_up(self, outage: Ticks, now: Ticks) -> Ticks:
        """Return the number of workers that are ready after one outage in each of some histories."""
        ...


class Calendar:
    """The outages of many histories, concatenated; each history ends with an outage that never comes.

    Args:
        histories: The outages of each.
        spawn: From the end of an outage until a new worker is ready, nanoseconds.
    """

    def __init__(self, histories: Sequence[Outages], spawn: int) -> None:
        lengths = np.array([len(one) for one in histories], dtype=np.int64)
        ready = [one.ready(spawn) for one in histories]
        self.begin: Ticks = np.concatenate(([0], np.cumsum(lengths + 1)[:-1]))
        """Index at which each history begins in the arrays."""
        self.history: Ticks = np.repeat(np.arange(len(histories)), lengths + 1)
        self.start = _ended([one.start for one in histories])
        """Begin of each outage, and the time at which a new worker is ready after it."""
        self.ready = _ended(ready)
        self.first, self.width = _ended([one.first for one in histories]), _ended([one.width for one in histories])
        order = [np.argsort(one) for one in ready]
        self.by_ready = np.concatenate(
            [np.append(begin + one, begin + len(one)) for begin, one in zip(self.begin, order, strict=True)]
        )
        """Outages in the order in which new workers are ready after them."""


class SeparateUnits:
    """Disjoint units: all workers of a unit have the same history.

    Args:
        calendar: The outages.
    """

    def __init__(self, calendar: Calendar) -> None:
        self._width = calendar.width
        order = np.lexsort((calendar.start, calendar.first, calendar.history))
        first, history = calendar.first[order], calendar.history[order]
        same = (first[1:] == first[:-1]) & (history[1:] == history[:-1])
        start, ready = calendar.start[order], calendar.ready[order]
        since = np.concatenate(([0], np.where(same, ready[:-1], 0)))
        until = np.concatenate((np.where(same, start[1:], NEVER), [NEVER]))
        self._since, self._comes = np.empty_like(since), np.empty_like(since)
        self._since[order] = since
        self._comes[order] = np.where(until > ready, calendar.width[order], 0)

    def go_down(self, outage: Ticks, now: Ticks, admitted: Ticks, admitting: Ticks) -> Losses:
        """Begin one outage in each of some histories."""
        since, width = self._since[outage], self._width[outage]
        member = since <= admitted
        return Losses(
            np.where(since <= now, width, 0),
            np.where(member, width, 0),
            np.where(~member & (since <= admitting), width, 0),
        )

    def come_up(self, outage: Ticks, now: Ticks) -> Ticks:
        """Return the number of workers that are ready after one outage in each of some histories."""
        return self._comes[outage]


class NestedUnits:
    """Nested units, or units with overlapping outages: every worker has its own history.

    Args:
        calendar: The outages.
        total: Workers and spares together.
    """

    def __init__(self, calendar: Calendar, total: int) -> None:
        self._calendar = calendar
        self._ready_at = np.zeros((len(calendar.begin), total), dtype=np.int64)

    def go_down(self, outage: Ticks, now: Ticks, admitted: Ticks, admitting: Ticks) -> Losses:
        """Begin one outage in each of some histories."""
        struck = Losses(*(np.zeros(len(outage), dtype=np.int64) for _ in range(3)))
        for some, rows, columns in self._places(outage):
            since = self._ready_at[rows, columns]
            member = since <= admitted[some, None]
            struck.gone[some] = (since <= now[some, None]).sum(axis=1)
            struck.members[some] = member.sum(axis=1)
            struck.newcomers[some] = (~member & (since <= admitting[some, None])).sum(axis=1)
            ready = self._calendar.ready[outage[some], None]
            self._ready_at[rows, columns] = np.maximum(since, ready)
        return struck

    def come_up(self, outage: Ticks, now: Ticks) -> Ticks:
        """Return the number of workers that are ready after one outage in each of some histories."""
        came = np.zeros(len(outage), dtype=np.int64)
        for some, rows, columns in self._places(outage):
            came[some] = (self._ready_at[rows, columns] == now[some, None]).sum(axis=1)
        return came

    def _places(self, outage: Ticks) -> list[tuple[Ticks, Ticks, Ticks]]:
        """Return, for each width, the outages of that width, and the rows and columns of their workers."""
        widths = self._calendar.width[outage]
        places = []
        for width in np.unique(widths):
            some = np.flatnonzero(widths == width)
            columns = self._calendar.first[outage[some], None] + np.arange(width)
            places.append((some, self._calendar.history[outage[some], None], columns))
        return places


def _ended(columns: Sequence[Ticks]) -> Ticks:
    """Concatenate the columns of all histories, each followed by an entry that never comes."""
    return np.concatenate([np.append(column, NEVER) for column in columns])
