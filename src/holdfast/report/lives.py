"""The lives of a run, and what its workers recovered from in each: a life is the time between two starts of the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One lost worker.

    Args:
        rank: Who was lost.
        kind: The kind of the injected fault; where nobody injected it ``"hang"`` if the launcher ended a worker that got
            no further, ``"exception"`` if the script raised, else ``"kill"``.
        step: Step in progress: of the worker where the fault was injected, otherwise of the first survivor that knew;
            -1 where there is none.
        phase: Where in that step, "" if nobody knows.
        t_s: When the fault struck; where nobody injected it, when the first survivor knew.
        known_s: When the first survivor knew, None if none ever did.
        decided_s: When the last survivor had decided how to go on, or when the job was started again.
        resumed_s: When the next step was committed, None if none was.
        recovery: Number of the recovery that answered it, counted over the run; workers lost in the same recovery
            share it and its times. None if nothing answered.
        silent_s: For how long the worker had given no sign when the launcher ended it; None if it did not.
        why: What the launcher said then, "" if it did not.
        orders: How often each order of the protocol was carried out in that recovery, at the survivor that did so most.
        times_s: The longest that a survivor took for them.
    """

    rank: int
    kind: str
    step: int
    phase: str
    injected: bool
    t_s: float
    known_s: float | None = None
    decided_s: float | None = None
    resumed_s: float | None = None
    recovery: int | None = None
    decision: str | None = None
    redone_steps: int = 0
    lost_samples: int = 0
    silent_s: float | None = None
    why: str = ""
    orders: Mapping[str, int] = field(default_factory=dict)
    times_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def detect_s(self) -> float | None:
        """Seconds from the injected fault to the first survivor that knew."""
        return self.known_s - self.t_s if self.injected and self.known_s is not None else None

    @property
    def recover_s(self) -> float | None:
        """Seconds from the fault (or from when it was first known) to the next committed step."""
        return self.resumed_s - self.t_s if self.resumed_s is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """A worker that came while the job ran.

    Args:
        rank: Which.
        step: The first step that it took part in.
        t_s: When it went on with the others.
        held_s: How long they were kept from computing for it, at most.
    """

    rank: int
    step: int
    t_s: float
    held_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One decision of the survivors, from the records of all of them."""

    said: tuple[Recovered, ...]
    seen: tuple[FailureSeen, ...]

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that it found missing."""
        return tuple(sorted({rank for record in self.said for rank in record.lost}))

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks that came with it."""
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
        """The step that training went on with."""
        return self.said[0].step

    @property
    def redone_steps(self) -> int:
        """Steps whose work was done again."""
        return max(record.redone_steps for record in self.said)

    @property
    def orders(self) -> dict[str, int]:
        """How often each order of the protocol was carried out, at the survivor that did so most."""
        return largest(record.orders for record in self.said)

    @property
    def times_s(self) -> dict[str, float]:
        """The longest that a survivor took for each order."""
        return largest(record.times_s for record in self.said)

    def known_s(self, since_s: float) -> float | None:
        """When the first survivor knew, after ``since_s``."""
        return min((r.t_s for r in (*self.seen, *self.said) if r.t_s >= since_s), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of the whole job, and what followed until the next."""

    number: int
    workers: tuple[int, ...]
    records: tuple[Record, ...]
    restart: JobRestarted | None
    """What ended it, None for the last life."""

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of one kind, in the order of time."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def members(self) -> set[int]:
        """All that took part in training at any time, spares and newcomers too."""
        began = (record.rank for record in self.of(RunStarted))
        # Of those whom one process plays only the lowest says that it begins.
        survived = (rank for record in self.of(Recovered) for rank in record.survivors)
        return {*self.workers, *began, *survived}

    @property
    def left(self) -> set[int]:
        """Those that left in order."""
        return {record.rank for record in self.of(Left)}

    @property
    def joined(self) -> Iterator[Joining]:
        """Those that came while it ran, in the order of time."""
        began_s = {record.rank: record.t_s for record in self.of(RunStarted)}
        for recovery in self.recoveries:
            held_s = max(record.held_s for record in recovery.said)
            for rank in recovery.joined:
                yield Joining(rank=rank, step=recovery.step, t_s=began_s.get(rank, recovery.last_s), held_s=held_s)

    @property
    def recoveries(self) -> list[Recovery]:
        """The decisions of the survivors, in the order of time."""
        by_generation: dict[int, list[Recovered]] = {}
        for record in self.of(Recovered):
            by_generation.setdefault(record.generation, []).append(record)
        recovered_s: dict[int, float] = {}
        return [self._recovery(said, recovered_s) for _, said in sorted(by_generation.items())]

    def _recovery(self, said: Sequence[Recovered], recovered_s: dict[int, float]) -> Recovery:
        seen: list[FailureSeen] = []
        for record in said:
            # A survivor may see the next failure before others have decided about this one: judge by its own clock.
            since_s = recovered_s.get(record.rank, float("-inf"))
            seen += [f for f in self.of(FailureSeen) if f.rank == record.rank and since_s < f.t_s <= record.t_s]
            recovered_s[record.rank] = record.t_s
        return Recovery(said=tuple(said), seen=tuple(sorted(seen, key=lambda r: r.t_s)))

    def unnoticed(self, explained: set[int]) -> Iterator[WorkerEnded]:
        """Yield deaths by a signal that no survivor spoke about.

        Where nobody finished, only the first counts: the launcher ends the others when it gives the job up.
        """
        finished = {r.rank for r in self.of(Finished)}
        quiet = explained | finished | {r.rank for r in self.of(ScriptFailed)}
        deaths = [r for r in self.of(WorkerEnded) if r.exit_code < 0 and r.rank in self.members]
        if finished:
            yield from (r for r in deaths if r.rank not in quiet)
        elif deaths and explained <= self.left and not self.of(ScriptFailed):
            yield deaths[0]


N = TypeVar("N", int, float)


def largest(said: Iterable[Mapping[str, N]]) -> dict[str, N]:
    """Return of each name the largest value that any of them has said."""
    largest: dict[str, N] = {}
    for one in said:
        largest |= {name: max(value, largest.get(name, value)) for name, value in one.items()}
    return largest
