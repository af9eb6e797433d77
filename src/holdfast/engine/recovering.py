"""What a training loop does after a failure: regroup with the survivors, and carry out what the protocol orders then.

A further failure may interrupt any action. The action is then ordered again, so each one is safe to run twice.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from pathlib import Path
from typing import NoReturn

from holdfast.comm import Communicator, OrderedAllReduce, VirtualCommunicator, device_of, make_allreduce
from holdfast.data.loader import DataSource
from holdfast.data.plan import SamplePlan
from holdfast.data.position import DataPosition
from holdfast.engine.exits import kill_self
from holdfast.engine.injection import FaultPoints
from holdfast.engine.live_config import LiveConfig
from holdfast.engine.recovery_log import RecoveryLog
from holdfast.engine.regroup import Regrouping
from holdfast.engine.reinit_context import hand_over
from holdfast.engine.restorer import StateRestorer
from holdfast.errors import STOPPED, PeerFailed, StateLost, StoreLost, Unwind
from holdfast.integrity.certificate import begin_certificate
from holdfast.integrity.sdc_guard import SdcGuard
from holdfast.models.trainable import StepContext, Trainable
from holdfast.records.paths import launcher_lost_path
from holdfast.recovery import Protocol, make_strategy
from holdfast.recovery.messages import (
    NO_NOTE,
    VOTED,
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
    PeerLost,
    Progress,
    ProgressKnown,
    Reinitialise,
    SaveAndStop,
    SendState,
)
from holdfast.state.context import JobContext, LoopEnd, RebuildInfo, RecoveryContext
from holdfast.state.loop_end import stop_at_end
from holdfast.state.run_log import RunLog
from holdfast.state.store_loss import launcher_died, turn


class RecoveringLoop(Regrouping):
    """The components of a training loop, and what it does with them after a failure.

    Args:
        job: The job context, which outlives the loop.
        trainable: The model and its optimizer.
        plan: Which samples belong to which step.
        source: Where inputs come from.
        is_newcomer: This worker joined a job that was already running.
    """

    def __init__(
        self, job: JobContext, trainable: Trainable, plan: SamplePlan, source: DataSource, *, is_newcomer: bool
    ) -> None:
        self._job = job
        self._trainable = trainable
        self._is_newcomer = is_newcomer
        self._flags = NO_NOTE
        """Flags from commit votes that are not acted on yet; a worker that missed a vote receives them when progress is shared."""
        self._save_due = False
        """Whether a checkpoint was requested; set from a step's commit vote until the step is durable."""
        self._outcome = "done"
        """``"done"``, ``"stopped"`` (on request), ``"gave-up"`` (too few workers) or ``"left"`` (after SIGTERM)."""
        self._announced = job.rebuilds.current is not None
        """Whether the loop's first step was begun, and the start was recorded."""
        self._end_before: LoopEnd | None = None
        """The end of the loop before, until all workers have begun this one."""
        strategy = make_strategy(job.live.strategy, min_workers=job.settings.min_workers)
        self._protocol = Protocol(strategy, trainable.num_buckets, split=not trainable.is_replicated)
        self._log = RunLog(job)
        self._points = FaultPoints(job, self._log)
        self._sum = self._get_sum()
        self._position = DataPosition(plan, job.live.slicing, source)
        self._runner = trainable.begin_loop(
            StepContext(
                job, self._position, self._log, self._sum, source, self._points.enter, self._points.reach_in_sum
            )
        )
        self._fingerprint = trainable.fingerprint(job.comm, job.settings)
        self._guard = SdcGuard(job, trainable.whole, self._fingerprint, self._log)
        self._live_config = LiveConfig(job, trainable, self._position, self._protocol.set_strategy)
        self._restorer = StateRestorer(job, trainable, self._position, self._log, self._live_config, self._guard)
        self._certificate = begin_certificate(job, trainable.figures, self._fingerprint)
        self._recovery = RecoveryLog(job, self._log)

    def _get_sum(self) -> OrderedAllReduce:
        """Return the all-reduce, which keeps its memory in the job context from one training loop to the next."""
        job, trainable = self._job, self._trainable
        if job.loops.sum is None:
            job.loops.sum = make_allreduce(
                job.comm,
                job.loops.order or "fold",  # chosen when a state is loaded
                trainable.size_bytes,
                device=device_of(trainable.device),
                shared_bytes=job.settings.shared_bytes,
                between_hosts=job.settings.between_hosts,
                may_grow=job.comm.can_grow,
            )
        return job.loops.sum

    @abstractmethod
    def _leave(self) -> None:
        """End the loop, with its outcome."""

    def _answer(self, error: PeerFailed | StoreLost) -> Event:
        """Return the event that reports a failure to the protocol, which then orders what follows here."""
        if isinstance(error, StoreLost):
            self._stop_without_store(error)
        self._recovery.see_failure()
        return PeerLost()

    # -- regrouping

    @property
    def _comm(self) -> Communicator:
        return self._job.comm

    def _agree(self, flag: bool) -> bool:
        self._log.mark("recovery" if self._recovery.now else "gate")
        value = super()._agree(flag)
        if flag and not value:
            self._recovery.see_failure()
        return value

    def _shrink(self) -> bool:
        """Start a new generation; return whether this worker is a member of it; it is not if it asked to leave."""
        job = self._job
        changes, self._flags = self._flags & Note.CHANGE, self._flags & ~Note.CHANGE
        parts = bool(changes) and job.pending.leaves
        if parts:
            self._finish_checkpoints()
        before = job.comm.members
        if not job.comm.shrink(admits=job.loop if changes else -1, leaves=parts):
            self._outcome = "left"
            return False
        job.announce()
        job.beacon.publish_recovered(in_vain=job.comm.members == before)
        job.checkpoints.note_alive(job.comm.members)
        self._points.reach("recovery")
        return True

    def _finish_checkpoints(self) -> None:
        """Before this worker leaves, finish the checkpoint writes that others rely on; drop those they will redo."""
        self._job.checkpoints.drop()
        for outcome in self._job.checkpoints.finish():
            self._log.saved(outcome)

    def _share(self, progress: Progress) -> ProgressKnown:
        certificate, comm = self._certificate, self._job.comm
        flags = (
            self._flags
            | Note.SAVE.when(self._save_due)
            | Note.PLANNED.when(self._recovery.is_planned)
            | Note.LOST.when(bool(self._trainable.lost(comm.members)))
            | Note.CORRUPT.when(self._guard.corrupt)
            | Note.ALTERED.when(self._guard.altered)
        )
        digest = 0 if certificate is None else certificate.received
        progress_by_rank = comm.share_progress(dataclasses.replace(progress, flags=flags, heard=digest))
        if certificate is not None and self._runner.batch is not None:
            certificate.learn(self._job.step, progress_by_rank, self._trainable.num_buckets)
        for (
            other
        ) in progress_by_rank.values():  # CHANGE is handled once; PLANNED, LOST and ALTERED are for the strategy
            self._flags |= other.flags & VOTED
            self._save_due |= bool(other.flags & Note.SAVE)
            self._guard.corrupt |= bool(other.flags & Note.CORRUPT)
        return ProgressKnown(progress_by_rank, self._trainable.num_buckets)

    # -- what a strategy orders

    def _act(self, order: Action) -> Event:
        """Carry out an action of the strategy, or a line of the sequence.

        Raises:
            PeerFailed: if a worker that takes part in the action has died.
            StoreLost: if the membership store is lost, so that no agreement is possible.
            Unwind: if the application must be rebuilt.
        """
        match order:
            case HandOver(step=step, bucket=bucket, source=source):
                self._runner.send_bucket(bucket, source)
                return HandedOver(step, bucket)
            case LoadCheckpoint():
                return CheckpointLoaded(self._load())
            case DiscardStep():
                self._discard()
            case SendState(step=step, newcomers=newcomers):
                self._points.reach("rejoin", step)
                self._recovery.expect(newcomers)
                self._restorer.transfer_state(newcomers)
            case AdoptState():
                self._restorer.install()
                self._restorer.keep_on_joining()
            case MoveParts(restores=restores):
                self._points.reach("rehome")
                try:
                    self._trainable.rehome(restores=restores)
                except StateLost as lost:
                    self._begin_job_again(lost)
            case AdoptPlacement():
                self._trainable.settle()
            case FetchConfig():
                self._recovery.end()
                self._live_config.fetch()
            case ApplyConfig():
                self._live_config.apply()
                self._flags &= ~Note.ASK
            case Reinitialise():
                raise self._unwound()
            case SaveAndStop():
                self._outcome = "gave-up"
                self._recovery.decide("stop")
                self._restorer.save()
            case _:
                return self._carry_out_line(order)
        return Done()

    def _discard(self) -> None:
        """Discard the step in progress, if there is one."""
        is_computing = self._runner.batch is not None
        self._recovery.discard_step(was_computing=is_computing)
        self._guard.discarded()
        if is_computing:
            self._trainable.discard_step()
            self._forget_stop()  # a stop that a committed step voted for leaves no step in progress
        self._runner.batch = None

    def _forget_stop(self) -> None:
        """Forget the script's request to stop: the script makes it again when it recomputes the step."""
        self._job.pending.ends_loop = False
        self._flags &= ~Note.STOP

    def _load(self) -> int:
        """Load a checkpoint, or another state that all workers roll back to; return the next step."""
        job, reached = self._job, self._reached()
        self._discard()
        self._forget_stop()
        self._save_due = False
        lost = self._trainable.lost(job.comm.members)
        try:
            went_back = self._restorer.load(trained=self._announced or self._is_newcomer)
        except StateLost as error:
            self._begin_job_again(error)
        if self._restorer.has_stopped:
            self._flags |= Note.STOP
        if lost and job.is_lead:
            what = f"{'parts' if len(lost) > 1 else 'part'} {', '.join(map(str, lost))} of the model"
            self._log.warn(f"no surviving worker holds {what}: all workers roll back to step {job.step}")
        self._recovery.decide("heal" if went_back else "load", reached - job.step if self._announced else 0)
        if job.rebuilds.snapshot is not None:
            self._flags |= Note(job.rebuilds.snapshot.info["heard"])
        if self._recovery.now is not None and job.rebuilds.current is not None:
            job.rebuilds.current.loaded_s = job.clock.now_s()
            self._recovery.decide("reinit", job.rebuilds.current.reached - job.step)
        return job.step

    def _reached(self) -> int:
        """Return the number of steps that this worker has begun."""
        return self._job.step + int(self._runner.batch is not None)

    def _unwound(self) -> Unwind:
        """Save the context for the next application; return the exception that makes ``holdfast.reinit`` build it."""
        began_s, reached = self._job.clock.now_s(), self._reached()
        self._discard()
        self._log.write_last_step()
        self._restorer.take_snapshot(self._flags)
        recovery, now_s = self._recovery.now or RecoveryContext(self._job.comm.members), self._job.clock.now_s()
        hand_over(
            self._job, RebuildInfo(recovery=recovery, reached=reached, snapshot_s=now_s - began_s, unwound_s=now_s)
        )
        return Unwind()

    # -- what no survivor can recover from

    def _begin_job_again(self, lost: StateLost) -> NoReturn:
        """Let the launcher restart the job, as it does when all workers have died."""
        if not self._job.settings.run_dir or isinstance(self._job.comm, VirtualCommunicator):
            raise lost
        self._log.warn(str(lost))
        kill_self()

    def _stop_without_store(self, lost: StoreLost) -> NoReturn:
        """Save the state before the step in progress, unless it is saved, and stop: the membership store is lost.

        If the launcher is alive, other workers may still reach the store and continue. Then only this worker ends.
        """
        job, run_dir = self._job, self._job.settings.run_dir
        has_begun = self._announced and self._protocol.progress.completed >= 0
        if has_begun and not launcher_died(run_dir):
            self._log.warn(f"{lost}; without agreements this worker cannot continue, so it kills itself")
            kill_self()
        if self._end_before is not None and launcher_died(run_dir):  # another may have stopped before this loop
            job.loops.at_end = self._end_before
            stop_at_end(job)
            job.loops.at_end = None  # the watcher's SIGTERM may come now, and asks for the same
            raise SystemExit(STOPPED)
        if not has_begun or not self._trainable.is_replicated:  # a single worker does not hold the whole state
            raise lost
        self._discard()
        with turn(launcher_lost_path(Path(run_dir))):
            outcomes = self._restorer.save_without_store()
        for outcome in outcomes:
            self._log.saved(outcome)
        if not (job.checkpoints.last() >= job.step or self._restorer.belongs_to_later_loop):
            raise lost
        self._recovery.now = None  # without a record: no worker is left to recover with
        self._outcome = "stopped"
        self._leave()
        raise lost  # never reached: stopping ends the script
