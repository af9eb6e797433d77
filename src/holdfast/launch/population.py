"""Target number of workers: which to start, and which to ask to leave. Pure: no clock, no process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_CALM_S = 60.0
"""After this time without a death, the next death counts as the first."""
_FIRST_S = 1.0
_LONGEST_S = 60.0
_AT_ONCE = 8
"""Most workers that are started before the launcher does anything else: it has to see signals and requests, too."""


@dataclass(slots=True)
class WorkerPopulation:
    """Counts deaths and schedules new workers: at most ``limit`` replacements of failed ones."""

    limit: int
    next_rank: int
    _planned: list[tuple[float, int]] = field(default_factory=list)
    _dismissed: set[int] = field(default_factory=set)
    _in_a_row: int = 0
    _last_s: float = -math.inf

    def died(self, rank: int, now_s: float) -> None:
        """Record a death: one more worker is due, the later the more died shortly before."""
        if self.limit <= 0 or rank in self._dismissed:
            return
        self.limit -= 1
        self._in_a_row = self._in_a_row + 1 if now_s - self._last_s < _CALM_S else 0
        self._last_s = now_s
        wait_s = 0.0 if self._in_a_row == 0 else min(_LONGEST_S, _FIRST_S * 2 ** (self._in_a_row - 1))
        self._plan(now_s + wait_s)

    def ask(self, count: int, now_s: float) -> None:
        """Schedule additional workers, without a death."""
        for _ in range(count):
            self._plan(now_s)

    def scale(self, there: Sequence[int], wanted: int, now_s: float) -> list[int]:
        """Schedule the missing workers, or return surplus workers to ask to leave: the highest ranks, each returned once.

        ``there`` are the existing workers, including newcomers that wait to be admitted.
        """
        staying = sorted(set(there) - self._dismissed)
        self.ask(wanted - len(staying) - len(self._planned), now_s)
        too_many = len(staying) + len(self._planned) - wanted
        while too_many > 0 and self._planned:
            self._planned.pop()
            too_many -= 1
        leaving = staying[len(staying) - too_many :] if too_many > 0 else []
        self._dismissed.update(leaving)
        return leaving

    def due(self, now_s: float) -> list[int]:
        """Return the ranks to start now, a few of them if there are many; each is returned once."""
        ready = [each for each in self._planned if each[0] <= now_s][:_AT_ONCE]
        self._planned = [each for each in self._planned if each not in ready]
        return [rank for _, rank in ready]

    def begin_again(self, next_rank: int) -> None:
        """Reset for a restart of the job: no worker is missing."""
        self._planned.clear()
        self._dismissed.clear()
        self.next_rank = max(self.next_rank, next_rank)

    def _plan(self, at_s: float) -> None:
        self._planned.append((at_s, self.next_rank))
        self.next_rank += 1
