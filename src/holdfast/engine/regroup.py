"""Carries out regrouping after a failure: the only calls of ``revoke``, ``agree``, ``shrink`` and ``share_progress``.

The sequence is defined in :mod:`holdfast.recovery.regroup`. The ``torch.distributed`` backend runs it in one call of
:func:`regroup`. A training session runs it one action at a time, because the protocol treats each as an event;
:class:`LoopRegroup` carries those actions out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.errors import PeerFailed
from holdfast.recovery.messages import (
    NO_NOTE,
    VOTED,
    Agree,
    Agreed,
    Event,
    LeftGroup,
    Note,
    Progress,
    ProgressKnown,
    Revoke,
    Revoked,
    ShareProgress,
    Shrink,
    Shrunk,
)
from holdfast.recovery.regroup import RegroupLine, line_after

if TYPE_CHECKING:
    from holdfast.engine.executor import StepExecutor
    from holdfast.engine.injection import FaultPoints
    from holdfast.engine.live_config import LiveConfig
    from holdfast.engine.recovery_log import RecoveryLog
    from holdfast.engine.restorer import StateRestorer
    from holdfast.integrity.certificate import Certificate
    from holdfast.integrity.sdc_guard import SdcGuard
    from holdfast.models.trainable import Trainable
    from holdfast.state.context import JobContext
    from holdfast.state.run_log import RunLog

Known = TypeVar("Known")


class Agreeing(Protocol):
    """The part of a :class:`~holdfast.comm.Communicator` that regroups its workers."""

    @property
    def has_atomic_shrink(self) -> bool:
        """Whether a shrink needs no fence; see :attr:`Communicator.has_atomic_shrink`."""

    def revoke(self) -> None:
        """Wake all members; see :meth:`Communicator.revoke`."""

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; see :meth:`Communicator.agree`."""

    def shrink(self) -> object:
        """Start a new generation; see :meth:`Communicator.shrink`."""


def regroup(comm: Agreeing, share: Callable[[], Known], *, told: bool = False, joins: bool = False) -> Known:
    """Regroup the survivors, through all further failures, and return the shared knowledge of all survivors.

    Args:
        comm: The communicator with a failed member; afterwards its members are the survivors.
        share: Exchanges the progress of all survivors; raises PeerFailed if that did not complete here.
        told: An agreement on ``comm`` returned False, so every survivor regroups without a revoke.
        joins: This worker was admitted in the shrink.
    """
    line: RegroupLine | None = RegroupLine.SHRINK if told else RegroupLine.FENCE if joins else RegroupLine.REVOKE
    while True:
        succeeded = True
        match line:
            case RegroupLine.REVOKE:
                comm.revoke()
            case RegroupLine.HEARD:
                comm.agree(False)
            case RegroupLine.SHRINK:
                comm.shrink()
            case RegroupLine.FENCE:
                succeeded = comm.has_atomic_shrink or comm.agree(True)
            case RegroupLine.CONFIRM:
                succeeded = comm.agree(True)
            case RegroupLine.SHARE:
                try:
                    knowledge = share()
                except PeerFailed:
                    succeeded = False
            case None:
                return knowledge
        line = line_after(line, succeeded=succeeded)


def pass_gate(comm: Agreeing, recover: Callable[[], object]) -> None:
    """Return once all members call this, so that no worker leaves while another may need it to recover.

    Args:
        comm: The communicator of all workers that leave.
        recover: Regroups after an agreement that returned False.
    """
    while not comm.agree(True):
        recover()


@dataclass(slots=True)
class LoopStatus:
    """Results of commit votes that this loop has not acted on yet, and how the loop will end.

    Args:
        flags: Flags from commit votes; a worker that missed a vote receives them when progress is shared.
        save_due: A checkpoint was requested; set from a step's commit vote until the step is durable.
        outcome: ``"done"``, ``"stopped"`` (on request), ``"gave-up"`` (too few workers) or ``"left"`` (after SIGTERM).
        announced: The loop's first step was begun, and the start was recorded.
    """

    flags: Note = NO_NOTE
    save_due: bool = False
    outcome: str = "done"
    announced: bool = False


