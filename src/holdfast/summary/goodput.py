"""Where the time of a run went: useful work, and badput by cause. Computed from records alone, while a run lasts or after it."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from holdfast.records.lives import Recovery
from holdfast.records.types import (
    CheckpointSaved,
    CorruptionFound,
    FailureSeen,
    FaultFired,
    Finished,
    JobRestarted,
    Record,
    Recovered,
    Reinitialised,
    RunStarted,
    StepCommitted,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)

CAUSES = {
    "start_up": "from the start of the launcher until training begins",
    "step_redone": "work that was discarded by a failure: on the step in progress, and on steps since a checkpoint",
    "stall": "a worker made no progress, and the others waited until it was killed or the job restarted",
    "detection": "a worker had failed, and the survivors waited for it until they detected that, or the launcher did",
    "agreement": "the survivors agreed on what to do; also for planned changes of the membership",
    "rebuild": "a new communicator without the failed workers, or the application built again",
    "state_transfer": "a checkpoint was loaded, or state was sent to newcomers and new owners",
    "restart": "the launcher restarted the job, until training resumed",
    "checkpoint_held": "training was held for a checkpoint",
    "straggler_wait": "workers waited for a slow one; estimated from its score",
    "idle": "no step was in progress: after training, or between two training loops",
}
"""Causes of badput: every moment of a run is useful work, or has one of them."""

RECOVERY_PARTS = ("step_redone", "stall", "detection", "agreement", "rebuild", "state_transfer", "restart")
"""Causes that belong to a failure, or to a change of the membership."""

_REBUILD = {"Shrink", "Reinitialise"}
_TRANSFER = {"LoadCheckpoint", "CatchUp", "HandOver", "SendState", "AdoptState", "MoveParts", "AdoptPlacement"}
"""Actions of the protocol, as records name them; all others are agreement."""
_DEATHS = ("kill", "segfault", "oom", "nodeloss", "gpu-error", "gpu-oom")
"""Kinds of injected faults that end a worker."""
_STRAGGLES_S = 30.0
"""A worker that was reported as slow is taken for slow during this time; it is reported again if it stays slow."""
SETTLED_S = 1.0
"""Records of several workers arrive in any order; after so long, all of a moment are taken to be there."""
_KEPT_STEPS = 1024
"""So many newest steps are known one by one. Of older ones, only those after which a checkpoint was saved: a restart goes
back to no other."""
_PACE = 25
"""The usual duration of a step is the median of so many last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The time of a run by what it was used for.

    Args:
        wall_s: Seconds since the launcher started.
        useful_s: Seconds of work on steps that count.
        badput_s: Seconds by cause, one entry for each of :data:`CAUSES`; they and ``useful_s`` add up to ``wall_s``.
            During a run, the time of a recovery has no cause before the recovery ends.
    """

    wall_s: float
    useful_s: float
    badput_s: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Useful time as a share of the wall time, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput_of(records: Iterable[Record], wall_s: float) -> Goodput | None:
    """Return where the time of a finished run went.

    Args:
        records: Records of all workers and of the launcher, in any order.
        wall_s: Seconds from the start of the launcher to its end.

    Returns:
        None for a ``torch.distributed`` script without steps: it is unknown what it does.
    """
    account = TimeAccount()
    for record in sorted(records, key=lambda r: r.t_s):
        account.take(record)
    return account.close(wall_s)


@dataclass(slots=True)
class _Outage(Recovery):
    """A recovery in progress: since the first survivor has detected a failure, or was held for newcomers."""

    rebuilt: list[Reinitialised] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    """Stall and detection, before that."""
    work_s: float = 0.0
    """Work on the step in progress, before these."""


class TimeAccount:
    """Attributes the time of a run to causes, record by record.

    Badput never decreases while records arrive. Useful work does when a rollback discards committed steps.
    """

    def __init__(self) -> None:
        self._state = "start_up"  # or training, restart, idle
        self._until_s = 0.0  # all time before has been attributed
        self._useful_s = 0.0
        self._badput_s = dict.fromkeys(CAUSES, 0.0)
        self._steps: list[tuple[int, float]] = []  # committed steps, each with the useful time until its commit
        self._saved: set[int] = set()  # steps before which a checkpoint was saved
        self._thin_at = 2 * _KEPT_STEPS  # committed steps at which old ones are left out
        self._durations_s: deque[float] = deque(maxlen=_PACE)
        self._held_s = 0.0  # checkpoints held training for so long, not yet attributed
        self._deaths: list[tuple[float, str]] = []  # when, and in which phase of the step, if that is known
        self._fenced: list[WorkerFenced] = []
        self._slow: StragglerSeen | None = None
        self._outage: _Outage | None = None
        self._generation = -1
        self._is_blind = False
        self._recoveries: list[tuple[float, dict[str, float]]] = []
        self._unsettled: list[tuple[float, int, Record]] = []  # those of one moment in the order of their arrival
        self._number = itertools.count()

    def add(self, record: Record) -> None:
        """Let a record wait for :meth:`settle`."""
        heapq.heappush(self._unsettled, (record.t_s, next(self._number), record))

    def settle(self, until_s: float) -> Iterator[Record]:
        """Take the waiting records that are not newer than this, oldest first, and yield each after that."""
        while self._unsettled and self._unsettled[0][0] <= until_s:
            record = heapq.heappop(self._unsettled)[2]
            self.take(record)
            yield record

    def take(self, record: Record) -> None:
        """Take a record; it must not be older than the last one by more than their clocks differ."""
        match record:
            case RunStarted():
                self._begin(record)
            case StepCommitted():
                self._commit(record)
            case CheckpointSaved():
                self._held_s += max(0.0, record.seconds)
                self._saved.add(record.step)
            case FaultFired() if record.kind in _DEATHS:
                self._deaths.append((record.t_s, record.phase))
            case WorkerEnded() if record.exit_code:
                self._deaths.append((record.t_s, ""))
            case WorkerFenced():
                self._fenced.append(record)
            case FailureSeen() | CorruptionFound(policy="heal"):
                self._detect(record)
            case Recovered():
                self._decide(record)
            case Reinitialised() if self._outage is not None:
                self._outage.rebuilt.append(record)
            case StragglerSeen():
                self._slow = None if record.policy == "rebalance" else record
            case JobRestarted():
                self._restart(record)
            case Finished() if self._state == "training":
                self._finish(record.t_s)

    def new_recoveries(self) -> list[tuple[float, dict[str, float]]]:
        """Return the failures and changes of the membership that were over since the last call.

        Each as the time when it was over, in seconds since the launcher started, and its seconds by cause, of
        :data:`RECOVERY_PARTS`.
        """
        new, self._recoveries = self._recoveries, []
        return new

    @property
    def is_unknown(self) -> bool:
        """Whether it is unknown what the script does: one of ``torch.distributed`` without steps."""
        return self._is_blind and not self._steps

    def now(self, now_s: float) -> Goodput:
        """Return the account at a moment of the run; a step in progress is taken for useful."""
        badput_s, open_s = dict(self._badput_s), max(0.0, now_s - self._until_s)
        useful_s = self._useful_s
        if self._state in ("start_up", "restart"):
            badput_s[self._state] += open_s
        elif self._state == "training" and self._outage is None:
            useful_s += open_s
        return Goodput(wall_s=max(now_s, self._until_s), useful_s=useful_s, badput_s=badput_s)

    def close(self, end_s: float) -> Goodput | None:
        """Attribute the rest of the time, until the launcher ended; return the account, None if it is unknown."""
        if self._state == "training":
            self._finish(end_s)
        self._wait(end_s)
        if self.is_unknown:
            return None
        return Goodput(wall_s=max(end_s, self._until_s), useful_s=self._useful_s, badput_s=dict(self._badput_s))

    # --- time

    def _elapse(self, to_s: float) -> float:
        """Return the seconds from the last attributed moment to ``to_s``, and count them as attributed."""
        seconds = max(0.0, to_s - self._until_s)
        self._until_s += seconds
        return seconds

    def _wait(self, to_s: float, redone_s: float = 0.0) -> None:
        """Attribute time outside training; ``redone_s`` is the work that a restart discarded."""
        if self._state == "restart":
            self._note({"restart": self._elapse(to_s)}, redone_s)
        else:
            self._badput_s[self._state] += self._elapse(to_s)

    # --- training

    def _begin(self, record: RunStarted) -> None:
        self._is_blind = self._is_blind or record.is_distributed
        if self._state == "training":
            return  # another worker, or a newcomer
        redone_s = self._discard(record.step) if self._state == "restart" else 0.0
        self._wait(record.t_s, redone_s)
        self._state = "training"

    def _commit(self, record: StepCommitted) -> None:
        if self._steps and record.step <= self._steps[-1][0]:
            return  # a new lead repeats the last step
        if self._outage is not None and self._outage.said:
            self._resolve()
        if self._outage is not None:  # committed by some, while others had detected a failure
            self._useful_s, self._outage.work_s = self._useful_s + self._outage.work_s, 0.0
        elif self._state == "training":
            self._work(self._elapse(record.t_s), record.t_s)
        elif self._state == "idle":
            self._useful_s += self._elapse(record.t_s)
        self._steps.append((record.step, self._useful_s))
        if len(self._steps) >= self._thin_at:
            self._thin()
        self._deaths.clear()

    def _thin(self) -> None:
        """Leave out old steps that no restart goes back to."""
        old, new = self._steps[:-_KEPT_STEPS], self._steps[-_KEPT_STEPS:]
        self._steps = [(step, useful_s) for step, useful_s in old if step + 1 in self._saved] + new
        self._thin_at = len(self._steps) + _KEPT_STEPS

    def _work(self, seconds: float, at_s: float) -> None:
        """Count the time of a committed step, less that for checkpoints and for a slow worker."""
        seconds = self._without_hold(seconds)
        self._durations_s.append(seconds)
        slow = self._slow
        is_slow = slow is not None and slow.score > 1 and at_s <= slow.t_s + _STRAGGLES_S
        waited_s = seconds * (1 - 1 / slow.score) if slow is not None and is_slow else 0.0
        self._badput_s["straggler_wait"] += waited_s
        self._useful_s += seconds - waited_s

    def _without_hold(self, seconds: float) -> float:
        held_s = min(self._held_s, seconds)
        self._held_s -= held_s
        self._badput_s["checkpoint_held"] += held_s
        return seconds - held_s

    def _finish(self, t_s: float) -> None:
        self._resolve(t_s)
        self._badput_s["idle"] += self._without_hold(self._elapse(t_s))
        self._state = "idle"

    def _discard(self, step: int) -> float:
        """Discard the committed steps from ``step`` on; return how long they took."""
        before_s = self._useful_s
        while self._steps and self._steps[-1][0] >= step:
            self._steps.pop()
            before_s = self._steps[-1][1] if self._steps else 0.0
        discarded_s, self._useful_s = self._useful_s - before_s, before_s
        self._badput_s["step_redone"] += discarded_s
        return discarded_s

    # --- failures

    def _detect(self, record: Record) -> None:
        outage = self._outage
        if outage is not None and any(decision.rank == record.rank for decision in outage.said):
            self._resolve()  # the next failure, before others had decided about the last one
        if self._state == "training" and self._outage is None:
            self._outage = self._interrupted(record.t_s)

    def _interrupted(self, known_s: float) -> _Outage:
        """Attribute the time since the last commit, until a failure was detected."""
        begin_s, before = self._until_s, dict[str, float]()
        dead_s, phase = min((death for death in self._deaths if begin_s <= death[0] <= known_s), default=(None, ""))
        if self._durations_s and phase != "allreduce":  # survivors had work for the usual duration of a step
            waits_s = max(dead_s or begin_s, min(begin_s + median(self._durations_s), known_s))
        else:
            waits_s = known_s if dead_s is None else dead_s
        for fenced in self._fenced:
            waits_s = min(waits_s, max(begin_s, fenced.t_s - fenced.silent_s))
        work_s = self._without_hold(self._elapse(waits_s))
        if self._fenced:
            before["stall"] = self._elapse(min(known_s, max(fenced.t_s for fenced in self._fenced)))
        before["detection"] = self._elapse(known_s)
        self._deaths.clear()
        self._fenced.clear()
        return _Outage(before=before, work_s=work_s)

    def _decide(self, record: Recovered) -> None:
        outage = self._outage
        decisions = outage.said if outage is not None else []
        is_next = record.generation > (decisions[0].generation if decisions else self._generation)
        is_heal = outage is not None and record.decision == "heal"  # needs no new communicator
        is_of_last = not is_next and not (decisions and record.generation == decisions[0].generation) and not is_heal
        if self._state != "training" or is_of_last:
            return  # or written by a slow survivor, after the others resumed
        if decisions and is_next:
            self._resolve()
            outage = None
        if outage is None:
            work_s = self._without_hold(self._elapse(record.t_s - record.held_s))
            outage = self._outage = _Outage(work_s=work_s)
        if self._slow is not None and self._slow.rank in record.lost:
            self._slow = None
        outage.said.append(record)
        self._generation = record.generation

    def _resolve(self, to_s: float = 0.0) -> None:
        """Attribute the time of the recovery in progress; without a decision until ``to_s``, it was agreement."""
        outage, self._outage = self._outage, None
        if outage is None:
            return
        parts = outage.before
        if outage.said:
            parts |= _split(self._elapse(outage.last_s), outage.times_s, outage.rebuilt)
            counts = outage.said[0].decision in ("continue", "grow") or not outage.redone_steps
            redone_s = self._count(outage.work_s, counts=counts)
            redone_s += self._discard(max(record.step for record in outage.said))
        else:
            parts["agreement"] = self._elapse(to_s)
            redone_s = self._count(outage.work_s, counts=False)
        self._note(parts, redone_s)

    def _note(self, parts: dict[str, float], redone_s: float) -> None:
        """Count the parts of a recovery; the discarded work is counted already."""
        for name, seconds in parts.items():
            self._badput_s[name] += seconds
        whole = dict.fromkeys(RECOVERY_PARTS, 0.0) | parts | {"step_redone": redone_s}
        self._recoveries.append((self._until_s, whole))

    def _count(self, work_s: float, *, counts: bool) -> float:
        """Count work on the step in progress; return how much of it was discarded."""
        if counts:
            self._useful_s += work_s
            return 0.0
        self._badput_s["step_redone"] += work_s
        return work_s

    def _restart(self, record: JobRestarted) -> None:
        if self._state == "training":
            if self._outage is not None and self._outage.said:
                self._resolve()
            self._give_up(record.t_s)
        else:
            self._wait(record.t_s)
        self._state, self._generation, self._slow = "restart", -1, None
        self._deaths.clear()
        self._fenced.clear()

    def _give_up(self, t_s: float) -> None:
        """Attribute the time until the launcher restarted a job whose workers did not recover."""
        outage, self._outage = self._outage, None
        if outage is None:
            outage = self._ended(t_s, min([t_s, *(dead_s for dead_s, _ in self._deaths if dead_s >= self._until_s)]))
        redone_s = self._count(outage.work_s, counts=False)
        self._note(outage.before | {"restart": self._elapse(t_s)}, redone_s)

    def _ended(self, t_s: float, dead_s: float) -> _Outage:
        """Attribute the time since the last commit: at ``dead_s`` a worker died, at ``t_s`` the launcher restarts the job.

        If the former took longer than a step, the workers waited for each other, and the launcher ended them.
        """
        usual_s = median(self._durations_s) if self._durations_s else dead_s - self._until_s
        work_s = self._without_hold(self._elapse(min(dead_s, self._until_s + usual_s)))
        stall_s = self._elapse(dead_s)
        return _Outage(before={"stall": stall_s, "detection": self._elapse(t_s)}, work_s=work_s)


def _split(whole_s: float, times_s: Mapping[str, float], rebuilt: Sequence[Reinitialised]) -> dict[str, float]:
    """Divide the time of a recovery by what its actions did, as long as the slowest survivor took for each."""
    transfer_s = sum(seconds for name, seconds in times_s.items() if name in _TRANSFER)
    rebuild_s = sum(seconds for name, seconds in times_s.items() if name in _REBUILD)
    if rebuilt:
        rebuild_s = times_s.get("Shrink", 0.0) + max(record.rebuild_s for record in rebuilt)
        transfer_s += max(record.snapshot_s + record.load_s for record in rebuilt)
    scale = min(1.0, whole_s / (transfer_s + rebuild_s)) if transfer_s + rebuild_s > 0 else 0.0
    rebuild_s, transfer_s = scale * rebuild_s, scale * transfer_s
    agreement_s = max(0.0, whole_s - rebuild_s - transfer_s)
    return {"agreement": agreement_s, "rebuild": rebuild_s, "state_transfer": transfer_s}
