"""Which workers are up, and which of those are members, in many histories at once.

A worker is up until something that it is part of goes down, and again when a new one waits in its place. A worker that was ready
when members were last admitted is a member, unless it has gone down since: so one number for each is enough, when it is ready, or was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.failures import Outages

Ticks = npt.NDArray[np.int64]
NEVER = np.int64(1 << 62)
"""After everything."""


class Losses(NamedTuple):
    """What outages struck; shape ``(histories,)``.

    Args:
        gone: Workers that were up.
        members: Members that died.
        newcomers: Workers that died while they were being admitted.
    """

    gone: Ticks
    members: Ticks
    newcomers: Ticks


class Fleet(Protocol):
    """Outages one after another, of many histories."""

    def go_down(self, outage: Ticks, now: Ticks, admitted: Ticks, admitting: Ticks) -> Losses:
        """Let one outage of each of some histories begin."""
        ...

    def come_up(self, outage: Ticks, now: Ticks) -> Ticks:
        """Return how many workers wait after one outage of each of some histories."""
        ...


class Calendar:
    """The outages of many histories, one history after another, each ended by one that never comes.

    Args:
        histories: The outages of each.
        spawn: From the end of an outage until a new worker waits, nanoseconds.
    """

    def __init__(self, histories: Sequence[Outages], spawn: int) -> None:
        lengths = np.array([len(one) for one in histories], dtype=np.int64)
        ready = [one.ready(spawn) for one in histories]
        self.begin: Ticks = np.concatenate(([0], np.cumsum(lengths + 1)[:-1]))
        """Where in the arrays each history begins."""
        self.history: Ticks = np.repeat(np.arange(len(histories)), lengths + 1)
        self.start = _ended([one.start for one in histories])
        """When each outage begins, and when a new worker waits after it."""
        self.ready = _ended(ready)
        self.first, self.width = _ended([one.first for one in histories]), _ended([one.width for one in histories])
        order = [np.argsort(one) for one in ready]
        self.by_ready = np.concatenate(
            [np.append(begin + one, begin + len(one)) for begin, one in zip(self.begin, order, strict=True)]
        )
        """Outages in the order in which new workers wait after them."""


class SeparateUnits:
    """Units that are never part of each other: all workers of a unit have the same history.

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
        """Let one outage of each of some histories begin."""
        since, width = self._since[outage], self._width[outage]
        member = since <= admitted
        return Losses(
            np.where(since <= now, width, 0),
            np.where(member, width, 0),
            np.where(~member & (since <= admitting), width, 0),
        )

    def come_up(self, outage: Ticks, now: Ticks) -> Ticks:
        """Return how many workers wait after one outage of each of some histories."""
        return self._comes[outage]


class NestedUnits:
    """Units that are part of each other, or have several outages at once: every worker has a history of its own.

    Args:
        calendar: The outages.
        total: Workers and spares.
    """

    def __init__(self, calendar: Calendar, total: int) -> None:
        self._calendar = calendar
        self._ready_at = np.zeros((len(calendar.begin), total), dtype=np.int64)

    def go_down(self, outage: Ticks, now: Ticks, admitted: Ticks, admitting: Ticks) -> Losses:
        """Let one outage of each of some histories begin."""
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
        """Return how many workers wait after one outage of each of some histories."""
        came = np.zeros(len(outage), dtype=np.int64)
        for some, rows, columns in self._places(outage):
            came[some] = (self._ready_at[rows, columns] == now[some, None]).sum(axis=1)
        return came

    def _places(self, outage: Ticks) -> list[tuple[Ticks, Ticks, Ticks]]:
        """Return, for each width of outages, which have it, and the rows and columns of their workers."""
        widths = self._calendar.width[outage]
        places = []
        for width in np.unique(widths):
            some = np.flatnonzero(widths == width)
            columns = self._calendar.first[outage[some], None] + np.arange(width)
            places.append((some, self._calendar.history[outage[some], None], columns))
        return places


def _ended(columns: Sequence[Ticks]) -> Ticks:
    """Return the columns of all histories, one after another, each with one more entry that never comes."""
    return np.concatenate([np.append(column, NEVER) for column in columns])
