"""When to start a new worker in the place of one that died. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass, field

_CALM_S = 60.0
"""After so long without a death the next one counts as the first."""
_FIRST_S = 1.0
_LONGEST_S = 60.0


@dataclass(slots=True)
class Births:
    """Counts deaths, and says when which worker is to be started.

    Args:
        limit: Most workers that are started; then the dead are not replaced any more.
        next_rank: Number of the first.
    """

    limit: int
    next_rank: int
    _planned: list[tuple[float, int]] = field(default_factory=list)
    _in_a_row: int = 0
    _last_s: float = 0.0

    def died(self, now_s: float) -> None:
        """Hear that a worker has died: one more is due, the later the more died shortly before."""
        if self.limit <= 0:
            return
        self.limit -= 1
        self._in_a_row = self._in_a_row + 1 if now_s - self._last_s < _CALM_S else 0
        self._last_s = now_s
        wait_s = 0.0 if self._in_a_row == 0 else min(_LONGEST_S, _FIRST_S * 2 ** (self._in_a_row - 1))
        self._planned.append((now_s + wait_s, self.next_rank))
        self.next_rank += 1

    def ask(self, count: int, now_s: float) -> None:
        """Plan workers that are wanted, though nobody died."""
        self._planned += [(now_s, self.next_rank + i) for i in range(count)]
        self.next_rank += count

    def due(self, now_s: float) -> list[int]:
        """Return who is to be started now; each is named once."""
        ready = [rank for at_s, rank in self._planned if at_s <= now_s]
        self._planned = [(at_s, rank) for at_s, rank in self._planned if at_s > now_s]
        return ready

    def begin_again(self, next_rank: int) -> None:
        """Hear that the whole job is started again: nobody is missing."""
        self._planned.clear()
        self.next_rank = max(self.next_rank, next_rank)
