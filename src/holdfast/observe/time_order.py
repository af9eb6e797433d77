"""Puts the records of several workers into the order of time, while they arrive."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from holdfast.records.types import Record

SETTLED_S = 1.0
"""Records of several workers arrive in any order; after so long, all of a moment are taken to be there."""


class TimeOrder:
    """Records that wait until no older one can arrive any more; of one moment, in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Record]] = []
        self._number = itertools.count()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def add(self, record: Record) -> None:
        """Let a record wait."""
        heapq.heappush(self._waiting, (record.t_s, next(self._number), record))

    def until(self, t_s: float) -> Iterator[Record]:
        """Yield, oldest first, the records that are not newer than this; they do not wait any more."""
        while self._waiting and self._waiting[0][0] <= t_s:
            yield heapq.heappop(self._waiting)[2]
