"""What a training loop does on the order of a recovery strategy: discard, hand over, welcome, move parts, load, stop.

Every act may be interrupted by a further failure and is then ordered again, so it is safe to do twice.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.comm import VirtualCommunicator
from holdfast.engine.exits import kill_self
from holdfast.engine.regroup import LoopParts
from holdfast.errors import InternalError, StateLost, Unwind
from holdfast.recovery.messages import (
    ActDone,
    Action,
    CheckpointLoaded,
    DiscardStep,
    Event,
    HandedOver,
    HandOver,
    Install,
    LoadCheckpoint,
    MakeChanges,
    Note,
    Rehome,
    Reinitialise,
    SaveAndStop,
    Settle,
    TakeChanges,
    Welcome,
)
from holdfast.session.reinit_context import hand_over


class Acts:
    """Carries out the orders of a strategy.

    Args:
        loop: What the loop is made of.
        is_newcomer: The others have begun without this worker.
    """

    def __init__(self, loop: LoopParts, *, is_newcomer: bool) -> None:
        self._loop = loop
        self._is_newcomer = is_newcomer

    def carry_out(self, order: Action) -> Event:
        """Carry one order out.

        Raises:
            PeerFailed: if a worker that is needed for it has died.
            StoreLost: if no agreement is possible any more.
            Unwind: if the application is to be built again.
        """
        match order:
            case HandOver(step=step, bucket=bucket, source=source):
                self._loop.attempts.hand_over(bucket, source)
                return HandedOver(step, bucket)
            case LoadCheckpoint():
                return CheckpointLoaded(self._load())
            case DiscardStep():
                self.discard()
            case Welcome(step=step, newcomers=newcomers):
                self._welcome(step, newcomers)
            case Install():
                self._loop.beginning.install()
                self._loop.beginning.keep_on_joining()
            case Rehome(restores=restores):
                self._rehome(restores=restores)
            case Settle():
                self._loop.replica.settle()
            case TakeChanges():
                self._loop.recovery.end()
                self._loop.requests.take()
            case MakeChanges():
                self._loop.requests.make()
                self._loop.status.heard &= ~Note.ASK
            case Reinitialise():
                raise self._unwound()
            case SaveAndStop():
                self._save_and_stop()
            case _:
                raise InternalError(f"unknown order {order}")
        return ActDone()

    # -- the step in progress

    def discard(self) -> None:
        """Take the step in progress back, if there is one."""
        is_computing = self._loop.attempts.batch is not None
        self._loop.recovery.take_back(was_computing=is_computing)
        self._loop.watch.taken_back()
        if is_computing:
            self._loop.replica.discard_step()
            self._forget_stop()  # whoever heard it of a closed step has no step in progress
        self._loop.attempts.batch = None

    def _forget_stop(self) -> None:
        """Forget that a script asked to stop: it will ask again."""
        self._loop.world.told.notes &= ~Note.STOP
        self._loop.status.heard &= ~Note.STOP

    # -- members and parts

    def _welcome(self, step: int, newcomers: tuple[int, ...]) -> None:
        self._loop.points.reach("rejoin", step)
        self._loop.recovery.expect(newcomers)
        self._loop.beginning.welcome(newcomers)

    def _rehome(self, *, restores: bool) -> None:
        self._loop.points.reach("rehome")
        try:
            self._loop.replica.rehome(restores=restores)
        except StateLost as lost:
            self._begin_job_again(lost)

    # -- going back further

    def _load(self) -> int:
        """Load a checkpoint, or what else all go back to; return the step that is next."""
        try:
            return self._load_newest()
        except StateLost as lost:
            self._begin_job_again(lost)

    def _load_newest(self) -> int:
        world, status = self._loop.world, self._loop.status
        reached = self._reached()
        self.discard()
        self._forget_stop()
        status.save_due = False
        lost = self._loop.replica.lost(world.comm.members)
        went_back = self._loop.beginning.load(trained=status.announced or self._is_newcomer)
        if lost and world.is_lead:
            what = f"{'parts' if len(lost) > 1 else 'part'} {', '.join(map(str, lost))} of the model"
            self._loop.log.warn(f"nobody is left who holds {what}: all go back to step {world.step}")
        self._loop.recovery.decide("heal" if went_back else "load", reached - world.step if status.announced else 0)
        if world.rebuilds.snapshot is not None:
            status.heard |= Note(world.rebuilds.snapshot.info["heard"])
        if self._loop.recovery.now is not None and world.rebuilds.current is not None:
            world.rebuilds.current.loaded_s = world.clock.now_s()
            self._loop.recovery.decide("reinit", world.rebuilds.current.reached - world.step)
        return world.step

    def _reached(self) -> int:
        """Return how many steps this worker has begun."""
        return self._loop.world.step + int(self._loop.attempts.batch is not None)

    def _unwound(self) -> Unwind:
        """Make everything ready for the next application, and return what tells ``holdfast.reinit`` to build it."""
        began_s, reached = self._loop.world.clock.now_s(), self._reached()
        self.discard()
        self._loop.log.write_last_step()
        self._loop.beginning.take_snapshot(self._loop.status.heard)
        hand_over(self._loop.world, self._loop.recovery.rebuilding(reached=reached, began_s=began_s))
        return Unwind()

    def _begin_job_again(self, lost: StateLost) -> NoReturn:
        """Let the launcher start the job again, as when all workers have died."""
        if not self._loop.world.settings.run_dir or isinstance(self._loop.world.comm, VirtualCommunicator):
            raise lost
        self._loop.log.warn(str(lost))
        kill_self()

    # -- too few workers

    def _save_and_stop(self) -> None:
        self._loop.status.outcome = "gave-up"
        self._loop.recovery.decide("stop")
        self._loop.beginning.save()
