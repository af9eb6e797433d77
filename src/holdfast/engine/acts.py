"""What a training loop does on the order of a recovery strategy: discard, hand over, welcome, move parts, load, stop.

Every act may be interrupted by a further failure and is then ordered again, so it is safe to do twice.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.comm import VirtualCommunicator
from holdfast.engine.context import World
from holdfast.engine.executor import Attempts
from holdfast.engine.exits import kill_self
from holdfast.engine.injection import FaultPoints
from holdfast.engine.live_config import Requests
from holdfast.engine.recovery_log import Recovering
from holdfast.engine.regroup import Status
from holdfast.engine.run_log import RunLog
from holdfast.errors import InternalError, StateLost, Unwind
from holdfast.integrity.sdc_guard import Watch
from holdfast.models.trainable import Trainable
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
from holdfast.state.restorer import Beginning


class Acts:
    """Carries out the orders of a strategy.

    Args:
        world: What outlives the loop.
        replica: The model.
        status: What was heard in closing sums and is forgotten with the step, or comes back with the state.
        log: Writes down.
        points: Let faults strike.
        recovery: Hears what was decided.
        watch: Hears that a step was taken back.
        attempts: The step in progress.
        beginning: Saves and restores the state.
        requests: Changes to the running job.
        is_newcomer: The others have begun without this worker.
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
        beginning: Beginning,
        requests: Requests,
        *,
        is_newcomer: bool,
    ) -> None:
        self._world = world
        self._replica = replica
        self._status = status
        self._log = log
        self._points = points
        self._recovery = recovery
        self._watch = watch
        self._attempts = attempts
        self._beginning = beginning
        self._requests = requests
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
                self._attempts.hand_over(bucket, source)
                return HandedOver(step, bucket)
            case LoadCheckpoint():
                return CheckpointLoaded(self._load())
            case DiscardStep():
                self.discard()
            case Welcome(step=step, newcomers=newcomers):
                self._welcome(step, newcomers)
            case Install():
                self._beginning.install()
                self._beginning.keep_on_joining()
            case Rehome(restores=restores):
                self._rehome(restores=restores)
            case Settle():
                self._replica.settle()
            case TakeChanges():
                self._recovery.end()
                self._requests.take()
            case MakeChanges():
                self._requests.make()
                self._status.heard &= ~Note.ASK
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
        is_computing = self._attempts.batch is not None
        self._recovery.take_back(was_computing=is_computing)
        self._watch.taken_back()
        if is_computing:
            self._replica.discard_step()
            self._forget_stop()  # whoever heard it of a closed step has no step in progress
        self._attempts.batch = None

    def _forget_stop(self) -> None:
        """Forget that a script asked to stop: it will ask again."""
        self._world.asked &= ~Note.STOP
        self._status.heard &= ~Note.STOP

    # -- members and parts

    def _welcome(self, step: int, newcomers: tuple[int, ...]) -> None:
        self._points.reach("rejoin", step)
        self._recovery.expect(newcomers)
        self._beginning.welcome(newcomers)

    def _rehome(self, *, restores: bool) -> None:
        self._points.reach("rehome")
        try:
            self._replica.rehome(restores=restores)
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
        world, status = self._world, self._status
        reached = self._reached()
        self.discard()
        self._forget_stop()
        status.save_due = False
        lost = self._replica.lost(world.comm.members)
        went_back = self._beginning.load(trained=status.announced or self._is_newcomer)
        if lost and world.is_lead:
            what = f"{'parts' if len(lost) > 1 else 'part'} {', '.join(map(str, lost))} of the model"
            self._log.warn(f"nobody is left who holds {what}: all go back to step {world.step}")
        self._recovery.decide("heal" if went_back else "load", reached - world.step if status.announced else 0)
        if world.snapshot is not None:
            status.heard |= Note(world.snapshot.info["heard"])
        if self._recovery.now is not None and world.rebuilding is not None:
            world.rebuilding.loaded_s = world.clock.now_s()
            self._recovery.decide("reinit", world.rebuilding.reached - world.step)
        return world.step

    def _reached(self) -> int:
        """Return how many steps this worker has begun."""
        return self._world.step + int(self._attempts.batch is not None)

    def _unwound(self) -> Unwind:
        """Make everything ready for the next application, and return what tells ``holdfast.reinit`` to build it."""
        began_s, reached = self._world.clock.now_s(), self._reached()
        self.discard()
        self._log.write_last_step()
        self._beginning.take_snapshot(self._status.heard)
        hand_over(self._world, self._recovery.rebuilding(reached=reached, began_s=began_s))
        return Unwind()

    def _begin_job_again(self, lost: StateLost) -> NoReturn:
        """Let the launcher start the job again, as when all workers have died."""
        if not self._world.settings.run_dir or isinstance(self._world.comm, VirtualCommunicator):
            raise lost
        self._log.warn(str(lost))
        kill_self()

    # -- too few workers

    def _save_and_stop(self) -> None:
        self._status.outcome = "gave-up"
        self._recovery.decide("stop")
        self._beginning.save()
