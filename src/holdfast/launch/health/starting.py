"""Detection of workers that keep a start of the job from beginning. Pure: no clock, process or file.

A worker has arrived once it requests to be connected to the others. Before, it runs imports and the script's
preparations, which may be slow by nature: the limit is the timeout, or three times the slowest arrival so far. A worker
that has not arrived by then is hung if its process is missing, or if another worker has waited that long. A process that
a signal stops is not slow, and is hung after the timeout itself. A worker that has asked to be connected, and is not, is
hung if others are connected and wait: :mod:`holdfast.base.phases`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.base.phases import Phase
from holdfast.launch.health.hangs import StuckWorker
from holdfast.records.beacon import UNCONNECTED
from holdfast.records.texts import named_ranks

_TIMES = 3.0
"""Factor on the slowest arrival so far."""
_STANDSTILL_S = 5.0
"""A launcher that has not checked for this long may have been suspended with the whole machine."""
WARN_AFTER_S = 10.0
"""After this time without an arrival, warn which workers the others wait for."""


@dataclass(frozen=True, slots=True)
class StartupStatus:
    """Observation of a worker, from its beacon; phase "" if unknown yet, and whether a signal stops its process."""

    phase: str = ""
    pulse: int = 0
    beats: int = 0
    waits: bool = False
    is_stopped: bool = False
    doing: str = field(default="", compare=False)
    """What the worker's main thread does, as far as its beacon says: see :mod:`holdfast.records.activity`."""

    @property
    def is_late(self) -> bool:
        """Whether it has not requested to be connected yet."""
        return self.phase in ("", "launch")

    @property
    def is_missing(self) -> bool:
        """Whether others may wait for it: it has not requested to be connected, or is stopped before it trains."""
        return self.is_late or (self.is_stopped and self.phase in ("connect", "start"))

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other workers."""
        return self.waits or self.phase == "connect"


@dataclass(slots=True)
class _Sight:
    """The last observation of a worker; when it was first observed, last made progress, was alive, or was not stopped."""

    sign: StartupStatus
    began_s: float
    moved_s: float
    alive_s: float
    running_s: float


@dataclass(frozen=True, slots=True)
class StartupFinding:
    """Result of a check: workers to give up; why the start is lost without a culprit; a new warning, or ""."""

    stuck: Sequence[StuckWorker] = ()
    lost: str = ""
    warning: str = ""


@dataclass(slots=True)
class StartupMonitor:
    """Checks the workers of this node until all are connected; each has ``timeout_s`` to arrive, 0 for no limit."""

    timeout_s: float
    script: str
    _seen: dict[int, _Sight] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)
    _slowest_s: float = 0.0
    _looked_s: float | None = None
    _quiet_since_s: float = 0.0
    _elsewhere_since_s: float | None = None
    _warned: bool = False
    keeps_waiting: bool = field(default=False, init=False)
    """Whether a worker of this node has waited for others for :data:`WARN_AFTER_S` before the job has begun."""

    def begin(self) -> None:
        """Reset for a start of the job."""
        self._seen.clear()
        self._given_up.clear()
        self._looked_s = self._elsewhere_since_s = None
        self._warned = self.keeps_waiting = False

    @property
    def limit_s(self) -> float:
        """Current limit for a worker to arrive, in seconds; 0: none."""
        return self.timeout_s and max(self.timeout_s, _TIMES * self._slowest_s)

    def poll(
        self, signs: Mapping[int, StartupStatus], now_s: float, *, has_begun: bool = False, elsewhere: bool = False
    ) -> StartupFinding:
        """Check the observations of all live workers of this node; each worker is given up once.

        In a job that ``has_begun``, a worker that is not connected is a newcomer, which no other worker waits for.
        ``elsewhere``: :attr:`keeps_waiting` is true on another node.
        """
        if not self.timeout_s:
            return StartupFinding()
        self._leave_out_standstill(now_s)
        for rank, sign in signs.items():
            self._note(rank, sign, now_s)
        if has_begun:  # else those that have ended count for what the start took
            for ended in self._seen.keys() - signs.keys():
                del self._seen[ended]
        waited_s = 0.0 if has_begun else self._waited_s(signs, now_s, elsewhere=elsewhere)
        unconnected = [rank for rank, sign in signs.items() if not sign.phase or sign.phase in UNCONNECTED]
        late = [rank for rank, sign in signs.items() if sign.is_missing and rank not in self._given_up]
        stuck = [worker for rank in late if (worker := self._stuck(rank, now_s, waited_s)) is not None]
        lost = ""
        is_blamed = bool(late) or not self._given_up.isdisjoint(unconnected)  # or its end is not recorded yet
        if not (has_begun or is_blamed) and self._all_wait(unconnected, now_s):
            if len(unconnected) < len(signs):
                stuck = [self._unconnected(rank, now_s) for rank in unconnected]
            else:
                lost = (
                    f"the workers were not connected within {self.timeout_s:g} s, although all of them had requested it"
                )
        self._given_up.update(worker.rank for worker in stuck)
        warning = "" if waited_s < WARN_AFTER_S and self._are_preparing(unconnected) else self._warning(late, now_s)
        return StartupFinding(stuck, lost, "" if has_begun else warning)

    def _leave_out_standstill(self, now_s: float) -> None:
        """Shift all times by a time in which the launcher was suspended, perhaps with the whole machine."""
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > _STANDSTILL_S:
            for seen in self._seen.values():
                seen.began_s += gap_s
                seen.moved_s += gap_s
                seen.alive_s += gap_s
                seen.running_s += gap_s
            self._quiet_since_s += gap_s
            if self._elsewhere_since_s is not None:
                self._elsewhere_since_s += gap_s

    def _note(self, rank: int, sign: StartupStatus, now_s: float) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            self._seen[rank] = _Sight(sign, now_s, now_s, now_s, now_s)
            self._quiet_since_s = now_s
            return
        before, seen.sign = seen.sign, sign
        if before.pulse != sign.pulse:
            seen.alive_s = now_s
        if not sign.is_stopped:
            seen.running_s = now_s
        if replace(before, pulse=sign.pulse, is_stopped=sign.is_stopped) != sign:
            seen.moved_s = seen.alive_s = self._quiet_since_s = now_s
        if before.is_late and not sign.is_late:
            self._slowest_s = max(self._slowest_s, now_s - seen.began_s)

    def _waited_s(self, signs: Mapping[int, StartupStatus], now_s: float, *, elsewhere: bool) -> float:
        """Return for how long a worker has waited for others, on this node or another."""
        here_s = max((now_s - self._seen[rank].moved_s for rank, s in signs.items() if s.is_waiting), default=0.0)
        self.keeps_waiting = here_s >= WARN_AFTER_S
        if not elsewhere:
            self._elsewhere_since_s = None
            return here_s
        if self._elsewhere_since_s is None:
            self._elsewhere_since_s = now_s - WARN_AFTER_S
        return max(here_s, now_s - self._elsewhere_since_s)

    def _stuck(self, rank: int, now_s: float, waited_s: float) -> StuckWorker | None:
        seen = self._seen[rank]
        if seen.sign.is_stopped:  # it is not slow: what other workers took is no measure
            stopped_s = now_s - seen.running_s
            why = f"is stopped for {stopped_s:.1f} s while the job starts"
            return StuckWorker(rank, stopped_s, why) if stopped_s > self.timeout_s else None
        taken_s, silent_s = now_s - seen.began_s, now_s - seen.alive_s
        # A long import holds the GIL, so a missing pulse alone does not soon show that a process is hung.
        times = 1.0 if not seen.sign.phase else Phase.SILENT_IMPORT.value.times if seen.sign.pulse else math.inf
        if silent_s > times * self.limit_s:
            how = "without a sign of life for" if seen.sign.phase else "for"
            return StuckWorker(rank, silent_s, f"{self._state(seen.sign)} {how} {silent_s:.1f} s while the job starts")
        if taken_s > self.limit_s and waited_s > self.limit_s:
            what = f"{self._state(seen.sign)} {taken_s:.1f} s after its start, and other workers wait for it"
            return StuckWorker(rank, taken_s, f"{what}; if this is expected, raise --start-timeout")
        return None

    def _unconnected(self, rank: int, now_s: float) -> StuckWorker:
        waited_s = now_s - self._seen[rank].moved_s
        return StuckWorker(
            rank, waited_s, f"is not connected {waited_s:.1f} s after it requested it, and the others are"
        )

    def _all_wait(self, unconnected: Sequence[int], now_s: float) -> bool:
        """Return whether there are unconnected workers, and all of them have waited for longer than the timeout."""
        return bool(unconnected) and all(now_s - self._seen[r].moved_s > self.timeout_s for r in unconnected)

    def _are_preparing(self, unconnected: Sequence[int]) -> bool:
        """Return whether all unconnected workers run, so that the script may just be slow."""
        return all(self._seen[r].sign.phase == "launch" and not self._seen[r].sign.is_stopped for r in unconnected)

    def _warning(self, late: Sequence[int], now_s: float) -> str:
        """Return a warning that names the workers the others wait for, once, after a time without changes."""
        blamed = late or [rank for rank, seen in self._seen.items() if seen.sign.phase in UNCONNECTED]
        if self._warned or not blamed or now_s - self._quiet_since_s < WARN_AFTER_S:
            return ""
        self._warned = True
        states: dict[str, list[int]] = {}
        for rank in sorted(blamed):
            states.setdefault(self._state(self._seen[rank].sign), []).append(rank)
        blame = "; ".join(f"{_ranks(ranks)} {state}" for state, ranks in states.items())
        return f"the job has not begun after {now_s - min(s.began_s for s in self._seen.values()):.0f} s: {blame}"

    def _state(self, sign: StartupStatus) -> str:
        if sign.is_stopped:
            return "is stopped"
        if not sign.phase:
            return "has not started"
        if sign.is_late:
            return f"is still importing or preparing in {self.script}"
        return "waits to be connected"


def _ranks(ranks: Sequence[int]) -> str:
    return named_ranks(ranks) if len(ranks) == 1 else f"each of {named_ranks(ranks)}"


CONNECTING = "connect"
"""Phase of a worker that waits to be connected to the others."""


def what_workers_wait_for(signs: Mapping[int, StartupStatus], *, script: str, connecting: str, node: str = "") -> str:
    """Return which workers a job waits for, and what these do: ``"waiting for 2 of 4 workers: importing torch"``.

    Args:
        signs: What is observed of each worker that runs; "" is returned for none.
        script: Name of the script.
        connecting: What workers do while they are connected: ``"MPI_Init"``, for instance.
        node: Words after the number of workers, such as ``" of this node"``.
    """
    for is_behind in (_is_late, _is_connecting, lambda sign: True):
        if behind := {rank: sign for rank, sign in signs.items() if is_behind(sign)}:
            return _sentence(behind, len(signs), lambda sign: _phase(sign, script, connecting), node)
    return ""


def _is_late(sign: StartupStatus) -> bool:
    return sign.is_late or sign.is_stopped


def _is_connecting(sign: StartupStatus) -> bool:
    return sign.phase == CONNECTING


def _sentence(
    behind: Mapping[int, StartupStatus], total: int, phase_of: Callable[[StartupStatus], str], node: str
) -> str:
    phases = Counter(phase_of(behind[rank]) for rank in sorted(behind))
    which = "the worker" if total == 1 else f"{len(behind)} of {total} workers{node}"
    if len(phases) == 1:
        return f"waiting for {which}: {next(iter(phases))}"
    return f"waiting for {which}: {', '.join(f'{phase} ({count})' for phase, count in phases.most_common())}"


def _phase(sign: StartupStatus, script: str, connecting: str) -> str:
    """Return what a worker does before its first step, in a few words."""
    if sign.is_stopped:
        return "stopped by a signal"
    if sign.doing:
        return sign.doing
    match sign.phase:
        case "":
            return "starting"
        case "launch":
            return f"running {script}"
        case "connect":
            return connecting
        case "start":
            return "preparing the first step"
        case "checkpoint":
            return "saving a checkpoint"
        case "gate" | "exit":
            return "ending"
        case _:
            return "the first step"
