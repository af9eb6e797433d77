"""One training loop: runs each step (compute, all-reduce, commit vote, optimizer) and reports events to the protocol.

All other actions that the protocol orders are carried out by ``regroup`` and ``acts``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NoReturn

from holdfast.checkpoint.writer import WriteResult
from holdfast.comm import OrderedAllReduce
from holdfast.data.ledger import SampleCounts
from holdfast.data.loader import DataSource
from holdfast.data.plan import MiniBatch, SamplePlan
from holdfast.data.position import DataPosition
from holdfast.engine.acts import StrategyActions
from holdfast.engine.context import JobContext
from holdfast.engine.executor import StepExecutor
from holdfast.engine.exits import kill_self
from holdfast.engine.injection import FaultPoints
from holdfast.engine.live_config import LiveConfig
from holdfast.engine.recovery_log import RecoveryLog
from holdfast.engine.regroup import LoopParts, LoopRegroup, LoopStatus
from holdfast.engine.run_log import RunLog
from holdfast.engine.vote import CommitVote, MinMax
from holdfast.errors import CheckpointError, InternalError, PeerFailed, StoreLost, TooFewWorkers
from holdfast.integrity.certificate import Certificate
from holdfast.integrity.hash_chain import GENESIS
from holdfast.integrity.sdc_guard import SdcGuard
from holdfast.models.trainable import Trainable
from holdfast.records.types import Left
from holdfast.recovery import Protocol, make_strategy
from holdfast.recovery.messages import (
    Action,
    Admitted,
    Agree,
    ApplyStep,
    BucketReduced,
    ChangesWait,
    Computed,
    ComputeStep,
    CorruptionSeen,
    DataExhausted,
    Event,
    Leave,
    MembersChange,
    Note,
    PeerLost,
    Publish,
    ReduceBucket,
    Revoke,
    ShareProgress,
    Shrink,
    Started,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast.recovery.protocol import ProtocolState
from holdfast.session.step import Step
from holdfast.state.restorer import StateRestorer
from holdfast.state.store_loss import launcher_is_gone, turn


class TrainingLoop:
    """One call of ``session.steps``.

    Args:
        world: The job context, which outlives the loop.
        replica: The model and its optimizer.
        plan: Which samples belong to which step.
        source: Where inputs come from.
        is_newcomer: This worker joined a job that was already running.
    """

    def __init__(
        self, world: JobContext, replica: Trainable, plan: SamplePlan, source: DataSource, *, is_newcomer: bool = False
    ) -> None:
        self._world = world
        self._replica = replica
        strategy = make_strategy(world.live.strategy, min_workers=world.settings.min_workers)
        self._protocol = Protocol(strategy, replica.num_buckets, split=not replica.is_replicated)
        self._log = RunLog(world)
        self._points = FaultPoints(world, self._log)
        replica.begin_loop(world, self._log)
        self._fingerprint = replica.fingerprint(world.comm, world.settings)
        self._watch = SdcGuard(world, replica.whole, self._fingerprint, self._log)
        self._sum = self._get_sum()
        self._place = DataPosition(plan, world.live.cut)
        self._requests = LiveConfig(world, replica, self._place, self._protocol.set_strategy)
        self._beginning = StateRestorer(world, replica, self._place, self._log, self._requests, self._watch)
        self._attempts = StepExecutor(world, replica, self._place, self._log, self._points, self._sum, source)
        self._certificate = self._begin_certificate()
        self._status = LoopStatus(announced=world.rebuilds.current is not None)
        self._recovery = RecoveryLog(world, self._log)
        parts = LoopParts(
            world=world,
            replica=replica,
            status=self._status,
            log=self._log,
            points=self._points,
            recovery=self._recovery,
            watch=self._watch,
            attempts=self._attempts,
            certificate=self._certificate,
            beginning=self._beginning,
            requests=self._requests,
        )
        self._regroup, self._acts = LoopRegroup(parts), StrategyActions(parts, is_newcomer=is_newcomer)
        self._is_newcomer = is_newcomer

    def _begin_certificate(self) -> Certificate | None:
        """Return the hash chain of this loop; None if no certificate was requested."""
        world = self._world
        if not world.settings.certificate:
            return None
        world.committed.link = world.committed.link or GENESIS
        return Certificate(world, self._replica.figures, self._fingerprint)

    def _get_sum(self) -> OrderedAllReduce:
        """Return the all-reduce, which keeps its memory in the job context from one training loop to the next."""
        world, replica = self._world, self._replica
        if world.loops.sum is None:
            world.loops.sum = OrderedAllReduce(
                world.comm,
                world.settings.order,
                replica.size_bytes,
                device=replica.device,
                shared_bytes=world.settings.shared_bytes,
            )
        return world.loops.sum

    # -- the loop

    def drive(self) -> Iterator[Step]:
        """Yield steps to the script until the protocol lets this worker leave."""
        try:
            yield from self._drive()
        finally:
            self._attempts.close()

    def _drive(self) -> Iterator[Step]:
        event: Event = Admitted() if self._is_newcomer else Started()
        if not self._is_newcomer:
            self._world.announce()
        while True:
            for order in self._protocol.handle(event):
                match order:
                    case Publish(step=step):
                        self._publish(step)
                    case ComputeStep() if self._status.heard & Note.CHANGE:
                        self._recovery.meet()
                        event = MembersChange()
                    case ComputeStep() if self._status.heard & Note.ASK:
                        event = ChangesWait()
                    case ComputeStep(step=step):
                        event = yield from self._compute(step)
                    case Leave():
                        self._leave()
                        return
                    case _:
                        event = self._carry_out(order)

    def _compute(self, step: int) -> Generator[Step, None, Event]:
        """Let the script compute a step. In a model that is split, workers need each other to begin and to finish."""
        try:
            attempt = self._begin(step)
        except (PeerFailed, StoreLost) as error:
            return self._answer(error)
        if attempt is None:
            return DataExhausted()
        begun_s = self._world.clock.now_s()
        yield attempt
        attempt.check_computed()
        if attempt.slices:
            self._world.beacon.say_computed((self._world.clock.now_s() - begun_s) / len(attempt.slices))
        self._watch.note_computed(self._attempts.in_progress())
        try:
            self._attempts.finish(attempt)
        except (PeerFailed, StoreLost) as error:
            return self._answer(error)
        return Computed()

    def _carry_out(self, order: Action) -> Event:
        recovery, begun_s = self._recovery.now, 0.0 if self._recovery.now is None else self._world.clock.now_s()
        event = self._answered(order)
        if recovery is not None:
            recovery.count(order, self._world.clock.now_s() - begun_s)
        return event

    def _answered(self, order: Action) -> Event:
        try:
            return self._try(order)
        except (PeerFailed, StoreLost) as error:
            return self._answer(error)

    def _answer(self, error: PeerFailed | StoreLost) -> Event:
        """Return the event that reports a failure to the protocol."""
        if isinstance(error, StoreLost):
            self._stop_alone(error)
        self._recovery.see_failure()
        return PeerLost()

    def _try(self, order: Action) -> Event:
        match order:
            case ReduceBucket(bucket=bucket):
                self._recovery.end()
                self._attempts.sum_bucket(bucket)
                return BucketReduced()
            case VoteStep(step=step):
                return StepVoted() if self._close(step) else CorruptionSeen()
            case ApplyStep(step=step):
                self._apply(step)
                return StepApplied()
            case Revoke() | Agree() | Shrink() | ShareProgress():
                return self._regroup.carry_out(order)
            case _:
                return self._acts.carry_out(order)

    # -- a step

    def _next_batch(self, step: int) -> MiniBatch | None:
        if step != self._world.step:
            raise InternalError(f"the protocol ordered step {step}, but step {self._world.step} is next")
        self._announce()
        self._recovery.end()
        if self._world.keeper.is_outdated(step, self._world.comm.generation):
            self._beginning.save()
        batch = self._place.next_batch(step, self._world.comm.members)
        if batch is not None and not self._beginning.belongs_to_later_loop:
            if 0 <= self._world.settings.stop_after < step:
                self._status.heard |= Note.LEAVE
            if not (self._status.heard or self._status.outcome == "gave-up"):
                return batch
            if (
                self._status.heard == Note.LEAVE and self._status.outcome == "done"
            ):  # if the script asked to stop as well, the outcome is "done"
                self._status.outcome = "stopped"
            if self._status.outcome == "stopped":
                self._beginning.save()
        self._log.mark("gate")
        return None

    def _begin(self, step: int) -> Step | None:
        """Return the next attempt, None if there is no next step."""
        batch = self._next_batch(step)
        if batch is not None:
            attempt = self._attempts.begin(batch)
            self._fingerprint.take(step)
            if self._certificate is not None:
                self._certificate.begin(step)
            return attempt
        if not self._beginning.belongs_to_later_loop:
            self._replica.finish()
        return None

    def _close(self, step: int) -> bool:
        """Hold the commit vote on the step; return whether it is committed, False if the guard found corruption."""
        self._recovery.end()
        self._log.mark("allreduce")
        self._points.reach_in_sum(step, self._replica.num_buckets)
        mine = self._vote(step)
        said = mine.unpack(self._sum.maximum(mine.pack()))
        if said.step.differs:
            raise InternalError(f"workers voted on different steps, {said.step.smallest} and {said.step.largest}")
        if self._watch.read(step, said.guard):
            self._recovery.see_corruption(redone_steps=int(not self._watch.corrupt))  # a retry repeats the other votes
            return False
        if self._certificate is not None:
            self._certificate.read(step, said.parts)
        self._status.heard |= said.notes
        self._status.save_due = bool(said.save)
        return True

    def _vote(self, step: int) -> CommitVote:
        """Return this worker's vote on the step, which it is ready to commit."""
        world, asked, parts = (
            self._world,
            self._world.told.notes,
            self._world.told.leaves,
        )  # read once: a signal may arrive meanwhile
        return CommitVote(
            guard=self._watch.fill(step, is_last=self._place.is_last(self._attempts.in_progress())),
            parts=self._fingerprint.parts,
            step=MinMax(step, step),
            stop=bool(asked & Note.STOP),
            leave=bool(asked & Note.LEAVE),
            change=bool(parts or world.comm.newcomers(world.loop)),
            stays=not parts,
            has_store=not world.comm.is_stranded,
            ask=world.is_lead and self._requests.are_due(),
            save=self._wants_to_save(),
        )

    def _wants_to_save(self) -> bool | None:
        """Return whether the lead wants a checkpoint after this step; None if that does not depend on its clock."""
        keeper = self._world.keeper
        if keeper.adaptive is None:
            return None
        is_due = keeper.is_due_now()  # evaluated at every worker: any of them may become the lead
        return self._world.is_lead and is_due

    def _apply(self, step: int) -> None:
        world, batch, replica = self._world, self._attempts.in_progress(), self._replica
        self._points.enter("optimizer")
        lost = replica.missing_slices(batch)
        workers = replica.computing(batch, lost)
        link = None if self._certificate is None else self._certificate.commit(batch, lost)
        world.committed.metrics = replica.apply(batch, self._attempts.names)
        samples = self._place.commit(batch, lost)
        self._attempts.batch, world.committed.step, world.rebuilds.snapshot = None, step + 1, None
        self._log.committed(batch, samples, len(workers), lost, link)
        self._beginning.keep_after_step()
        if world.keeper.is_due(world.step) or self._status.save_due:
            if not replica.is_replicated and self._recovery.now is not None:
                world.keeper.put_off(world.step)  # some parts are placed on failed workers: save after they have moved
            else:
                self._beginning.save()

    # -- the beginning, checkpoints

    def _announce(self) -> None:
        if not self._status.announced:
            self._status.announced = True
            self._log.started(self._place.plan, self._replica.num_buckets, self._replica.numel)

    def _publish(self, stable_step: int) -> None:
        world, keeper = self._world, self._world.keeper
        self._status.save_due = False
        keeper.publish(stable_step, world.comm.generation, is_lead=world.is_lead)
        at_gate = self._protocol.state is ProtocolState.LAST_GATE
        if at_gate and keeper.step is not None:
            self._log.mark("checkpoint")  # no worker leaves before its checkpoint is written, which may take long
        outcomes = keeper.finish() if at_gate else keeper.poll()
        for outcome in outcomes:
            self._log.saved(outcome)
        if at_gate and self._status.outcome != "done" and world.is_lead and not self._beginning.belongs_to_later_loop:
            self._check_saved(outcomes)

    def _check_saved(self, outcomes: list[WriteResult]) -> None:
        """Make sure that training does not stop before the state it stops with has been saved."""
        step = self._world.step
        if any(outcome.saved is not None and outcome.step == step for outcome in outcomes):
            return
        errors = [str(outcome.error) for outcome in outcomes if outcome.step == step and outcome.error is not None]
        why = errors[0] if errors else "no worker wrote it"
        raise CheckpointError(f"training stops before step {step}, but its state could not be saved: {why}")

    def _stop_alone(self, lost: StoreLost) -> NoReturn:
        """Save the state before the step in progress, unless it is saved, and stop: the membership store is lost.

        If the launcher is alive, other workers may still reach the store and continue. Then only this worker ends.
        """
        world, run_dir = self._world, self._world.settings.run_dir
        has_begun = self._status.announced and self._protocol.progress.completed >= 0
        if has_begun and not launcher_is_gone(run_dir):
            self._log.warn(f"{lost}; without agreements this worker cannot continue, so it kills itself")
            kill_self()
        if not has_begun or not self._replica.is_replicated:  # a single worker does not hold the whole state
            raise lost
        self._acts.discard()
        with turn(run_dir):
            outcomes = self._beginning.save_alone()
        for outcome in outcomes:
            self._log.saved(outcome)
        if not (world.keeper.has(world.step) or self._beginning.belongs_to_later_loop):
            raise lost
        self._recovery.forget()
        self._status.outcome = "stopped"
        self._leave()
        raise InternalError(str(lost))  # never reached: stopping ends the script

    # -- the end

    def _leave(self) -> None:
        world, replica = self._world, self._replica
        replica.leave()
        if self._status.outcome == "left":
            self._log.write(Left())
            self._log.warn(f"left the job before step {world.step} because it received SIGTERM")
            raise SystemExit(0)
        self._recovery.end()
        if (summary := replica.summary()) is not None:
            self._log.write(summary)
        if self._certificate is not None:
            self._log.hashed(world.step, world.committed.link, self._certificate.hash_end())
        self._log.finished(self._status.outcome, replica.sha256s(world.comm.local_ranks), self.account())
        self._log.mark("script")
        world.told.notes &= ~Note.STOP
        if self._status.outcome == "gave-up":
            alive, least = len(world.comm.members), world.settings.min_workers
            raise TooFewWorkers(
                f"{alive} of at least {least} workers are alive; the state before step {world.step} is in {world.keeper.url}"
            )
        if self._status.outcome == "stopped":
            self._log.say(f"stopped on request; the state before step {world.step} is in {world.keeper.url}")
            raise SystemExit(4)

    def account(self) -> SampleCounts:
        """Return the account of all samples, including earlier loops."""
        return self._world.loops.totals.plus(self._place.account())
