"""State of a job, derived from the records of its workers. Pure: no clock, process or file."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.faults.plan import ENDS
from holdfast.launch.duties import Duties
from holdfast.records.beacon import UNCONNECTED, BeaconPosition
from holdfast.records.lives import Attendance
from holdfast.records.texts import named_ranks
from holdfast.records.types import (
    CheckpointSaved,
    DeviceLost,
    FaultFired,
    Finished,
    Record,
    Recovered,
    ScriptFailed,
    StepCommitted,
    WorkerEnded,
)
from holdfast.summary.event_lines import cause_of_death

POISON_DEATHS = 3
"""Consecutive deaths at the same slice of the same step after which the samples are blamed, not the machine."""

VAIN_RECOVERIES = 3
"""Consecutive recoveries without a lost worker, newcomer or committed step after which they count as futile."""

_PREPARING, _CONNECTING = UNCONNECTED
_COMPUTING = ("forward", "backward")
_WAITING = ("allreduce", "recovery", "gate")
_NAMED_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do once no further progress of the workers is expected."""


@dataclass(frozen=True, slots=True)
class JobCompleted(Verdict):
    """Every live worker passed the gate; ``finished`` is the record of one of them."""

    finished: Finished


@dataclass(frozen=True, slots=True)
class NodeDeparted(Verdict):
    """The workers of this node have left in order; the job continues without it."""


@dataclass(frozen=True, slots=True)
class JobBroken(Verdict):
    """The job must not continue.

    ``exit_code`` is 2 for a wrong setting. ``unexplained``: no worker recorded a reason, so mpirun's output may give it.
    ``rank`` and ``step``: the worker whose script failed without a record, and its step; -1 for none. ``is_final``: the
    same would happen again, so that the job must not be requeued.
    """

    message: str
    exit_code: int = 1
    traceback: str = ""
    unexplained: bool = False
    rank: int = -1
    step: int = -1
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class JobLost(Verdict):
    """The job is lost, and may be restarted. ``is_final``: if that does not help, the same would happen once more."""

    reason: str
    is_final: bool = True


@dataclass(slots=True)
class _Start(Attendance):
    """State of one start of the job."""

    ranks: tuple[int, ...]
    processes: tuple[int, ...]
    excused: set[int] = field(default_factory=set)
    waiting: dict[int, list[tuple[Record, BeaconPosition | None]]] = field(default_factory=dict)
    quiet: dict[int, tuple[int, float]] = field(default_factory=dict)
    in_vain: dict[int, tuple[int, float]] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    phases: dict[int, str] = field(default_factory=dict)
    given_up: str = ""
    duties: Duties = field(default_factory=Duties)