@dataclass(slots=True, kw_only=True)
class LoopParts:
    """The components of a training loop, shared by everything that carries out its actions."""

    job: JobContext  # the job context, which outlives the loop
    trainable: Trainable  # the model
    status: LoopStatus  # results of commit votes that are dropped with the step, or restored with the state
    log: RunLog  # writes records
    points: FaultPoints  # triggers planned faults
    recovery: RecoveryLog  # logs failures and decisions
    guard: SdcGuard  # the guard against silent data corruption in state or messages
    executor: StepExecutor  # the step in progress
    certificate: Certificate | None  # the hash chain of committed steps; None if there is none
    restorer: StateRestorer  # saves and restores the state
    live_config: LiveConfig  # changes to the running job


class LoopRegroup:
    """Carries out the regrouping actions of a training loop, and the protocol's agreements."""

    def __init__(self, loop: LoopParts) -> None:
        self._loop = loop

    def carry_out(self, order: Revoke | Agree | Shrink | ShareProgress) -> Event:
        """Carry out one action.

        Raises:
            PeerFailed: if progress could not be shared.
            StoreLost: if the membership store is lost, so that no agreement is possible.
        """
        match order:
            case Revoke():
                self._loop.job.comm.revoke()
                return Revoked()
            case Agree(fences=True) if self._loop.job.comm.has_atomic_shrink:
                return Agreed(True)
            case Agree(flag=flag):
                return Agreed(self._agree(flag))
            case Shrink():
                return Shrunk() if self._shrink() else LeftGroup()
            case ShareProgress(progress=progress):
                return self._share_progress(progress)

    def _agree(self, flag: bool) -> bool:
        self._loop.log.mark("recovery" if self._loop.recovery.now else "gate")
        value = self._loop.job.comm.agree(flag)
        if flag and not value:
            self._loop.recovery.see_failure()
        return value

    def _shrink(self) -> bool:
        """Return whether this worker is a member of the new communicator; it is not if it asked to leave."""
        job, status = self._loop.job, self._loop.status
        changes, status.flags = status.flags & Note.CHANGE, status.flags & ~Note.CHANGE
        parts = bool(changes) and job.pending.leaves
        if parts:
            self._finish_checkpoints()
        before = job.comm.members
        if not job.comm.shrink(admits=job.loop if changes else -1, leaves=parts):
            status.outcome = "left"
            return False
        job.announce()
        job.beacon.publish_recovered(in_vain=job.comm.members == before)
        job.checkpoints.note_alive(job.comm.members)
        self._loop.points.reach("recovery")
        return True

    def _finish_checkpoints(self) -> None:
        """Before this worker leaves, finish the checkpoint writes that others rely on; drop those they will redo."""
        self._loop.job.checkpoints.drop()
        for outcome in self._loop.job.checkpoints.finish():
            self._loop.log.saved(outcome)

    def _share_progress(self, progress: Progress) -> ProgressKnown:
        digest = 0 if self._loop.certificate is None else self._loop.certificate.received
        flagged = dataclasses.replace(progress, flags=self._flags(), heard=digest)
        progress_by_rank = self._loop.job.comm.share_progress(flagged)
        if self._loop.certificate is not None and self._loop.executor.batch is not None:
            self._loop.certificate.learn(self._loop.job.step, progress_by_rank, self._loop.trainable.num_buckets)
        for other in progress_by_rank.values():
            self._adopt_flags(other.flags)
        return ProgressKnown(progress_by_rank, self._loop.trainable.num_buckets)

    def _flags(self) -> Note:
        return (
            self._loop.status.flags
            | Note.SAVE.when(self._loop.status.save_due)
            | Note.PLANNED.when(self._loop.recovery.is_planned)
            | Note.LOST.when(bool(self._loop.trainable.lost(self._loop.job.comm.members)))
            | Note.CORRUPT.when(self._loop.guard.corrupt)
            | Note.ALTERED.when(self._loop.guard.altered)
        )

    def _adopt_flags(self, flags: Note) -> None:
        """Adopt the flags of another worker. CHANGE is handled once; PLANNED, LOST and ALTERED are for the strategy."""
        self._loop.status.flags |= flags & VOTED
        self._loop.status.save_due |= bool(flags & Note.SAVE)
        self._loop.guard.corrupt |= bool(flags & Note.CORRUPT)
