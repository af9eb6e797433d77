"""The one story of a run, from its records; what is reported, drawn, counted or exported of a run is a projection of it.

A run is divided into *lives*: a life is the time between two starts of the whole job. Within a life the survivors
recover without the launcher, any number of times; between lives the launcher restarts the job.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from holdfast.records.lives import JobLife, JoinedWorker, LostWorker, Recovery
from holdfast.records.progress import RunProgress
from holdfast.records.types import (
    CheckpointSaved,
    DeviceLost,
    FailureSeen,
    FaultFired,
    Finished,
    HistogramLogged,
    ImageLogged,
    JobRestarted,
    OptimizerOverlapped,
    PartRestored,
    PartsHeld,
    Record,
    Recovered,
    Reinitialised,
    RunStarted,
    SamplesLost,
    SeatsFilled,
    SeatTaken,
    SettingChanged,
    StateHashed,
    StepCommitted,
    WorkerEnded,
    WorkerFenced,
)

R = TypeVar("R", bound=Record)


_ENDS = ("kill", "segfault", "oom", "nodeloss")
"""Kinds of injected faults that end processes immediately."""


class Retention:
    """Which records a model keeps: all that a report needs. One that keeps fewer serves a run that lasts for weeks."""

    def replaces_step(self, record: StepCommitted, highest: int) -> bool:
        """Return whether a committed step replaces the last one; ``highest`` is the highest step before."""
        return False

    def keeps(self, record: Record) -> bool:
        """Return whether a record of something else is kept."""
        return True


class RunModel:
    """The one story of a run: takes its records one by one, in the order of time, and says what happened so far.

    Args:
        started: Ranks that the run was started with; if empty, they are taken from the records.
        retention: Which records it keeps; None: all that a report needs.
    """

    def __init__(self, started: Sequence[int] = (), retention: Retention | None = None) -> None:
        self.started = tuple(started)
        self.is_distributed = False
        """Whether the script uses ``torch.distributed``, as far as is known."""
        self.lives = [JobLife(0, self.started)]
        self.commits: list[StepCommitted] = []
        """Committed steps, ordered by time, those that were committed again included."""
        self.alive: set[int] = set()
        """Workers that take part, spares included."""
        self.progress = RunProgress()
        self.saved: CheckpointSaved | None = None
        """The newest checkpoint."""
        self.num_saved = 0
        self.samples_lost: set[tuple[int, int]] = set()
        """Samples that the run continued without, each with its epoch."""
        self.end_s = 0.0
        """Time of the newest record."""
        self._takes_started = not started
        self._retention = retention or Retention()

    def apply(self, record: Record) -> None:
        """Take the next record."""
        self.end_s = record.t_s
        if isinstance(record, JobRestarted):
            self.lives[-1].restart = record
            self.lives.append(JobLife(len(self.lives), record.workers))
            self.alive = set()
        else:
            self.lives[-1].extend_to(record.t_s)
        highest = self.progress.highest
        self.progress.apply(record)
        if isinstance(record, StepCommitted):
            self._commit(record, highest)
        elif isinstance(record, CheckpointSaved):
            self.saved, self.num_saved = record, self.num_saved + 1
        elif not isinstance(record, StateHashed | ImageLogged | HistogramLogged):
            self._count(record)
            if self._retention.keeps(record):
                self._forget_derived()
                self.lives[-1].add(record)

    def _commit(self, record: StepCommitted, highest: int) -> None:
        self.lives[-1].highest = max(self.lives[-1].highest, record.step)
        if self._retention.replaces_step(record, highest):
            self.commits[-1] = record
        else:
            self._forget_derived()
            self.commits.append(record)

    def _count(self, record: Record) -> None:
        match record:
            case RunStarted():
                self.is_distributed = self.is_distributed or record.is_distributed
                self.alive |= set(range(record.workers)) if record.fabric == "virtual" else {record.rank}
                if self._takes_started:
                    self.started = self.lives[0].workers = tuple(sorted({*self.started, record.rank}))
            case SamplesLost():
                self.samples_lost |= {(record.epoch, number) for number in record.ids}
            case Recovered():
                self.alive = set(record.survivors)
            case WorkerEnded():
                start = self.progress.start
                is_virtual = start is not None and start.fabric == "virtual"
                self.alive -= self.alive if is_virtual else {record.rank}

    def _forget_derived(self) -> None:
        for name in ("timed", "failures", "changes"):
            self.__dict__.pop(name, None)

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of one kind, ordered by time; not those of committed steps, see :attr:`commits`."""
        return [record for life in self.lives for record in life.of(kind)]

    @cached_property
    def failures(self) -> list[LostWorker]:
        """The lost workers, ordered by time."""
        failures = []
        for life, failure in self._failures():
            _explain(life, failure)
            if self.is_distributed and not failure.injected:
                # Survivors record the last step and bucket, even if they were in a barrier, or in no collective at all.
                failure.phase, failure.step = "", failure.step if self.commits else -1
            failures.append(failure)
        return sorted(failures, key=lambda f: (f.t_s, f.rank))

    @property
    def joined(self) -> list[JoinedWorker]:
        """The workers that joined the running job, ordered by time."""
        return [joining for life in self.lives for joining in life.joined]

    @property
    def ranks(self) -> list[int]:
        """All workers of the run, including spares and newcomers."""
        members = {rank for life in self.lives for rank in life.members}
        return sorted({*self.started, *members, *(f.rank for f in self.failures)})

    @property
    def spares(self) -> list[int]:
        """Workers that waited from the start to replace a failed worker."""
        first = self.lives[0]
        return sorted(first.members - {*self.started} - {joining.rank for joining in first.joined})

    def workers_wanted(self, t_s: float) -> int:
        """Return the wanted number of workers at a time: the initial number, or the last one requested since."""
        wanted = [change.value for change in self.changes if change.name == "workers" and change.t_s <= t_s]
        return int(wanted[-1]) if wanted else len(self.started)

    @cached_property
    def changes(self) -> list[SettingChanged]:
        """Changes to the running job, each once although every worker records it, and again after a restart."""
        records = {(record.step, record.name, record.value): record for record in reversed(self.of(SettingChanged))}
        return sorted(records.values(), key=lambda record: record.t_s)

    @property
    def reinitialised(self) -> list[list[Reinitialised]]:
        """Rebuilds of the application, each as the records of all workers that took part, ordered by time."""
        together: dict[tuple[int, int], list[Reinitialised]] = {}
        for life in self.lives:
            for record in life.of(Reinitialised):
                together.setdefault((life.number, record.generation), []).append(record)
        return list(together.values())

    @property
    def restored(self) -> list[PartRestored]:
        """The restored parts of a split model; if a recovery was repeated, as restored by its last attempt."""
        keyed = [((life.number, r.step, r.part), r) for life in self.lives for r in life.of(PartRestored)]
        return list(dict(keyed).values())

    @property
    def seats_filled(self) -> list[SeatsFilled]:
        """Collectives in which survivors' values stood in for failed ranks: each kind once, from its first on."""
        first: dict[object, SeatsFilled] = {}
        for life in self.lives:
            for record in life.of(SeatsFilled):
                key = (life.number, record.rank, record.collective, record.seats, record.sources)
                first[key] = dataclasses.replace(first.get(key, record), count=record.count)
        return list(first.values())

    @property
    def seats_taken(self) -> list[SeatTaken]:
        """Newcomers that took the seat of a failed rank, as the first of the others recorded each."""
        keyed = [((life.number, r.worker), r) for life in self.lives for r in life.of(SeatTaken)]
        firsts = dict(reversed(keyed))
        return [firsts[key] for key in dict(keyed)]

    @property
    def parts_held(self) -> list[PartsHeld]:
        """The parts of a split model that each worker held at the end."""
        return sorted(self.lives[-1].of(PartsHeld), key=lambda record: record.rank)

    @property
    def optimizer_overlapped(self) -> list[OptimizerOverlapped]:
        """The cost at each worker of updating buckets before their step's commit vote."""
        return sorted(self.lives[-1].of(OptimizerOverlapped), key=lambda record: record.rank)

    @property
    def worker(self) -> str:
        """The term for a worker in the run's interface: "worker" or "rank"."""
        return "rank" if self.is_distributed else "worker"

    @property
    def steps(self) -> dict[int, StepCommitted]:
        """The committed steps by number; for a step that was committed again, the last."""
        return {record.step: record for record in sorted(self.commits, key=lambda r: (r.step, r.t_s))}

    @property
    def redone_steps(self) -> int:
        """Steps that were recomputed, over all recoveries and restarts."""
        by_recovery = {f.recovery: f.redone_steps for f in self.failures if f.recovery is not None}
        alone = [recovery.redone_steps for recovery in self._healings() if not recovery.lost]
        return sum(by_recovery.values()) + sum(alone)

    @property
    def healed_steps(self) -> int:
        """Steps that were recomputed because a state was corrupt."""
        return sum(recovery.redone_steps for recovery in self._healings())

    def _healings(self) -> list[Recovery]:
        return [r for life in self.lives for r in life.recoveries if r.said[-1].decision == "heal"]

    def step_times_s(self) -> list[float]:
        """Return the seconds between commits of consecutive steps, without intervals that hold a failure."""
        kinds = (FaultFired, FailureSeen, Recovered)
        noise = [record.t_s for kind in kinds for record in self.of(kind)]
        noise += [life.restart.t_s for life in self.lives if life.restart is not None]
        noise = sorted([*noise, *(f.t_s for f in self.failures)])
        return [
            after.t_s - before.t_s
            for before, after in itertools.pairwise(self.timed)
            if after.step == before.step + 1 and bisect_right(noise, before.t_s) == bisect_right(noise, after.t_s)
        ]

    @cached_property
    def timed(self) -> list[StepCommitted]:
        """The commits whose time is the end of their step.

        Under ``torch.distributed`` a step ends when the next one begins, and the last one when the script ends, which
        may do anything after training.
        """
        last = {record.step - 1 for record in self.of(Finished)} if self.is_distributed else set()
        return [commit for commit in self.commits if commit.step not in last]

    def _failures(self) -> Iterator[tuple[JobLife, LostWorker]]:
        number = 0
        for life in self.lives:
            explained = set(life.attendance.left)
            for recovery in life.recoveries:
                explained |= set(recovery.lost)
                for rank in sorted(set(recovery.lost) - life.attendance.left):
                    yield life, self._recovered(life, recovery, rank, number)
                number += 1
            since_s = None
            if life.restart is not None:
                since_s, number = life.restart.t_s, number + 1
            for failure in _unanswered(life, explained):
                if since_s is not None:
                    failure.decided_s, failure.decision, failure.recovery = since_s, "restart", number - 1
                    failure.redone_steps = max(0, failure.step - self._resumed_at(life) + 1)
                failure.resumed_s = self._next_commit_s(failure.t_s if since_s is None else since_s, failure.step)
                yield life, failure

    def _recovered(self, life: JobLife, recovery: Recovery, rank: int, number: int) -> LostWorker:
        failure = _struck(life, recovery, rank)
        failure.known_s, failure.decided_s = recovery.known_s(failure.t_s), recovery.last_s
        failure.resumed_s = self._next_commit_s(recovery.first_s, failure.step)
        failure.recovery, failure.decision = number, recovery.said[-1].decision
        failure.redone_steps, failure.lost_samples = recovery.redone_steps, _lost_samples(life, recovery)
        failure.orders, failure.times_s = recovery.orders, recovery.times_s
        return failure

    def last_commit_s(self, until_s: float) -> float | None:
        """Return when the last step up to this time was committed, None if none was."""
        number = bisect_right(self.commits, until_s, key=lambda commit: commit.t_s)
        return self.commits[number - 1].t_s if number else None

    def _next_commit_s(self, after_s: float, step: int) -> float | None:
        first = bisect_right(self.timed, after_s, key=lambda commit: commit.t_s)
        return next((c.t_s for c in itertools.islice(self.timed, first, None) if c.step >= step), None)

    def _resumed_at(self, life: JobLife) -> int:
        following = self.lives[life.number + 1]
        return min((r.step for r in following.of(RunStarted)), default=0)


