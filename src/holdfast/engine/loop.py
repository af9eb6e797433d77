"""One training loop: runs each step (compute, all-reduce, commit vote, optimizer) and reports events to the protocol.

What the protocol orders after a failure is carried out in :mod:`holdfast.engine.recovering`.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterator
from typing import Any

from holdfast.data.ledger import SampleCounts
from holdfast.data.loader import DataSource
from holdfast.data.plan import MiniBatch, SamplePlan
from holdfast.data.seeds import seed_slice
from holdfast.engine.recovering import RecoveringLoop
from holdfast.errors import STOPPED, ConfigError, InternalError, PeerFailed, StoreLost, TooFewWorkers
from holdfast.models.step import Step
from holdfast.models.trainable import Trainable
from holdfast.records.types import Left
from holdfast.recovery.messages import (
    Action,
    Admitted,
    ApplyStep,
    BucketReduced,
    ChangesWait,
    Computed,
    ComputeStep,
    CorruptionSeen,
    DataExhausted,
    Event,
    Leave,
    LoopLeft,
    MembersChange,
    Note,
    Publish,
    ReduceBucket,
    Started,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast.recovery.protocol import ProtocolState
from holdfast.recovery.vote import CommitVote, MinMax, leaver_vote
from holdfast.state.context import JobContext, LoopEnd
from holdfast.state.loop_end import check_saved


class Pause(enum.Enum):
    """Where a loop that the script owns gets control, besides computing a step."""

    BEFORE_STEP = enum.auto()
    """No step is in progress: the last one is applied, or was discarded and will be computed again."""
    BEFORE_UPDATE = enum.auto()
    """The step is committed, and the optimizer runs next: parameters have their mean gradients."""


class TrainingLoop(RecoveringLoop):
    """One call of ``session.steps``, or one pass over a prepared loader.

    Args:
        job: The job context, which outlives the loop.
        trainable: The model and its optimizer.
        plan: Which samples belong to which step.
        source: Where inputs come from.
        is_newcomer: This worker joined a job that was already running.
        pauses: Yield each :class:`Pause`, too.
    """

    def __init__(
        self,
        job: JobContext,
        trainable: Trainable,
        plan: SamplePlan,
        source: DataSource,
        *,
        is_newcomer: bool = False,
        pauses: bool = False,
    ) -> None:
        super().__init__(job, trainable, plan, source, is_newcomer=is_newcomer)
        self._pauses = pauses
        self._is_applied = False
        self._has_left = False

    # -- the loop

    def drive(self) -> Iterator[Step | Pause]:
        """Yield steps to the script, and pauses if requested, until the protocol lets this worker leave."""
        self._end_before, self._job.loops.at_end = self._job.loops.at_end, None
        try:
            yield from self._drive()
        finally:
            self._runner.close()
            self._position.close()

    def _drive(self) -> Iterator[Step | Pause]:
        event: Event = Admitted() if self._is_newcomer else Started()
        if not self._is_newcomer:
            try:
                self._job.announce()
            except StoreLost as lost:
                self._stop_without_store(lost)
        while True:
            for order in self._protocol.handle(event):
                if self._pauses:
                    yield from self._pause(order)
                match order:
                    case Publish(step=step):
                        self._publish(step)
                    case ComputeStep() if self._flags & Note.CHANGE:
                        self._recovery.begin_planned()
                        event = MembersChange()
                    case ComputeStep() if self._flags & Note.ASK:
                        event = ChangesWait()
                    case ComputeStep(step=step):
                        event = yield from self._compute(step)
                    case Leave():
                        self._leave()
                        return
                    case _:
                        event = self._carry_out(order)

    def _pause(self, order: Action) -> Iterator[Pause]:
        """Yield the pause before an action, if there is one, and complete what waits for the script until then."""
        match order:
            case ComputeStep():
                yield Pause.BEFORE_STEP
                if self._is_applied:  # the script may have stepped a scheduler meanwhile
                    self._is_applied = False
                    self._keep_applied()
            case ApplyStep():
                assert self._trainable.whole is not None
                self._trainable.whole.show_gradients(self._runner.in_progress())
                yield Pause.BEFORE_UPDATE

    @property
    def is_stopping(self) -> bool:
        """Whether the workers have agreed that the last committed step is the last one of this loop."""
        return bool(self._flags & Note.STOP)

    def position(self) -> dict[str, Any]:
        """Return the position in the data after the last committed step, and the order in which gradients are added."""
        return {**self._position.info(), "order": self._job.loops.order}

    def leave_here(self) -> None:
        """Make the last committed step the last one of this loop: the script has left it.

        This worker still takes part in the next step, with nothing to add, and votes that it has left: no worker commits
        that step, and all workers end the loop, also those whose scripts have not left it.
        """
        self._has_left = True

    def keep_end(self) -> None:
        """Keep the state after the last committed step, which is the last one of this loop, until the next loop begins."""
        sha256s = self._trainable.sha256s(self._job.comm.local_ranks)
        self._restorer.keep_end(self._log.ends("done", sha256s, self.account()), has_stopped=self.is_stopping)

    def _compute(self, step: int) -> Generator[Step, None, Event]:
        """Let the script compute a step. In a model that is split, workers need each other to begin and to finish."""
        try:
            attempt = self._begin(step)
        except (PeerFailed, StoreLost) as error:
            return self._answer(error)
        if attempt is None:
            return DataExhausted()
        if self._has_left:
            self._runner.give_nothing()
            return Computed()
        begun_s = self._job.clock.now_s()
        yield attempt
        attempt.check_computed()
        if attempt.slices:
            self._job.beacon.publish_computed((self._job.clock.now_s() - begun_s) / len(attempt.slices))
        self._guard.note_computed(self._runner.in_progress())
        try:
            self._runner.finish(attempt)
        except (PeerFailed, StoreLost) as error:
            return self._answer(error)
        return Computed()

    def _carry_out(self, order: Action) -> Event:
        recovery, begun_s = self._recovery.now, 0.0 if self._recovery.now is None else self._job.clock.now_s()
        try:
            event = self._try(order)
        except (PeerFailed, StoreLost) as error:
            event = self._answer(error)
        if recovery is not None:
            recovery.count(order, self._job.clock.now_s() - begun_s)
        return event

    def _try(self, order: Action) -> Event:
        match order:
            case ReduceBucket(bucket=bucket):
                self._recovery.end()
                self._runner.sum_bucket(bucket)
                return BucketReduced()
            case VoteStep(step=step):
                return self._close(step)
            case ApplyStep(step=step):
                self._apply(step)
                return StepApplied()
            case _:
                return self._act(order)

    # -- a step

    def _next_batch(self, step: int) -> MiniBatch | None:
        if step != self._job.step:
            raise InternalError(f"the protocol ordered step {step}, but step {self._job.step} is next")
        self._announce()
        self._recovery.end()
        if self._job.checkpoints.is_outdated(step, self._job.comm.generation):
            self._restorer.save()
        is_over = self._restorer.belongs_to_later_loop
        batch = None if is_over else self._position.next_batch(step, self._job.comm.members)
        if batch is not None:
            if 0 <= self._job.settings.stop_after < step:
                self._flags |= Note.LEAVE
            if not (self._flags or self._outcome == "gave-up"):
                return batch
            # if the script asked to stop as well, the outcome is "done"
            if self._flags == Note.LEAVE and self._outcome == "done":
                self._outcome = "stopped"
        is_last = (
            not self._trainable.is_replicated and self._job.checkpoints.is_named
        )  # its parts cannot be saved later
        if self._outcome == "stopped" or is_last:
            self._restorer.save(has_ended=self._outcome == "done", has_stopped=self.is_stopping)
        self._log.mark("gate")
        return None

    def _begin(self, step: int) -> Step | None:
        """Return the next attempt, None if there is no next step."""
        batch = self._next_batch(step)
        if batch is not None:
            self._points.alter_state(self._trainable, step)
            attempt = self._runner.begin(batch)
            self._fingerprint.take(step)
            if self._certificate is not None:
                self._certificate.begin(step)
            return attempt
        if not self._restorer.belongs_to_later_loop:
            self._trainable.finish()
        return None

    def _close(self, step: int) -> Event:
        """Hold the commit vote on the step; return whether it is committed, corrupt, or after the end of the loop."""
        self._recovery.end()
        self._log.mark("allreduce")
        self._points.reach_in_sum(step, self._trainable.num_buckets)
        vote = self._vote(step)
        outcome = vote.unpack(self._sum.maximum(vote.pack()))
        if outcome.has_left:
            if not outcome.has_all_left:
                self._flags |= Note.STOP
                if self._job.is_lead:
                    self._log.warn(outcome.leaver_line())
                seed_slice(self._position.plan.seed, step - 1, -1)  # as after the last step, at all workers alike
            return LoopLeft()
        if outcome.step.differs:
            raise InternalError(f"workers voted on different steps, {outcome.step.smallest} and {outcome.step.largest}")
        if outcome.data is not None and outcome.data.differs:
            raise ConfigError(self._position.why_differs())
        if self._guard.read(step, outcome.guard):
            self._recovery.see_corruption(redone_steps=int(not self._guard.corrupt))  # a retry repeats the other votes
            return CorruptionSeen()
        if self._certificate is not None:
            self._certificate.read(step, outcome.parts)
        self._flags |= outcome.notes
        self._save_due = bool(outcome.save)
        return StepVoted()

    def _vote(self, step: int) -> CommitVote:
        """Return this worker's vote on the step, which it is ready to commit."""
        job = self._job
        parts = job.pending.leaves  # read once: a signal may arrive meanwhile
        return CommitVote(
            guard=self._guard.fill(step, is_last=self._position.is_last(self._runner.in_progress())),
            parts=self._fingerprint.parts,
            step=leaver_vote(job.comm.local_ranks[-1]) if self._has_left else MinMax(step, step),
            stop=job.pending.ends_loop,
            leave=job.pending.stops_all,
            change=bool(parts or job.comm.newcomers(job.loop)),
            stays=not parts,
            has_store=not job.comm.has_lost_store,
            ask=job.is_lead and self._live_config.are_due(),
            save=self._wants_to_save(),
            data=None
            if (digest := self._position.digest(self._runner.in_progress())) is None
            else MinMax(digest, digest),
        )

    def _wants_to_save(self) -> bool | None:
        """Return whether the lead wants a checkpoint after this step; None if that does not depend on its clock."""
        checkpoints = self._job.checkpoints
        if checkpoints.adaptive is None:
            return None
        is_due = checkpoints.is_due_now()  # evaluated at every worker: any of them may become the lead
        return self._job.is_lead and is_due

    def _apply(self, step: int) -> None:
        job, batch, trainable = self._job, self._runner.in_progress(), self._trainable
        self._points.enter("optimizer")
        lost = trainable.missing_slices(batch)  # this and the next two before apply, which drops the step's gradients
        workers = trainable.computing(batch, lost)
        link = None if self._certificate is None else self._certificate.commit(batch, lost)
        job.committed.metrics = trainable.apply(batch, list(self._runner.names))
        for note in trainable.take_notes():
            if job.is_lead or trainable.summed is None:
                self._log.warn(note)
        samples = self._position.commit(batch, lost)
        self._runner.batch, job.committed.step, job.rebuilds.snapshot = None, step + 1, None
        self._log.committed(batch, samples, len(workers), lost, link)
        if self._pauses:
            self._is_applied = True
        else:
            self._keep_applied()

    def _keep_applied(self) -> None:
        """Keep the state after a step in memory or in a checkpoint, if that is due."""
        job, trainable = self._job, self._trainable
        self._restorer.keep_after_step()
        if job.checkpoints.is_due(job.step) or self._save_due:
            if not trainable.is_replicated and self._recovery.now is not None:
                job.checkpoints.put_off(job.step)  # some parts are placed on failed workers: save after they have moved
            else:
                self._restorer.save()

    # -- the beginning, checkpoints

    def _announce(self) -> None:
        self._end_before = None
        if not self._announced and self._job.loop >= 0:
            self._announced = True
            self._log.started(self._position.plan, self._trainable.num_buckets, self._trainable.numel)

    def _publish(self, durable_step: int) -> None:
        job, checkpoints = self._job, self._job.checkpoints
        self._save_due = False
        checkpoints.publish(durable_step, job.comm.generation, is_lead=job.is_lead)
        at_gate = self._protocol.state is ProtocolState.LAST_GATE
        if at_gate and checkpoints.step is not None:
            self._log.mark("checkpoint")  # no worker leaves before its checkpoint is written, which may take long
        outcomes = checkpoints.finish() if at_gate else checkpoints.poll()
        for outcome in outcomes:
            self._log.saved(outcome)
        if at_gate and self._outcome != "done" and job.is_lead and not self._restorer.belongs_to_later_loop:
            check_saved(job.step, outcomes)

    # -- the end

    def _leave(self) -> None:
        job, trainable = self._job, self._trainable
        if self._runner.batch is not None:
            stops = self._flags & Note.STOP
            self._discard()  # a step that was not committed, because workers have left the loop
            self._flags |= stops  # some have: training ends for all
        trainable.leave()
        if self._outcome == "left":
            self._log.write(Left())
            self._log.warn(f"left the job before step {job.step} because it received SIGTERM")
            raise SystemExit(0)
        self._recovery.end()
        if self._outcome == "done" and (self._restorer.belongs_to_later_loop or job.loop < 0):
            ends = self._log.ends("done", dict.fromkeys(job.comm.local_ranks, ("", "")), job.loops.totals)
            job.loops.at_end = LoopEnd(job.step, None, {}, tuple(ends))  # SIGTERM need not save what was loaded
            self._log.mark("script")
            return  # nothing was trained: the end of such a loop is not the end of training
        if (summary := trainable.summary()) is not None:
            self._log.write(summary)
        if self._certificate is not None:
            self._log.hashed(job.step, job.committed.link, self._certificate.hash_end())
        self._log.finished(self._outcome, trainable.sha256s(job.comm.local_ranks), self.account())
        if self._outcome == "done":
            self._restorer.keep_end(job.loops.finished, has_stopped=self.is_stopping)
        self._log.mark("script")
        job.pending.ends_loop = False
        if self._outcome == "gave-up":
            alive, least = len(job.comm.members), job.settings.min_workers
            raise TooFewWorkers(
                f"{alive} of at least {least} workers are alive; the state before step {job.step} is in {job.checkpoints.url}"
            )
        if self._outcome == "stopped":
            self._log.print_line(f"stopped on request; the state before step {job.step} is in {job.checkpoints.url}")
            raise SystemExit(STOPPED)

    def account(self) -> SampleCounts:
        """Return the account of all samples, including earlier loops."""
        return self._job.loops.totals.plus(self._position.account())