class JobState:
    """Takes every record of a job, over all its starts, and decides when and how the job is over.

    ``virtual``: all workers are in one process. ``all_connect``: the fabric connects all workers or none, so a worker
    that dies before keeps the others waiting. The job is lost after ``stall_timeout_s`` in which all workers wait for
    each other without a heartbeat, or recover without progress.
    """

    def __init__(
        self, script: str, *, virtual: bool = False, all_connect: bool = False, stall_timeout_s: float = 60.0
    ) -> None:
        self._script = script
        self._virtual = virtual
        self._all_connect = all_connect
        self._stall_timeout_s = stall_timeout_s
        self._highest = -1
        self._gone: set[int] = set()  # workers and newcomers of earlier starts that are not in the present one
        self._poison: list[tuple[WorkerEnded, BeaconPosition]] = []
        self._devices: dict[int, str] = {}
        self._start = _Start((), ())
        self._closed = True
        self.killed: set[int] = set()
        self.fired: set[int] = set()
        self.saved: CheckpointSaved | None = None
        self.last_step = -1
        self.is_stopping = False
        """Whether the workers were asked to stop."""
        self.restarts_in_vain = -1
        """Restarts since a step was committed for the first time; -1 before the first start."""

    def begin(self, ranks: Sequence[int]) -> None:
        """Begin a start of the job on ``ranks``."""
        self.restarts_in_vain += 1
        self._gone = (self._gone | {*self._start.ranks, *self._start.processes, *self._start.waiting}) - {*ranks}
        self._start = _Start(tuple(ranks), tuple(ranks[:1] if self._virtual else ranks))
        self._start.duties.holder = ranks[0]
        self._highest = max((self._highest, *ranks))
        self._closed = False

    def wait_for(self, rank: int) -> None:
        """Register a newcomer that is started; its records count once the other workers have admitted it."""
        self._gone.discard(rank)
        self._start.waiting.setdefault(rank, [])
        self._highest = max(self._highest, rank)

    @property
    def waiting(self) -> set[int]:
        """Newcomers that are started, were not admitted yet and have not ended."""
        newcomers = self._start.waiting.items()
        return {
            rank for rank, records in newcomers if not any(isinstance(record, WorkerEnded) for record, _ in records)
        }

    @property
    def highest(self) -> int:
        """The highest rank assigned so far."""
        return self._highest

    def lose(self, ranks: Iterable[int]) -> None:
        """Mark these workers as lost with their node: later records of them are ignored."""
        for rank in ranks:
            self._start.lost_s.setdefault(rank, 0.0)

    def give_up(self, reason: str) -> None:
        """Give up this start of the job, which cannot begin; no worker is known to be the cause."""
        self._start.given_up = reason

    def connect(self, ranks: Iterable[int]) -> None:
        """Record which workers are connected to the others."""
        self._start.connected.update(ranks)

    def unconnected(self) -> set[int]:
        """Return the processes that run and, as far as is known, are not connected yet."""
        return set(self.living()) - self._start.connected

    @property
    def could_not_connect(self) -> bool:
        """Whether no worker was connected in this start, and none was seen while the script prepares: it is not the cause."""
        start = self._start
        return not (start.connected or start.begun_s) and _PREPARING not in start.phases.values()

    @property
    def has_begun(self) -> bool:
        """Whether a worker has begun to train in this start of the job."""
        return bool(self._start.begun_s)

    def has_ended(self, rank: int) -> bool:
        """Return whether the end of a worker is recorded."""
        return rank in self._start.ended

    def lost_without_end(self) -> set[int]:
        """Return the workers that the others have lost, and whose end no watcher has recorded yet."""
        return self._start.lost_s.keys() - self._start.ended.keys()

    def has_finished(self, rank: int) -> bool:
        """Return whether a worker has passed the gate at the end of training."""
        return rank in self._start.finished

    def close(self) -> None:
        """Record that the launcher kills the remaining workers: later deaths are its own."""
        self._closed = True

    def apply(self, record: Record, position: BeaconPosition | None = None) -> None:
        """Take one record; ``position`` is the last position of a worker that has ended."""
        match record:
            case StepCommitted():
                if record.step > self.last_step:
                    self.last_step, self.restarts_in_vain = record.step, 0
            case CheckpointSaved():
                self.saved = record
            case DeviceLost():
                self._devices[record.rank] = record.message
            case FaultFired():
                self.fired.add(record.fault)
                if record.kind in ENDS:
                    self.killed.add(record.rank)
        if not self._closed:
            self._apply_start(record, position)

    def _apply_start(self, record: Record, position: BeaconPosition | None) -> None:
        start = self._start
        if record.rank in self._gone:  # it ran on where the launcher could not reach it, and its end says nothing
            return
        if record.rank in start.waiting:  # its end may be read before the records of the workers that admitted it
            start.waiting[record.rank].append((record, position))
            return
        if record.t_s > start.lost_s.get(record.rank, record.t_s) and record.rank not in {f.rank for f in start.failed}:
            start.excused.add(record.rank)  # it was given up before, and noticed
        start.duties.apply(record)
        start.note(record)
        match record:
            case Recovered():
                self._let_in(record.joined)
            case WorkerEnded():
                if position is not None:
                    start.phases[record.rank] = position.phase
                start.quiet.clear()  # workers that waited for it can continue, and get the full timeout again
                if record.exit_code < 0 and record.rank not in self.killed:
                    self._note_death(record, position)

    def _let_in(self, ranks: Sequence[int]) -> None:
        start = self._start
        self._gone.difference_update(ranks)
        start.ranks = tuple(sorted({*start.ranks, *ranks}))
        if not self._virtual:
            start.processes = tuple(sorted({*start.processes, *ranks}))
        for rank in ranks:
            for record, position in start.waiting.pop(rank, ()):
                self._apply_start(record, position)

    def _note_death(self, death: WorkerEnded, position: BeaconPosition | None) -> None:
        if position is None or position.phase not in _COMPUTING:
            return  # Open MPI may crash survivors during recovery, which is not evidence against the samples
        if position.slice < 0:
            return
        if self._poison and _place(self._poison[-1][1]) != _place(position):
            self._poison = []
        self._poison.append((death, position))

    def living(self) -> tuple[int, ...]:
        """Return the ranks of the processes that, as far as is known, still run."""
        start = self._start
        gone = start.ended.keys() | (set() if self._virtual else start.lost_s.keys())
        return tuple(rank for rank in start.processes if rank not in gone)

    def workers_alive(self) -> tuple[int, ...]:
        """Return the workers that, as far as is known, are alive, including logical workers of the virtual fabric."""
        start = self._start
        gone = {rank for rank, end in start.ended.items() if not self._virtual and end.exit_code < 0}
        return tuple(rank for rank in start.ranks if rank not in gone | start.lost_s.keys() | self.killed)

    def ranks_left(self, wanted: int = 1) -> tuple[int, ...]:
        """Return the ranks for a restart: those on machines not known to have failed, and new ones up to ``wanted``."""
        start = self._start
        gone = start.lost_s.keys() | start.left | self.killed
        if not self._virtual:
            gone = gone | {r for r, end in start.ended.items() if end.exit_code == -signal.SIGKILL}
        well = tuple(rank for rank in start.ranks if rank not in gone)
        return well + tuple(range(self._highest + 1, self._highest + 1 + wanted - len(well)))

    def verdict(self, now_s: float, *, running: bool, crash: str = "") -> Verdict | None:
        """Return how the job ended, None while it runs.

        ``running``: mpirun, or the single process, was alive before the last records were read; ``crash``: how it was killed.
        """
        return (
            self._never_began()
            or self._script_fault()
            or self._poisoned()
            or self._all_over(running, crash)
            or self._blocked()
            or self._stands_still(now_s)
        )

    def _never_began(self) -> Verdict | None:
        """Return the verdict if a worker died before all were connected: the others wait, and do not detect it."""
        start = self._start
        if start.given_up:
            return JobLost(start.given_up)
        failed = {record.rank for record in start.failed}
        died = [end for rank, end in start.ended.items() if end.exit_code < 0 and rank not in failed]
        refused = [rank for rank in start.ended if self._is_refused(rank)]
        if self._all_connect and died and self.unconnected():
            cause = cause_of_death(died[0].exit_code)
            return JobLost(f"rank {died[0].rank} was {cause} before all workers were connected")
        if refused:
            code = start.ended[refused[0]].exit_code
            return JobLost(
                f"rank {refused[0]} could not be connected to the others: the fabric ended it with exit code {code}"
            )
        return None

    def _is_refused(self, rank: int) -> bool:
        """Return whether a worker was ended inside ``MPI_Init``, as Open MPI does without raising: not by its script."""
        start = self._start
        is_inside = self._all_connect and start.phases.get(rank) == _CONNECTING
        return is_inside and start.ended[rank].exit_code > 0 and rank not in {f.rank for f in start.failed}

    def observe(self, positions: Mapping[int, BeaconPosition], now_s: float) -> None:
        """Record the positions of the workers, to detect when they make no progress."""
        for rank, position in positions.items():
            self._start.phases[rank] = position.phase
            waits = position.waits or position.phase in _WAITING  # pipeline stages wait in forward and backward, too
            waits = waits and not position.in_collective  # which may move any number of bytes
            beats = position.beats if waits else -position.beats
            entry = self._start.quiet.get(rank)
            if entry is None or entry[0] != beats:
                self._start.quiet[rank] = (beats, now_s)
            _, since_s = self._start.in_vain.get(rank, (0, now_s))
            self._start.in_vain[rank] = (position.in_vain, since_s if position.in_vain else now_s)

    def _script_fault(self) -> Verdict | None:
        start = self._start
        excused = start.excused | {rank for rank, word in start.finished.items() if word.outcome != "done"}
        failed = [f for f in start.failed if f.rank not in excused]
        if failed and all(record.is_loss for record in failed):
            # what the lost ranks held, the survivors cannot replace
            return JobLost(min(failed, key=lambda f: (f.t_s, f.rank)).message, is_final=False)
        if failed:
            first = min(failed, key=lambda f: (f.t_s, f.rank))
            where = "" if first.exit_code == 2 else self._where(first.rank, first.step)
            return JobBroken(
                f"{where}{first.message}",
                first.exit_code,
                first.traceback,
                is_final=first.is_bug and not self._had_lost(first),
            )
        for rank, end in start.ended.items():
            if end.exit_code > 0 and rank not in excused:
                message = f"{self._script} ended with exit code {end.exit_code}"
                return JobBroken(f"{self._where(rank, end.step)}{message}", rank=rank, step=end.step)
            if (
                end.exit_code == 0
                and rank not in start.finished
                and rank not in start.left | excused
                and not (self._virtual and start.finished)
            ):
                return self._left_early(rank, end)
        return None

    def _had_lost(self, failed: ScriptFailed) -> bool:
        """Return whether a worker was lost before the script raised, which may be the reason."""
        deaths = [(rank, end.t_s) for rank, end in self._start.ended.items() if end.exit_code < 0]
        losses = [*self._start.lost_s.items(), *deaths]  # a watcher may tell of a death after others recovered from it
        return any(t_s < failed.t_s for rank, t_s in losses if rank != failed.rank)

    def _left_early(self, rank: int, end: WorkerEnded) -> JobBroken:
        if rank in self._start.begun_s:
            message = f"rank {rank} left training at step {end.step} before its end: {self._script} returned"
        else:
            message = f"{self._script} ended without training: it never ran session.steps(...)"
        return JobBroken(message, rank=rank, step=end.step, is_final=True)

    @staticmethod
    def _where(rank: int, step: int) -> str:
        return f"rank {rank}: " if step < 0 else f"rank {rank}, step {step}: "

    def _poisoned(self) -> Verdict | None:
        if len(self._poison) < POISON_DEATHS:
            return None
        last, position = self._poison[-1]
        ranks = ", ".join(str(death.rank) for death, _ in self._poison)
        named = ", ".join(map(str, position.samples[:_NAMED_SAMPLES]))
        more = len(position.samples) - _NAMED_SAMPLES
        return JobBroken(
            f"workers {ranks} died one after another at the same place, slice {position.slice} of step "
            f"{position.step} ({position.phase}, {self._cause(last)}): its samples are the likely cause: "
            f"{named}{f' and {more} more' if more > 0 else ''}",
            is_final=True,
        )

    def _all_over(self, running: bool, crash: str) -> Verdict | None:
        start = self._start
        if running and self.living():
            return None
        stayed = start.finished.keys() - start.left  # those that left may have passed the gate of an earlier loop
        passed = [start.finished[r] for r, end in start.ended.items() if end.exit_code == 0 and r in stayed]
        if self._virtual and not passed and any(end.exit_code == 0 for end in start.ended.values()):
            passed = list(start.finished.values())
        gave_up = [word for word in start.finished.values() if word.outcome != "done"]
        if passed and not gave_up and (missing := self._missing({word.rank for word in passed})):
            return JobBroken(missing)
        if passed or gave_up:
            # workers that stopped on request, between two loops, may leave too few in the next loop
            return JobCompleted(
                min(gave_up or passed, key=lambda word: (word.outcome != "stopped", -word.step, word.rank))
            )
        if not start.begun_s and not start.ended and crash:
            return JobLost(crash)
        if not start.begun_s and not start.ended:
            return JobBroken("the workers did not start", unexplained=True)
        return JobLost(self._how_lost())

    def _missing(self, ended_well: set[int]) -> str:
        """Return what a job whose training is complete may lack, because a worker died that was to write it; or ""."""
        start = self._start
        died_late = {rank for rank in start.finished if rank in start.ended and start.ended[rank].exit_code < 0}
        return start.duties.missing(ended_well, died_late - start.lost_s.keys() - start.left)

    def differing(self) -> str:
        """Return how the replicas that finished differ; "" if they hold the same bits, or that is unknown."""
        ends = self._start.at_last_gate().values()
        what = "weights" if len({word.sha256 for word in ends}) > 1 else "optimizer states"
        ranks: dict[str, list[int]] = {}
        for word in ends:
            ranks.setdefault(f"{word.sha256[:12]}, state {word.state_sha256[:12]}", []).append(word.rank)
        if len(ranks) < 2:
            return ""
        named = "; ".join(f"{named_ranks(some)}: {sha256}" for sha256, some in ranks.items())
        return (
            f"training is complete, but the replicas hold different {what} ({named}): a worker computed wrong bits, or the"
            " script changed its model differently on each worker; --guard stop ends a job at the first difference, and"
            " names it"
        )

    def _blocked(self) -> Verdict | None:
        """Return the verdict if ranks wait in a collective of ``torch.distributed`` that another will never call."""
        living = self.living()
        why = self._start.duties.blocked(living)
        may_differ = self.is_stopping or len(living) < len(self._start.processes)  # for these reasons, and not again
        return JobBroken(why, is_final=not may_differ) if why else None

    def _how_lost(self) -> str:
        ends = [f"rank {rank} {self._cause(end)}" for rank, end in sorted(self._start.ended.items())]
        if untold := self.living():
            if self._all_connect:
                return "mpirun ended before the workers did"
            ends = [f"{named_ranks(untold)} ended, and how is not recorded", *ends]
        return "; ".join(ends) or "no worker is left, and how they ended is not recorded"

    def _cause(self, end: WorkerEnded) -> str:
        """Return a phrase for how a worker ended; one whose device was lost has killed itself."""
        lost = self._devices.get(end.rank)
        return cause_of_death(end.exit_code) if lost is None else f"lost its device: {lost}"

    def stand_still(self, ranks: Iterable[int], now_s: float) -> bool:
        """Return whether all of these workers wait, and none has sent a heartbeat for too long; False if there are none."""
        quiet = [self._start.quiet.get(rank, (0, now_s)) for rank in ranks]
        return bool(quiet) and all(beats > 0 and now_s - since_s >= self._stall_timeout_s for beats, since_s in quiet)

    def stalled(self) -> JobLost:
        """Return the verdict if no worker makes progress."""
        quiet = f"no worker sent a heartbeat for {self._stall_timeout_s:g} s"
        return JobLost(f"{quiet}, all of them waiting for each other")

    def _stands_still(self, now_s: float) -> Verdict | None:
        living = self.living()
        if living and self.stand_still(living, now_s):
            return self.stalled()
        for rank in living:  # one is enough: a step is committed by all workers, and membership changes for all
            count, since_s = self._start.in_vain.get(rank, (0, now_s))
            if count >= VAIN_RECOVERIES and now_s - since_s >= self._stall_timeout_s:
                return JobLost(
                    f"the workers recovered {count} times in {now_s - since_s:.0f} s without progress: no worker was lost or "
                    "admitted, and no step was committed"
                )
        return None


def _place(position: BeaconPosition) -> tuple[int, int]:
    return position.step, position.slice
