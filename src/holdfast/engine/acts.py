"""The recovery actions of a training loop: discard a step, hand over a bucket, send state, move parts, load, stop.

A further failure may interrupt any action. The action is then ordered again, so each one is safe to run twice.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.comm import VirtualCommunicator
from holdfast.engine.exits import kill_self
from holdfast.engine.regroup import LoopParts
from holdfast.engine.reinit_context import hand_over
from holdfast.errors import InternalError, StateLost, Unwind
from holdfast.recovery.messages import (
    Action,
    AdoptPlacement,
    AdoptState,
    ApplyConfig,
    CheckpointLoaded,
    DiscardStep,
    Done,
    Event,
    FetchConfig,
    HandedOver,
    HandOver,
    LoadCheckpoint,
    MoveParts,
    Note,
    Reinitialise,
    SaveAndStop,
    SendState,
)


class StrategyActions:
    """Carries out the actions that a recovery strategy orders.

    Args:
        loop: The components of the training loop.
        is_newcomer: This worker joined a job that was already running.
    """

    def __init__(self, loop: LoopParts, *, is_newcomer: bool) -> None:
        self._loop = loop
        self._is_newcomer = is_newcomer

    def carry_out(self, order: Action) -> Event:
        """Carry out one action.

        Raises:
            PeerFailed: if a worker that takes part in the action has died.
            StoreLost: if the membership store is lost, so that no agreement is possible.
            Unwind: if the application must be rebuilt.
        """
        match order:
            case HandOver(step=step, bucket=bucket, source=source):
                self._loop.executor.send_bucket(bucket, source)
                return HandedOver(step, bucket)
            case LoadCheckpoint():
                return CheckpointLoaded(self._load())
            case DiscardStep():
                self.discard()
            case SendState(step=step, newcomers=newcomers):
                self._send_state(step, newcomers)
            case AdoptState():
                self._loop.restorer.install()
                self._loop.restorer.keep_on_joining()
            case MoveParts(restores=restores):
                self._rehome(restores=restores)
            case AdoptPlacement():
                self._loop.trainable.settle()
            case FetchConfig():
                self._loop.recovery.end()
                self._loop.live_config.fetch()
            case ApplyConfig():
                self._loop.live_config.apply()
                self._loop.status.flags &= ~Note.ASK
            case Reinitialise():
                raise self._unwound()
            case SaveAndStop():
                self._save_and_stop()
            case _:
                raise InternalError(f"unknown action {order}")
        return Done()

    # -- the step in progress

    def discard(self) -> None:
        """Discard the step in progress, if there is one."""
        is_computing = self._loop.executor.batch is not None
        self._loop.recovery.discard_step(was_computing=is_computing)
        self._loop.guard.discarded()
        if is_computing:
            self._loop.trainable.discard_step()
            self._forget_stop()  # a stop that a committed step voted for leaves no step in progress
        self._loop.executor.batch = None

    def _forget_stop(self) -> None:
        """Forget the script's request to stop: the script makes it again when it recomputes the step."""
        self._loop.job.pending.notes &= ~Note.STOP
        self._loop.status.flags &= ~Note.STOP

    # -- members and parts

    def _send_state(self, step: int, newcomers: tuple[int, ...]) -> None:
        self._loop.points.reach("rejoin", step)
        self._loop.recovery.expect(newcomers)
        self._loop.restorer.transfer_state(newcomers)

    def _rehome(self, *, restores: bool) -> None:
        self._loop.points.reach("rehome")
        try:
            self._loop.trainable.rehome(restores=restores)
        except StateLost as lost:
            self._begin_job_again(lost)

    # -- loading and restarting

    def _load(self) -> int:
        """Load a checkpoint, or another state that all workers roll back to; return the next step."""
        try:
            return self._load_newest()
        except StateLost as lost:
            self._begin_job_again(lost)

    def _load_newest(self) -> int:
        job, status = self._loop.job, self._loop.status
        reached = self._reached()
        self.discard()
        self._forget_stop()
        status.save_due = False
        lost = self._loop.trainable.lost(job.comm.members)
        went_back = self._loop.restorer.load(trained=status.announced or self._is_newcomer)
        if self._loop.restorer.has_stopped:
            status.flags |= Note.STOP
        if lost and job.is_lead:
            what = f"{'parts' if len(lost) > 1 else 'part'} {', '.join(map(str, lost))} of the model"
            self._loop.log.warn(f"no surviving worker holds {what}: all workers roll back to step {job.step}")
        self._loop.recovery.decide("heal" if went_back else "load", reached - job.step if status.announced else 0)
        if job.rebuilds.snapshot is not None:
            status.flags |= Note(job.rebuilds.snapshot.info["heard"])
        if self._loop.recovery.now is not None and job.rebuilds.current is not None:
            job.rebuilds.current.loaded_s = job.clock.now_s()
            self._loop.recovery.decide("reinit", job.rebuilds.current.reached - job.step)
        return job.step

    def _reached(self) -> int:
        """Return the number of steps that this worker has begun."""
        return self._loop.job.step + int(self._loop.executor.batch is not None)

    def _unwound(self) -> Unwind:
        """Save the context for the next application; return the exception that makes ``holdfast.reinit`` build it."""
        began_s, reached = self._loop.job.clock.now_s(), self._reached()
        self.discard()
        self._loop.log.write_last_step()
        self._loop.restorer.take_snapshot(self._loop.status.flags)
        hand_over(self._loop.job, self._loop.recovery.rebuilding(reached=reached, began_s=began_s))
        return Unwind()

    def _begin_job_again(self, lost: StateLost) -> NoReturn:
        """Let the launcher restart the job, as it does when all workers have died."""
        if not self._loop.job.settings.run_dir or isinstance(self._loop.job.comm, VirtualCommunicator):
            raise lost
        self._loop.log.warn(str(lost))
        kill_self()

    # -- too few workers

    def _save_and_stop(self) -> None:
        self._loop.status.outcome = "gave-up"
        self._loop.recovery.decide("stop")
        self._loop.restorer.save()
