"""Regrouping after a failure, carried out: the only calls of ``revoke``, ``agree``, ``shrink`` and ``share_progress``.

The sequence is :mod:`holdfast.recovery.regroup`. The ``torch.distributed`` backend goes through it in one call of
:func:`regroup`. In a training session the protocol goes through it, order by order, because it is then between two
events like any other; :class:`Regroup` carries the orders out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import PeerFailed
from holdfast.recovery.messages import (
    NO_NOTE,
    VOTED,
    Agree,
    Agreed,
    Event,
    Note,
    Parted,
    Progress,
    ProgressKnown,
    Revoke,
    Revoked,
    ShareProgress,
    Shrink,
    Shrunk,
)
from holdfast.recovery.regroup import Line, line_after

if TYPE_CHECKING:
    from holdfast.comm import Communicator
    from holdfast.engine.context import World
    from holdfast.engine.executor import Attempts
    from holdfast.engine.injection import FaultPoints
    from holdfast.engine.recovery_log import Recovering
    from holdfast.engine.run_log import RunLog
    from holdfast.integrity.certificate import Certificate
    from holdfast.integrity.sdc_guard import Watch
    from holdfast.models.trainable import Trainable

Known = TypeVar("Known")


def regroup(comm: Communicator, share: Callable[[], Known], *, told: bool = False) -> Known:
    """Regroup the survivors, through all further failures, and return what all of them then know.

    Args:
        comm: Of which a member has died; afterwards its members are the survivors.
        share: Shares how far every survivor is; raises PeerFailed if it did not complete here.
        told: An agreement on ``comm`` said no, so every survivor comes here by itself.
    """
    line: Line | None = Line.SHRINK if told else Line.REVOKE
    while True:
        succeeded = True
        match line:
            case Line.REVOKE:
                comm.revoke()
            case Line.HEARD:
                comm.agree(False)
            case Line.SHRINK:
                comm.shrink()
            case Line.FENCE | Line.CONFIRM:
                succeeded = comm.agree(True)
            case Line.SHARE:
                try:
                    known = share()
                except PeerFailed:
                    succeeded = False
            case None:
                return known
        line = line_after(line, succeeded=succeeded)


def pass_gate(comm: Communicator, recover: Callable[[], object]) -> None:
    """Return once all members call this: none leaves while another may need it to recover.

    Args:
        comm: Of all who leave.
        recover: Regroups after an agreement that said no.
    """
    while not comm.agree(True):
        recover()


@dataclass(slots=True)
class Status:
    """What a training loop has heard and not acted on yet, and how it will end.

    Args:
        heard: Flags of closing sums; a worker that missed one hears them while progress is shared.
        save_due: A checkpoint was asked for; since a step was closed until the next one is stable.
        outcome: ``"done"``, ``"stopped"`` (on request), ``"gave-up"`` (too few workers) or ``"left"`` (the others continue).
        announced: The loop's first step was begun, and its start written down.
    """

    heard: Note = NO_NOTE
    save_due: bool = False
    outcome: str = "done"
    announced: bool = False


class Regroup:
    """Carries out the orders of regrouping in a training loop, and the agreements of the protocol.

    Args:
        world: Whose communicator.
        replica: Says whether a part of the model is lost with the dead.
        status: What closing sums have said is shared with the progress.
        log: Marks where this worker is.
        points: Let faults strike.
        recovery: Hears of failures that an agreement reports.
        watch: Whether state or messages were found corrupt is shared with the progress.
        attempts: The step in progress.
        certificate: What the last closing sum said of the state is shared with the progress; None if there is none.
    """

    def __init__(
        self,
        world: World,
        replica: Trainable,
        status: Status,
        log: RunLog,
        points: FaultPoints,
        recovery: Recovering,
        watch: Watch,
        attempts: Attempts,
        certificate: Certificate | None,
    ) -> None:
        self._world = world
        self._replica = replica
        self._status = status
        self._log = log
        self._points = points
        self._recovery = recovery
        self._watch = watch
        self._attempts = attempts
        self._certificate = certificate

    def carry_out(self, order: Revoke | Agree | Shrink | ShareProgress) -> Event:
        """Carry one order out.

        Raises:
            PeerFailed: if progress could not be shared.
            StoreLost: if no agreement is possible any more.
        """
        match order:
            case Revoke():
                self._world.comm.revoke()
                return Revoked()
            case Agree(flag=flag):
                return Agreed(self._agree(flag))
            case Shrink():
                return Shrunk() if self._shrink() else Parted()
            case ShareProgress(progress=progress):
                return self._share(progress)

    def _agree(self, flag: bool) -> bool:
        self._log.mark("recovery" if self._recovery.now else "gate")
        value = self._world.comm.agree(flag)
        if flag and not value:
            self._recovery.see_failure()
        return value

    def _shrink(self) -> bool:
        """Return whether this worker is a member of what was made; it is not if it asked to leave."""
        world, status = self._world, self._status
        changes, status.heard = status.heard & Note.CHANGE, status.heard & ~Note.CHANGE
        parts = bool(changes) and world.parts
        if parts:
            self._finish_checkpoints()
        before = world.comm.members
        if not world.comm.shrink(admits=world.loop if changes else -1, leaves=parts):
            status.outcome = "left"
            return False
        world.announce()
        world.beacon.say_recovered(in_vain=world.comm.members == before)
        world.keeper.note_alive(world.comm.members)
        self._points.reach("recovery")
        return True

    def _finish_checkpoints(self) -> None:
        """Write what others count on before this worker leaves them; what does not count yet they begin again."""
        self._world.keeper.drop()
        for outcome in self._world.keeper.finish():
            self._log.saved(outcome)

    def _share(self, mine: Progress) -> ProgressKnown:
        heard = 0 if self._certificate is None else self._certificate.heard
        flagged = dataclasses.replace(mine, flags=self._flags(), heard=heard)
        known = self._world.comm.share_progress(flagged)
        if self._certificate is not None and self._attempts.batch is not None:
            self._certificate.learn(self._world.step, known, self._replica.num_buckets)
        for other in known.values():
            self._hear(other.flags)
        return ProgressKnown(known, self._replica.num_buckets)

    def _flags(self) -> Note:
        return (
            self._status.heard
            | Note.SAVE.when(self._status.save_due)
            | Note.CALM.when(self._recovery.is_calm)
            | Note.LOST.when(bool(self._replica.lost(self._world.comm.members)))
            | Note.CORRUPT.when(self._watch.corrupt)
            | Note.ALTERED.when(self._watch.altered)
        )

    def _hear(self, flags: Note) -> None:
        """Take over what another worker has heard. A change is met for once; CALM, LOST and ALTERED are for the strategy."""
        self._status.heard |= flags & VOTED
        self._status.save_due |= bool(flags & Note.SAVE)
        self._watch.corrupt |= bool(flags & Note.CORRUPT)
