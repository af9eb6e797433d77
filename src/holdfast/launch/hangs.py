"""Which workers are there and get no further. Pure: no clock, process or file.

Two things are watched from outside. Each worker has a thread that lets its beacon *pulse*: a process that is stopped, or
that keeps Python's lock, has no pulse. And each says where it is, and whether it waits for others: one that stands still
and waits for nobody, while somebody waits, is taken to be stuck.

No worker is blamed for what takes long by nature. What has taken longest so far and ended by itself raises the limit; it is
higher until a worker has applied its first step (loading a library keeps Python's lock, too), in recovery and for
checkpoints, where there is nothing to compare with. Nothing is said of one that is outside training, or says that it is
busy. Where nobody waits, as when all evaluate, nobody is held up: then only the pulse counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.records.beacon import UNCONNECTED, Position

_TIMES = 3.0
"""So many times what has taken longest so far; and so much longer may a worker be without a pulse in its first step."""
_NEW_TIMES = 10.0
"""So many times the limit for the first step of a worker, which may compile, and load data; and for a pulse before it."""
_LOOKS_WITHIN_S = 0.1
"""A launcher that has not looked for so long, or for half the timeout, may have stood still with the whole machine."""
_IN_STEP = ("forward", "backward", "allreduce", "optimizer")
_PHASE_TIMES = dict.fromkeys(_IN_STEP, 1.0) | {"recovery": 10.0, "gate": 10.0, "checkpoint": 30.0}
"""So many times the limit in each phase of training: state may be loaded, and storage be slow."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker to be given up, which has given no sign for ``silent_s`` seconds."""

    rank: int
    silent_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Sight:
    """Where a worker was seen, and since when it has given no other sign."""

    position: Position
    since_s: float


@dataclass(slots=True)
class Hangs:
    """Looks at all workers of a job again and again; none is given up before ``timeout_s`` without a sign, or if it is 0."""

    timeout_s: float
    _pulses: dict[int, _Sight] = field(default_factory=dict)
    _places: dict[int, _Sight] = field(default_factory=dict)
    _longest_silence_s: float = 0.0
    _longest_stretch_s: float = 0.0
    _looked_s: float | None = None
    _given_up: set[int] = field(default_factory=set)
    keep_us_waiting: bool = field(default=False, init=False)
    """Whether somebody of this node has waited so long that, as far as this node knows, who computes is stuck."""

    def begin(self) -> None:
        """Hear that the job is started anew."""
        self._pulses.clear()
        self._places.clear()
        self._given_up.clear()
        self._looked_s = None

    @property
    def look_every_s(self) -> float:
        """How often to look."""
        return self.timeout_s / 10

    def look(self, positions: Mapping[int, Position], now_s: float, *, elsewhere: bool = False) -> list[Stuck]:
        """Return which workers of this node, of those that have said where they are, are to be given up; each is named once.

        ``elsewhere``: a worker on another node is kept waiting.
        """
        if not self.timeout_s:
            return []
        if self._looked_s is not None and now_s - self._looked_s > max(self.timeout_s / 2, _LOOKS_WITHIN_S):
            self._pulses.clear()  # it was us who stood still, and perhaps the whole machine
            self._places.clear()
        self._looked_s = now_s
        watched = {rank: position for rank, position in positions.items() if rank not in self._given_up}
        stretches = {rank: self._stretch_s(rank, position, now_s) for rank, position in watched.items()}
        silent = [stuck for rank, p in watched.items() if (stuck := self._check_pulse(rank, p, now_s)) is not None]
        longest_s = self._longest_wait_s(watched, stretches)
        self.keep_us_waiting = longest_s > max(self.timeout_s, _TIMES * self._longest_stretch_s)
        if elsewhere:
            longest_s = math.inf
        found = silent or [s for r, p in watched.items() if (s := self._check_place(r, p, stretches[r], longest_s))]
        self._given_up.update(stuck.rank for stuck in found)
        return found

    def _check_pulse(self, rank: int, position: Position, now_s: float) -> Stuck | None:
        seen = self._pulses.setdefault(rank, _Sight(position, now_s))
        silent_s = now_s - seen.since_s
        if position.busy or seen.position.pulse != position.pulse:
            if seen.position.applied and not (position.busy or seen.position.busy):
                self._longest_silence_s = max(self._longest_silence_s, silent_s)
            self._pulses[rank] = _Sight(position, now_s)
            return None
        times = _NEW_TIMES if position.phase == "start" else 1.0 if position.applied else _TIMES
        limit_s = times * max(self.timeout_s, _TIMES * self._longest_silence_s)
        if not position.pulse or position.phase in UNCONNECTED or silent_s <= limit_s:
            return None
        why = "its process is stopped, or something in it keeps Python's lock"
        return Stuck(rank, silent_s, f"no sign of life for {silent_s:.1f} s: {why}")

    def _stretch_s(self, rank: int, position: Position, now_s: float) -> float:
        """Return for how long a worker has stood still, or waited."""
        seen = self._places.setdefault(rank, _Sight(position, now_s))
        before, stretch_s = seen.position, now_s - seen.since_s
        if (before.beats, before.waits, before.busy) == (position.beats, position.waits, position.busy):
            return stretch_s
        if before.phase in _IN_STEP and before.applied and not (before.waits or before.busy):
            self._longest_stretch_s = max(self._longest_stretch_s, stretch_s)
        self._places[rank] = _Sight(position, now_s)
        return 0.0

    def _limit_s(self, position: Position) -> float:
        times = max(_PHASE_TIMES[position.phase], 1.0 if position.applied else _NEW_TIMES)
        return times * max(self.timeout_s, _TIMES * self._longest_stretch_s)

    @staticmethod
    def _longest_wait_s(positions: Mapping[int, Position], stretches: Mapping[int, float]) -> float:
        """Return for how long somebody has waited in training."""
        waits = (stretches[r] for r, p in positions.items() if p.waits and p.phase in _PHASE_TIMES)
        return max(waits, default=0.0)

    def _check_place(self, rank: int, position: Position, stretch_s: float, longest_wait_s: float) -> Stuck | None:
        if position.phase not in _PHASE_TIMES or position.waits or position.busy:
            return None
        limit_s = self._limit_s(position)
        if stretch_s <= limit_s or longest_wait_s <= limit_s:
            return None
        why = (
            f"no progress for {stretch_s:.1f} s in {position.phase} of step {position.step}, while others wait for it; the "
            f"longest so far took {self._longest_stretch_s:.1f} s. If it was right to take so long: with session.busy()"
        )
        return Stuck(rank, stretch_s, why)
