"""Detection of slow workers (stragglers). Pure: no clock, process or file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from holdfast.records.beacon import BeaconPosition

_STEPS = 20
"""Number of consecutive steps that a worker must be slow before it is called a straggler."""
_NEWS = 0.15
"""Relative change of speeds below which they are not published again."""
_CALM_S = 30.0
"""After a worker was replaced, or slices were reassigned, neither is repeated for this long: the effect must show first,
and on an overloaded machine different workers are slow at different times."""


@dataclass(slots=True)
class StragglerDetector:
    """Compares the workers' times per slice: a straggler takes ``factor`` times (> 1) the median of the others."""

    factor: float
    _slow_since: dict[int, int] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)
    _speeds: dict[int, float] = field(default_factory=dict)
    _replaced: set[int] = field(default_factory=set)
    _acted_s: float = -math.inf

    def begin(self) -> None:
        """Reset for a start of the job."""
        self._slow_since.clear()
        self._named.clear()
        self._speeds.clear()
        self._replaced.clear()

    def scores(self, positions: Mapping[int, BeaconPosition]) -> dict[int, float]:
        """Return each worker's time per slice, relative to the median of the others; 1 is equally fast."""
        taken = {rank: p.compute_s for rank, p in positions.items() if p.compute_s > 0}
        return {
            rank: seconds / median(peers)
            for rank, seconds in taken.items()
            if (peers := [s for other, s in taken.items() if other != rank])
        }

    def poll(self, positions: Mapping[int, BeaconPosition]) -> dict[int, float]:
        """Return the new stragglers, with their scores.

        A reported worker must recover half of its excess before it can be reported again.
        """
        stragglers = {}
        for rank, score in self.scores(positions).items():
            if score < (1 + self.factor) / 2:
                self._named.discard(rank)
            if score < self.factor:
                self._slow_since.pop(rank, None)
                continue
            since = self._slow_since.setdefault(rank, positions[rank].step)
            if positions[rank].step - since >= _STEPS and rank not in self._named:
                self._named.add(rank)
                stragglers[rank] = score
        return stragglers

    def next_to_go(self, positions: Mapping[int, BeaconPosition], now_s: float) -> int | None:
        """Return the worker to replace now: the slowest reported one that is still slow, one in 30 s; or None."""
        slow = {
            rank: score
            for rank, score in self.scores(positions).items()
            if rank in self._named - self._replaced and score >= self.factor
        }
        if not slow or now_s - self._acted_s < _CALM_S:
            return None
        self._acted_s = now_s
        rank = max(slow, key=lambda rank: slow[rank])
        self._replaced.add(rank)
        return rank

    def new_speeds(self, positions: Mapping[int, BeaconPosition], now_s: float) -> dict[int, float] | None:
        """Return the speed of each worker, relative to the median, at most once in 30 s; None if it has not changed."""
        taken = {rank: p.compute_s for rank, p in positions.items() if p.compute_s > 0}
        if not taken or not (self._named or self._speeds) or now_s - self._acted_s < _CALM_S:
            return None
        middle = median(taken.values())
        speeds = {rank: round(middle / seconds, 2) for rank, seconds in taken.items()}
        old = self._speeds
        if all(abs(speed - old.get(rank, 1.0)) < _NEWS * old.get(rank, 1.0) for rank, speed in speeds.items()):
            return None
        self._speeds, self._acted_s = speeds, now_s
        return speeds
