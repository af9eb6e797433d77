"""The lives of a run, and the recoveries in each: a life is the time between two starts of the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

from holdfast.records.types import (
    FailureSeen,
    Finished,
    JobRestarted,
    Left,
    Record,
    Recovered,
    RunStarted,
    ScriptFailed,
    WorkerEnded,
)

R = TypeVar("R", bound=Record)


@dataclass(slots=True, kw_only=True)
class LostWorker:
    """One lost worker.

    Args:
        rank: The lost rank.
        kind: The kind of the injected fault; if none was injected, ``"hang"`` if the launcher ended a worker without
            progress, ``"device"`` if the worker ended itself because its device is lost, ``"exception"`` if the script
            raised, else ``"kill"``.
        step: Step in progress: of the worker if the fault was injected, otherwise of the first survivor that detected
            it; -1 if there is none.
        phase: The phase of that step, "" if unknown.
        t_s: When the fault struck; if none was injected, when the first survivor detected the failure.
        known_s: When the first survivor detected the failure, None if none did.
        ended_s: When its process was seen to end; None if it was not, or if the launcher ended it.
        decided_s: When the last survivor had decided, or when the job was restarted.
        resumed_s: When the next step was committed, None if none was.
        recovery: Number of the recovery from it, counted over the run; workers lost in the same recovery
            share it and its times. None if there was no recovery.
        silent_s: Seconds since the worker's last sign of life when the launcher ended it; None if it did not.
        stack: Its stacks when the launcher ended it; "" if they are not known.
        why: The launcher's reason for ending the worker, or the error of its device; "" if neither is known.
        orders: How often each action of the protocol was carried out in that recovery: the maximum over survivors.
        times_s: The longest time that a survivor took for each action.
    """

    rank: int
    kind: str = "kill"
    step: int
    phase: str = ""
    injected: bool = False
    t_s: float
    known_s: float | None = None
    ended_s: float | None = None
    decided_s: float | None = None
    resumed_s: float | None = None
    recovery: int | None = None
    decision: str | None = None
    redone_steps: int = 0
    lost_samples: int = 0
    silent_s: float | None = None
    why: str = ""
    stack: str = ""
    orders: Mapping[str, int] = field(default_factory=dict)
    times_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def detect_s(self) -> float | None:
        """Seconds from the injected fault to its detection by the first survivor."""
        return self.known_s - self.t_s if self.injected and self.known_s is not None else None

    @property
    def recover_s(self) -> float | None:
        """Seconds from the fault (or from its detection) to the next committed step."""
        return self.resumed_s - self.t_s if self.resumed_s is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedWorker:
    """A worker that joined the running job.

    Args:
        rank: Its rank.
        step: The first step that it took part in.
        t_s: When it began to compute with the other workers.
        held_s: The longest time that it kept another worker from computing.
    """

    rank: int
    step: int
    t_s: float
    held_s: float


@dataclass(slots=True)
class Recovery:
    """One decision of the survivors: what each of them recorded of it, and of the failures that it is about."""

    said: list[Recovered] = field(default_factory=list)
    seen: list[FailureSeen] = field(default_factory=list)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that the survivors found missing."""
        return tuple(sorted({rank for record in self.said for rank in record.lost}))

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks that joined in this recovery."""
        return tuple(sorted({rank for record in self.said for rank in record.joined}))

    @property
    def first_s(self) -> float:
        """When the first survivor had decided."""
        return self.said[0].t_s

    @property
    def last_s(self) -> float:
        """When the last survivor had decided."""
        return self.said[-1].t_s

    @property
    def step(self) -> int:
        """The step at which training resumed."""
        return self.said[0].step

    @property
    def redone_steps(self) -> int:
        """Steps that were recomputed."""
        return max(record.redone_steps for record in self.said)

    @property
    def orders(self) -> dict[str, int]:
        """How often each action of the protocol was carried out: the maximum over survivors."""
        return _largest(record.orders for record in self.said)

    @property
    def times_s(self) -> dict[str, float]:
        """The longest time that a survivor took for each action."""
        return _largest(record.times_s for record in self.said)

    def known_s(self, since_s: float) -> float | None:
        """When the first survivor detected the failure, after ``since_s``."""
        return min((r.t_s for r in (*self.seen, *self.said) if r.t_s >= since_s), default=None)


@dataclass(slots=True, kw_only=True)
class Attendance:
    """Who took part in one start of the job, and how each worker ended, as far as is known."""

    begun_s: dict[int, float] = field(default_factory=dict)
    """When each worker began its last training loop."""
    lost_s: dict[int, float] = field(default_factory=dict)
    """When the others lost a worker."""
    left: set[int] = field(default_factory=set)
    """Workers that left in order."""
    ended: dict[int, WorkerEnded] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    failed: list[ScriptFailed] = field(default_factory=list)

    def note(self, record: Record) -> None:
        """Take a record."""
        match record:
            case RunStarted():
                self.begun_s[record.rank] = record.t_s
            case Recovered():
                for rank in record.lost:
                    self.lost_s.setdefault(rank, record.t_s)
            case Left():
                self.left.add(record.rank)
            case Finished():
                self.finished[record.rank] = record
            case ScriptFailed():
                self.failed.append(record)
            case WorkerEnded():
                self.ended[record.rank] = record

    def at_last_gate(self, *, any_step: bool = False) -> dict[int, Finished]:
        """Return by rank the workers that passed the last gate and lived on.

        A worker that was lost or has left may have passed the gate of an earlier training loop, and so may one that has
        begun another loop. One that ended with 0 was lost only because it had finished.

        Args:
            any_step: Whether the numbers of their steps say nothing, as under ``torch.distributed``.
        """
        codes = {rank: end.exit_code for rank, end in self.ended.items()}
        gone = self.lost_s.keys() | self.left
        last = {
            rank: record
            for rank, record in sorted(self.finished.items())
            if record.t_s >= self.begun_s.get(rank, record.t_s)
            and codes.get(rank, 0) >= 0
            and (rank not in gone or codes.get(rank) == 0)
        }
        step = max((record.step for record in last.values()), default=-1)
        return {rank: record for rank, record in last.items() if any_step or record.step == step}

    @property
    def died_late(self) -> set[int]:
        """Workers that passed the last gate and died before their script ended, while others ended well."""
        codes = {rank: self.ended[rank].exit_code if rank in self.ended else None for rank in self.finished}
        if 0 not in codes.values() or any(record.rank >= 0 for record in self.failed):
            return set()  # the launcher has ended them
        return {rank for rank, code in codes.items() if (code or 0) < 0} - self.lost_s.keys()


class JobLife:
    """One start of the whole job, and everything until the next.

    Args:
        number: Counted from 0.
        workers: Ranks that it was started with.
    """

    def __init__(self, number: int, workers: tuple[int, ...]) -> None:
        self.number, self.workers = number, workers
        self.restart: JobRestarted | None = None
        """The restart that ended it, None for the last life."""
        self.span_s: tuple[float, float] | None = None
        """Times of its first and of its newest record."""
        self.highest = -1
        """The highest step that was committed in it."""
        self.attendance = Attendance()
        self._by_kind: dict[type[Record], list[Record]] = {}
        self._by_generation: dict[int, Recovery] = {}
        self._undecided: dict[int, list[FailureSeen]] = {}  # by survivor, which may detect the next failure before
        # others have decided about this one

    def extend_to(self, t_s: float) -> None:
        """Note the time of a record."""
        self.span_s = (t_s if self.span_s is None else self.span_s[0], t_s)

    def add(self, record: Record) -> None:
        """Take the next record."""
        self._by_kind.setdefault(type(record), []).append(record)
        self.attendance.note(record)
        if isinstance(record, FailureSeen):
            self._undecided.setdefault(record.rank, []).append(record)
        elif isinstance(record, Recovered):
            recovery = self._by_generation.setdefault(record.generation, Recovery())
            recovery.said.append(record)
            recovery.seen += self._undecided.pop(record.rank, ())
            recovery.seen.sort(key=lambda seen: seen.t_s)
        for name in ("members", "recoveries"):
            self.__dict__.pop(name, None)

    def of(self, kind: type[R]) -> Sequence[R]:
        """Return the records of one kind, ordered by time."""
        return cast("Sequence[R]", self._by_kind.get(kind, ()))

    @cached_property
    def members(self) -> set[int]:
        """All workers that took part in training at any time, including spares and newcomers."""
        # Of the ranks that one process plays, only the lowest records its start.
        survived = (rank for record in self.of(Recovered) for rank in record.survivors)
        return {*self.workers, *self.attendance.begun_s, *survived}

    @property
    def joined(self) -> Iterator[JoinedWorker]:
        """Workers that joined the running job, ordered by time."""
        began_s = self.attendance.begun_s
        for recovery in self.recoveries:
            held_s = max(record.held_s for record in recovery.said)
            for rank in recovery.joined:
                yield JoinedWorker(rank=rank, step=recovery.step, t_s=began_s.get(rank, recovery.last_s), held_s=held_s)

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """The decisions of the survivors, ordered by time."""
        return [recovery for _, recovery in sorted(self._by_generation.items())]

    def unnoticed(self, explained: set[int]) -> Iterator[WorkerEnded]:
        """Yield deaths by a signal that no survivor recorded.

        If no worker finished, only the first counts: the launcher ends all other workers when it gives the job up.
        """
        those = self.attendance
        quiet = explained | (those.finished.keys() - those.died_late) | {r.rank for r in those.failed}
        deaths = [r for r in self.of(WorkerEnded) if r.exit_code < 0 and r.rank in self.members]
        if those.finished:
            yield from (r for r in deaths if r.rank not in quiet)
        elif deaths and explained <= those.left and not those.failed:
            yield deaths[0]


N = TypeVar("N", int, float)


def _largest(mappings: Iterable[Mapping[str, N]]) -> dict[str, N]:
    """Return for each name the largest value in any of the mappings."""
    largest: dict[str, N] = {}
    for one in mappings:
        largest |= {name: max(value, largest.get(name, value)) for name, value in one.items()}
    return largest