def model_of(records: Iterable[Record], started: Sequence[int] = ()) -> RunModel:
    """Return the model of a run whose records are there, in any order."""
    model = RunModel(started)
    for record in sorted(records, key=lambda r: r.t_s):
        model.apply(record)
    return model


def _unanswered(life: JobLife, explained: set[int]) -> Iterator[LostWorker]:
    """Yield workers that died in ``life`` without a decision of the survivors about it."""
    for fault in life.of(FaultFired):
        struck = _victims(fault)
        seen = [r for r in life.of(FailureSeen) if r.t_s >= fault.t_s and r.rank not in struck]
        for rank in struck:
            if _was_fatal(life, fault, rank) and rank not in explained:
                explained.add(rank)
                failure = _injected(fault, rank)
                failure.known_s = seen[0].t_s if seen else None
                yield failure
    if life.restart is not None:
        for rank in sorted(life.members - set(life.restart.workers) - explained):
            explained.add(rank)
            yield _ended(life, rank)
    for death in life.unnoticed(explained):
        yield _ended(life, death.rank)


def _ended(life: JobLife, rank: int) -> LostWorker:
    ends = [r for r in life.of(WorkerEnded) if r.rank == rank]
    if rank in life.attendance.died_late:
        return LostWorker(rank=rank, step=-1, t_s=ends[0].t_s)
    seen = next((r for r in life.of(FailureSeen) if r.rank != rank), None)
    moments = [r.t_s for r in (*ends, seen) if r is not None]
    t_s = min(moments, default=life.restart.t_s if life.restart else 0.0)
    if seen is None:
        return LostWorker(rank=rank, step=life.highest + 1, t_s=t_s)
    return LostWorker(rank=rank, step=seen.step, phase=seen.phase, t_s=t_s, known_s=seen.t_s)


