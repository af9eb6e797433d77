"""Which workers are there and get no further. Pure: no clock, process or file.

Two things are watched from outside. Each worker has a thread that lets its beacon *pulse*: a process that is stopped, or
that keeps Python's lock, has no pulse. And it says where it is: one that computes for much longer than ever before, while
all others wait for it, is taken to be stuck.

No worker is blamed for what takes long by nature: the longest silence, and the longest stretch of computing, that ended by
itself sets the limit; before the first step is committed only the pulse counts; and a script may say that it is busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.records import Position

_TIMES = 3.0
"""So many times what has taken longest so far."""
_WAITING = ("allreduce", "recovery", "gate")
_COMPUTING = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker to be given up.

    Args:
        rank: Which.
        silent_s: For how long it has given no sign.
        reason: In words.
    """

    rank: int
    silent_s: float
    reason: str


@dataclass(slots=True)
class _Sign:
    """Something that changes as long as all is well: what it was last, and since when."""

    value: tuple[object, ...]
    since_s: float


@dataclass(slots=True)
class Hangs:
    """Looks at all workers of a job again and again.

    Args:
        timeout_s: The least time without a sign after which a worker is given up; 0 gives none up.
    """

    timeout_s: float
    _pulses: dict[int, _Sign] = field(default_factory=dict)
    _places: dict[int, _Sign] = field(default_factory=dict)
    _longest_silence_s: float = 0.0
    _longest_stretch_s: float = 0.0
    _looked_s: float | None = None
    _given_up: set[int] = field(default_factory=set)

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

    def look(self, positions: Mapping[int, Position], now_s: float, *, committed: bool) -> list[Stuck]:
        """Return who is to be given up; each is named once.

        Args:
            positions: Of all living workers that have said where they are.
            now_s: The time.
            committed: Whether a step has been committed in this start of the job.
        """
        slept = self._looked_s is not None and now_s - self._looked_s > self.timeout_s / 2
        self._looked_s = now_s
        if not self.timeout_s:
            return []
        if slept:  # it was us who stood still, and perhaps the whole machine
            self._pulses.clear()
            self._places.clear()
        positions = {rank: position for rank, position in positions.items() if rank not in self._given_up}
        found = [stuck for rank, p in positions.items() if (stuck := self._check_pulse(rank, p, now_s)) is not None]
        stretches = {rank: self._stretch_s(rank, position, now_s) for rank, position in positions.items()}
        if committed and not found:
            found = [s for rank in positions if (s := self._check_place(rank, positions, stretches)) is not None]
        self._given_up.update(stuck.rank for stuck in found)
        return found

    def _check_pulse(self, rank: int, position: Position, now_s: float) -> Stuck | None:
        sign = self._pulses.setdefault(rank, _Sign((position.pulse,), now_s))
        silent_s = now_s - sign.since_s
        if sign.value != (position.pulse,):
            self._longest_silence_s = max(self._longest_silence_s, silent_s)
            self._pulses[rank] = _Sign((position.pulse,), now_s)
            return None
        limit_s = max(self.timeout_s, _TIMES * self._longest_silence_s)
        if not position.pulse or position.busy or silent_s <= limit_s:
            return None
        why = "its process is stopped, or something in it keeps Python's lock"
        return Stuck(rank, silent_s, f"no sign of life for {silent_s:.1f} s: {why}")

    def _stretch_s(self, rank: int, position: Position, now_s: float) -> float:
        """Return for how long a worker has been where it is."""
        place = (position.beats, position.phase)
        sign = self._places.setdefault(rank, _Sign(place, now_s))
        stretch_s = now_s - sign.since_s
        if sign.value == place:
            return stretch_s
        if sign.value[1] in _COMPUTING:
            self._longest_stretch_s = max(self._longest_stretch_s, stretch_s)
        self._places[rank] = _Sign(place, now_s)
        return 0.0

    def _check_place(
        self, rank: int, positions: Mapping[int, Position], stretches: Mapping[int, float]
    ) -> Stuck | None:
        position, stretch_s = positions[rank], stretches[rank]
        limit_s = max(self.timeout_s, _TIMES * self._longest_stretch_s)
        if position.phase not in _COMPUTING or position.busy or stretch_s <= limit_s:
            return None
        others = [other for other in positions if other != rank]
        all_wait = all(positions[o].phase in _WAITING and stretches[o] > limit_s for o in others)
        if not others or not all_wait:
            return None
        return Stuck(
            rank,
            stretch_s,
            f"it computes ({position.phase} of step {position.step}) for {stretch_s:.1f} s while all others wait for it; "
            f"the longest so far took {self._longest_stretch_s:.1f} s",
        )
