"""Detection of hung workers. Pure: no clock, process or file.

Two signals are observed from outside. A thread of each worker makes its beacon *pulse*: a process that is stopped, or
that holds the GIL, has no pulse. And each worker publishes its position, and whether it waits for other workers: a
worker that makes no progress and does not wait, while another worker waits, is considered hung.

Operations that are slow by nature are not hangs. The longest one observed that ended without intervention raises the
limit; the limit is higher until a worker has applied its first step (loading a library holds the GIL, too), and outside
steps, where no earlier duration is comparable: :mod:`holdfast.base.phases`. Workers that are marked busy are ignored. If no
worker waits, as when all evaluate, only the pulse counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.base.phases import FIRST_STEP_TIMES, Phase, times_of
from holdfast.records.beacon import UNCONNECTED, BeaconPosition

_TIMES = 3.0
"""Factor on the longest duration observed, and on the limit of the pulse in a worker's first step."""
_LOOKS_WITHIN_S = 0.1
"""A launcher that has not checked for this long, or half the timeout, may have been suspended with the machine."""
_IN_STEP = Phase.TRAINING.value.beacon
_PHASE_TIMES = times_of("--hang-timeout")
"""Factor on the limit in each phase: loading state and writing to storage may be slow."""
_LOADING = Phase.LOADING.value.beacon
"""A newcomer waits in this phase, too, while the others train, and no other worker keeps it waiting."""
_OUTSIDE = (*_LOADING, *Phase.SCRIPT.value.beacon)

_EXITING = Phase.FINALIZING.value.beacon
_UNEVEN = (*_LOADING, *_EXITING)
"""Phases in which libraries may hold the GIL for long, as they load or free what they hold. The script's own code between
two loops is not among them: a stopped process is found there as soon as in a step."""


@dataclass(frozen=True, slots=True)
class StuckWorker:
    """A worker to kill, which has been silent or without progress for ``silent_s`` seconds."""

    rank: int
    silent_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Sight:
    """The last change of a worker's position, and its time."""

    position: BeaconPosition
    since_s: float