def _struck(life: JobLife, recovery: Recovery, rank: int) -> LostWorker:
    """Return how ``rank`` was lost, as far as it is known before the recovery."""
    before = [f for f in life.of(FaultFired) if rank in _victims(f) and f.t_s <= recovery.last_s]
    if faults := [fault for fault in before if _was_fatal(life, fault, rank)]:
        return _injected(faults[-1], rank)
    if recovery.seen:
        first = recovery.seen[0]
        return LostWorker(rank=rank, step=first.step, phase=first.phase, t_s=first.t_s)
    return LostWorker(rank=rank, step=recovery.step + max(recovery.redone_steps - 1, 0), t_s=recovery.first_s)


def _victims(fault: FaultFired) -> tuple[int, ...]:
    return fault.workers if fault.node >= 0 else (fault.rank,)


def _was_fatal(life: JobLife, fault: FaultFired, rank: int) -> bool:
    """Return whether ``fault`` ended a worker: one that was only stuck or cut off for a while may have continued."""
    if fault.kind in _ENDS or fault.kind in ("slow", "leave", "flip"):
        return fault.kind in _ENDS
    if fault.kind in ("gpu-error", "gpu-oom"):
        return any(r.rank == rank and r.t_s >= fault.t_s for r in life.of(DeviceLost))
    if fault.kind == "partition":
        return rank not in life.attendance.left and rank not in life.attendance.finished
    return any(r.rank == rank and r.t_s >= fault.t_s for r in life.of(WorkerFenced))


def _injected(fault: FaultFired, rank: int) -> LostWorker:
    return LostWorker(rank=rank, kind=fault.kind, step=fault.step, phase=fault.phase, injected=True, t_s=fault.t_s)


def _explain(life: JobLife, failure: LostWorker) -> None:
    """Note the kind of a failure, the time of death, and the reason if the launcher, or the worker itself, ended it."""
    rank = failure.rank
    lost = next((record for record in life.of(DeviceLost) if record.rank == rank), None)
    fenced = next((record for record in life.of(WorkerFenced) if record.rank == rank), None)
    if not failure.injected:
        has_raised = any(record.rank == rank for record in life.attendance.failed)
        failure.kind = "hang" if fenced else "device" if lost else "exception" if has_raised else "kill"
    if lost is None and fenced is not None:
        failure.silent_s, failure.why, failure.stack = fenced.silent_s, fenced.reason, fenced.stack
        return
    failure.why = "" if lost is None else lost.message
    failure.ended_s = next((record.t_s for record in life.of(WorkerEnded) if record.rank == rank), None)


def _lost_samples(life: JobLife, recovery: Recovery) -> int:
    same_step = [r for r in life.recoveries if r.step == recovery.step]
    ids: set[int] = set()
    for record in life.of(SamplesLost):
        if record.step != recovery.step:
            continue
        # A step may fail twice; lost samples belong to the recovery nearest in time.
        nearest = min(same_step, key=lambda r: abs(r.first_s - record.t_s))
        if nearest.first_s == recovery.first_s:
            ids |= set(record.ids)
    return len(ids)