@dataclass(slots=True)
class HangDetector:
    """Checks all workers of a job periodically; reports none before ``timeout_s`` of silence, and none at all if it is 0."""

    timeout_s: float
    _pulses: dict[int, _Sight] = field(default_factory=dict)
    _workers: dict[int, _Sight] = field(default_factory=dict)
    _longest_silence_s: float = 0.0
    _longest_segment_s: float = 0.0
    _looked_s: float | None = None
    _elsewhere_since_s: float | None = None
    _given_up: set[int] = field(default_factory=set)
    keep_us_waiting: bool = field(default=False, init=False)
    """Whether a worker of this node has waited so long that, as far as is known here, others are hung."""
    load_too_long: bool = field(default=False, init=False)
    """The same of a worker that has loaded, and waits for others that may still load."""

    def begin(self) -> None:
        """Reset for a start of the job."""
        self._pulses.clear()
        self._workers.clear()
        self._given_up.clear()
        self._looked_s = self._elsewhere_since_s = None

    @property
    def poll_every_s(self) -> float:
        """Interval between checks, in seconds."""
        return self.timeout_s / 10

    def poll(
        self,
        positions: Mapping[int, BeaconPosition],
        now_s: float,
        *,
        newcomers: Collection[int] = (),
        elsewhere: bool = False,
        load_elsewhere: bool = False,
    ) -> list[StuckWorker]:
        """Return the workers of this node to kill, among those that have published a position; each is reported once.

        Args:
            positions: The positions of the workers of this node.
            now_s: Time on the launcher's clock.
            newcomers: Workers that were not admitted yet: that they wait is no reason to kill another one.
            elsewhere: A worker on another node is kept waiting.
            load_elsewhere: A worker on another node has loaded, and is kept waiting by others that may still load.
        """
        if not self.timeout_s:
            return []
        if self._looked_s is not None and now_s - self._looked_s > max(self.timeout_s / 2, _LOOKS_WITHIN_S):
            self._pulses.clear()  # this launcher was suspended, and perhaps the whole machine
            self._workers.clear()
            self._elsewhere_since_s = None
        self._looked_s = now_s
        for sights in (self._pulses, self._workers):
            for ended in sights.keys() - positions.keys():  # each has a copy of its beacon
                del sights[ended]
        watched = {rank: position for rank, position in positions.items() if rank not in self._given_up}
        stretches = {rank: self._segment_s(rank, position, now_s) for rank, position in watched.items()}
        silent = [stuck for rank, p in watched.items() if (stuck := self._check_pulse(rank, p, now_s)) is not None]
        longest_s = self._longest_wait_s(watched, stretches, _PHASE_TIMES.keys() - {*_LOADING})
        members = {rank: position for rank, position in watched.items() if rank not in newcomers}
        loaded_s = self._longest_wait_s(members, stretches, _LOADING)
        limit_s = max(self.timeout_s, _TIMES * self._longest_segment_s)
        self.keep_us_waiting, self.load_too_long = longest_s > limit_s, loaded_s > limit_s
        loading_s = max(longest_s, loaded_s, self._wait_elsewhere_s(now_s, elsewhere or load_elsewhere))
        if elsewhere:
            longest_s = math.inf
        waited = {rank: loading_s if p.phase in _LOADING else longest_s for rank, p in watched.items()}
        hangs = silent or [s for r, p in watched.items() if (s := self._check_worker(r, p, stretches[r], waited[r]))]
        self._given_up.update(stuck.rank for stuck in hangs)
        return hangs

    def _wait_elsewhere_s(self, now_s: float, is_waiting: bool) -> float:
        """Return for how long workers on other nodes have been kept waiting, as far as this launcher has seen it.

        It must last as long as a wait on this node: one that is short is no reason to kill a newcomer that still loads.
        """
        if not is_waiting:
            self._elsewhere_since_s = None
            return 0.0
        if self._elsewhere_since_s is None:
            self._elsewhere_since_s = now_s
        return now_s - self._elsewhere_since_s

    def _check_pulse(self, rank: int, position: BeaconPosition, now_s: float) -> StuckWorker | None:
        seen = self._pulses.setdefault(rank, _Sight(position, now_s))
        silent_s = now_s - seen.since_s
        if position.busy or seen.position.pulse != position.pulse:
            if seen.position.applied and not (position.busy or seen.position.busy):
                self._longest_silence_s = max(self._longest_silence_s, silent_s)
            self._pulses[rank] = _Sight(position, now_s)
            return None
        times = FIRST_STEP_TIMES if position.phase in _UNEVEN else 1.0 if position.applied else _TIMES
        limit_s = times * max(self.timeout_s, _TIMES * self._longest_silence_s)
        if not position.pulse or position.phase in UNCONNECTED or silent_s <= limit_s:
            return None
        why = "its process is stopped, or something in it holds the GIL"
        return StuckWorker(rank, silent_s, f"no heartbeat for {silent_s:.1f} s: {why}")

    def _segment_s(self, rank: int, position: BeaconPosition, now_s: float) -> float:
        """Return for how long a worker has made no progress, or has waited."""
        seen = self._workers.setdefault(rank, _Sight(position, now_s))
        before, stretch_s = seen.position, now_s - seen.since_s
        if (before.beats, before.waits, before.busy) == (position.beats, position.waits, position.busy):
            return stretch_s
        if before.phase in _IN_STEP and before.applied and not (before.waits or before.busy):
            self._longest_segment_s = max(self._longest_segment_s, stretch_s)
        self._workers[rank] = _Sight(position, now_s)
        return 0.0

    def _limit_s(self, position: BeaconPosition) -> float:
        times = max(_PHASE_TIMES[position.phase], 1.0 if position.applied else FIRST_STEP_TIMES)
        longest_s = _TIMES * self._longest_segment_s
        if position.phase in _OUTSIDE:  # the time of a step says nothing about the script's own code
            return max(times * self.timeout_s, longest_s)
        return times * max(self.timeout_s, longest_s)

    @staticmethod
    def _longest_wait_s(
        positions: Mapping[int, BeaconPosition], stretches: Mapping[int, float], phases: Collection[str]
    ) -> float:
        """Return the longest time that a worker has waited in some phases."""
        waits = (stretches[r] for r, p in positions.items() if p.waits and not p.is_patient and p.phase in phases)
        return max(waits, default=0.0)

    def _check_worker(
        self, rank: int, position: BeaconPosition, stretch_s: float, longest_wait_s: float
    ) -> StuckWorker | None:
        if position.phase not in _PHASE_TIMES or position.waits or position.busy:
            return None
        limit_s = self._limit_s(position)
        if stretch_s <= limit_s or longest_wait_s <= limit_s:
            return None
        why = f"no progress for {stretch_s:.1f} s {_where(position)}, while other workers wait for it"
        if position.phase in _IN_STEP:
            why += f"; the longest so far took {self._longest_segment_s:.1f} s"
        if position.phase in (*_IN_STEP, *_OUTSIDE, *_EXITING):  # where the script's own code may run
            why += ". If this is expected, use: with session.busy(), or raise --hang-timeout"
        return StuckWorker(rank, stretch_s, why)


def _where(position: BeaconPosition) -> str:
    """Return where a worker is, in words."""
    if position.phase in _LOADING:
        return "while it loads"
    if position.phase in Phase.SCRIPT.value.beacon:
        return "in the script, outside training"
    if position.phase in _EXITING:
        return "in exit handlers, after the script"
    return f"in {position.phase} of step {position.step}" if position.step >= 0 else f"in {position.phase}"
