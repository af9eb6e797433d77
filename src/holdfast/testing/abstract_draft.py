"""The draft of a state: what each move of the abstract engine changes, and the promises that it may break.

Checked in every run: whoever waits is answered; nobody meets a ``Shrink`` with an ``Agree`` or a revoke; nobody adds
up gradients of different attempts; replicas are equal as far as they go and at most one step apart; what was
published is in everybody's history; everybody ends at the last step, or saves and stops. Unless the world is lossy,
nothing may be missing from a step. All is checked here, but the first, which is for ``Engine.is_stuck``.
"""

from __future__ import annotations

from typing import Any

from holdfast.events import (
    LOADING,
    ActDone,
    Action,
    Agree,
    Agreed,
    ApplyStep,
    BucketSummed,
    CheckpointLoaded,
    CloseStep,
    Computed,
    ComputeStep,
    DiscardStep,
    Event,
    HandedOver,
    HandOver,
    Leave,
    LoadCheckpoint,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    RanOut,
    Revoke,
    Revoked,
    SaveAndStop,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    StepClosed,
    SumBucket,
)
from holdfast.testing.abstract_engine import (
    SUMS,
    Complete,
    Decide,
    Die,
    Do,
    Doing,
    Engine,
    Fail,
    Hear,
    Move,
    Payload,
    Returning,
    State,
    Sum,
    Violation,
    Worker,
    living_ranks,
    lowest,
    ranks,
)


def first_state(engine: Engine) -> State:
    """Return the state in which everybody has started."""
    draft = Draft(engine, engine.blank_state())
    for rank in range(engine.world.workers):
        draft.tell(rank, Started())
    return draft.finish()


def state_after(engine: Engine, state: State, move: Move) -> State:
    """Return the state after ``move``."""
    draft = Draft(engine, state)
    match move:
        case Die(rank):
            draft.die(rank)
        case Complete(rank):
            draft.complete(rank)
        case Fail(rank):
            draft.fail(rank)
        case Hear(rank):
            draft.hear(rank)
        case Do(rank):
            draft.do(rank)
        case Decide(yes):
            draft.decide(yes)
    return draft.finish()


class Draft:
    """A state that is being changed by one move."""

    def __init__(self, engine: Engine, state: State) -> None:
        self._engine = engine
        self._workers = list(state.workers)
        self._left = state.left
        self._members = state.members
        self._failed = state.failed
        self._revokers = state.revokers
        self._fenced = state.fenced
        self._sums = {s.number: s for s in state.sums}
        self._log = list(state.log)
        self._published = state.published
        self._deaths_left = state.deaths_left

    # -- moves

    def die(self, rank: int) -> None:
        """Stop ``rank``."""
        self._remove(rank)
        self._deaths_left -= 1

    def complete(self, rank: int) -> None:
        """Let ``rank`` have the result of the sum that it waits in."""
        worker = self._worker(rank)
        this = self._sums[worker.sums]
        if not self._engine.is_rooted(worker.waits):
            self._fenced = True  # everybody has entered it, so everybody is back from the shrink
        match worker.waits:
            case SumBucket(bucket=bucket):
                self._hold(rank, bucket, self._members)
                self.tell(rank, BucketSummed())
            case CloseStep():
                self.tell(rank, StepClosed())
            case HandOver(step=step, bucket=bucket):
                self._hold(rank, bucket, _number(this.brought[0]))
                self.tell(rank, HandedOver(step, bucket))
            case ShareProgress():
                everybody = {who: _progress(payload) for who, payload in this.brought}
                self.tell(rank, ProgressKnown(everybody, self._engine.world.buckets))
            case LoadCheckpoint():
                self._load(rank, _number(this.brought[0]))

    def fail(self, rank: int) -> None:
        """Let the sum that ``rank`` waits in fail there."""
        worker = self._worker(rank)
        self._failed |= 1 << rank
        if self._engine.world.in_place and isinstance(worker.waits, SumBucket):
            self._set(rank, inputs=worker.inputs & ~(1 << worker.waits.bucket))
        self.tell(rank, PeerLost())

    def hear(self, rank: int) -> None:
        """Let ``rank`` return from what was decided."""
        returning = self._worker(rank).waits
        assert isinstance(returning, Returning)
        self.tell(rank, returning.event)

    def decide(self, yes: int) -> None:
        """Decide the agreement or the shrink that all the living wait in."""
        living = living_ranks(self._workers)
        shrinking = isinstance(self._worker(lowest(living)).waits, Shrink)
        if shrinking:
            self._members, self._failed, self._revokers, self._sums, self._fenced = living, 0, 0, {}, False
        else:
            self._fenced = True
        for rank in ranks(living):
            event = Shrunk() if shrinking else Agreed(bool(yes & 1 << rank))
            if shrinking:
                self._set(rank, sums=0)
            if self._engine.world.atomic and not self._is_seen_outside(rank, event):
                self.tell(rank, event)
            else:
                self._set(rank, waits=Returning(event))

    def _is_seen_outside(self, rank: int, event: Event) -> bool:
        _, orders = self._engine.minds.handle(self._worker(rank).mind, event)
        return any(isinstance(order, Publish | Leave) for order in orders)

    # -- what a worker does

    def tell(self, rank: int, event: Event) -> None:
        """Let ``rank`` hear ``event`` and do what its protocol says, up to the next thing that it waits for."""
        mind, orders = self._engine.minds.handle(self._worker(rank).mind, event)
        self._set(rank, mind=mind, waits=Doing(tuple(orders)))
        while self._engine.world.atomic and self._is_doing(rank):
            self.do(rank)

    def do(self, rank: int) -> None:
        """Let ``rank`` carry out its next order."""
        doing = self._worker(rank).waits
        assert isinstance(doing, Doing)
        order, *rest = doing.orders
        self._set(rank, waits=Doing(tuple(rest)))
        answer = self._carry_out(rank, order)
        if answer is not None:
            self.tell(rank, answer)

    def _is_doing(self, rank: int) -> bool:
        worker = self._workers[rank]
        return worker is not None and isinstance(worker.waits, Doing)

    def _carry_out(self, rank: int, order: Action) -> Event | None:
        match order:
            case Publish(step=step):
                self._publish(rank, step)
            case ComputeStep(step=step):
                return self._compute(rank, step)
            case ApplyStep(step=step):
                return self._apply(rank, step)
            case DiscardStep(step=step):
                return self._discard(rank, step)
            case SaveAndStop():
                self._set(rank, saved=True)
                return ActDone()
            case Revoke():
                return self._revoke(rank)
            case Agree() | Shrink():
                self._set(rank, waits=order)
            case Leave():
                self._leave(rank)
            case _:
                self._enter(rank, order)
        return None

    def _compute(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "computes")
        if step >= self._engine.world.steps:
            return RanOut()
        everything = (1 << self._engine.world.buckets) - 1
        self._set(rank, group=self._members, inputs=everything, have=(0,) * self._engine.world.buckets)
        return Computed()

    def _discard(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "discards")
        self._workers[rank] = self._worker(rank).without_gradients()
        return ActDone()

    def _apply(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "applies")
        worker = self._worker(rank)
        self._check_have(rank, worker, "applies")
        self._check_nothing_is_missing(rank, worker)
        self._write(rank, step, (worker.group, *worker.have))
        self._workers[rank] = worker.without_gradients()._replace(steps=step + 1)
        self._check_nobody_is_far_from(rank, step + 1)
        return StepApplied()

    def _check_nobody_is_far_from(self, rank: int, steps: int) -> None:
        for other in self._workers:
            if other is not None and other.steps != LOADING and abs(other.steps - steps) > 1:
                msg = f"more than one apart: {rank} has {steps} steps, somebody has {other.steps}"
                raise Violation(msg)

    def _check_nothing_is_missing(self, rank: int, worker: Worker) -> None:
        for bucket, whose in enumerate(worker.have):
            must_be_in = living_ranks(self._workers) if self._engine.world.lossy else worker.group
            if whose & ~worker.group or must_be_in & ~whose:
                msg = f"gradients are missing: {rank} applies step {worker.steps}, bucket {bucket}, of {list(ranks(whose))} only"
                raise Violation(msg)

    def _write(self, rank: int, step: int, what: tuple[int, ...]) -> None:
        if len(self._log) == step:
            self._log.append(what)
        elif self._log[step] != what:
            kind = "published state is not in the history" if step < self._published else "replicas differ"
            msg = f"{kind}: {rank} puts something else into step {step}"
            raise Violation(msg)

    def _publish(self, rank: int, step: int) -> None:
        if self._worker(rank).steps <= step:
            msg = f"published state is not in the history: {rank} publishes step {step} and does not have it"
            raise Violation(msg)
        if self._engine.world.all_publish:
            self._set(rank, told=max(self._worker(rank).told, step + 1))
        if (step + 1) % self._engine.world.checkpoint_every == 0:
            self._published = max(self._published, step + 1)

    def _revoke(self, rank: int) -> Event:
        if not self._fenced and living_ranks(self._workers) != 1 << rank:
            msg = f"revoke meets shrink: {rank} revokes what others may still be building"
            raise Violation(msg)
        self._revokers |= 1 << rank
        return Revoked()

    def _leave(self, rank: int) -> None:
        worker = self._worker(rank)
        if worker.steps != self._engine.world.steps and not worker.saved:
            msg = f"left too early: {rank} leaves after {worker.steps} steps of {self._engine.world.steps}"
            raise Violation(msg)
        if worker.steps < self._published:
            msg = f"published state is not in the history: {rank} leaves without it"
            raise Violation(msg)
        self._published = worker.steps  # its result is out
        self._remove(rank)
        self._left |= 1 << rank

    def _remove(self, rank: int) -> None:
        self._workers[rank] = None
        self._failed &= ~(1 << rank)
        self._revokers &= ~(1 << rank)

    def _load(self, rank: int, steps: int) -> None:
        if steps < self._published:
            msg = f"published state is not in the history: {rank} loads step {steps}"
            raise Violation(msg)
        self._workers[rank] = self._worker(rank).without_gradients()._replace(steps=steps)
        self.tell(rank, CheckpointLoaded(steps))

    def _hold(self, rank: int, bucket: int, whose: int) -> None:
        worker = self._worker(rank)
        have = (*worker.have[:bucket], whose, *worker.have[bucket + 1 :])
        self._set(rank, have=have, inputs=worker.inputs & ~(1 << bucket))  # known, so its input is dropped

    # -- sums

    def _enter(self, rank: int, order: Action) -> None:
        brought = self._brings(rank, order)
        if isinstance(order, LoadCheckpoint):
            self._workers[rank] = self._worker(rank).without_gradients()._replace(steps=LOADING)
        worker = self._worker(rank)
        # What is added up must be gradients of the same attempt of the same step on the same weights.
        what = (type(order),) if isinstance(order, ShareProgress) else (order, worker.steps, worker.group)
        number = worker.sums + 1
        this = self._sums.get(number) or Sum(number, what, 0, ())
        if this.what != what:
            msg = f"rubbish is summed: {rank} enters {what}, others are in {this.what}"
            raise Violation(msg)
        mine = () if brought is None else ((rank, brought),)
        self._sums[number] = this._replace(entered=this.entered | 1 << rank, brought=(*this.brought, *mine))
        self._set(rank, waits=order, sums=number)

    def _brings(self, rank: int, order: Action) -> Payload | None:
        worker = self._worker(rank)
        match order:
            case SumBucket(bucket=bucket):
                if not worker.inputs & 1 << bucket:
                    msg = f"rubbish is summed: {rank} has no gradient of bucket {bucket} any more"
                    raise Violation(msg)
            case CloseStep(step=step):
                self._check_may_close(rank, worker, step)
            case HandOver(bucket=bucket, source=source) if source == rank:
                if not worker.have[bucket]:
                    msg = f"bucket missing: {rank} hands over bucket {bucket} and does not hold it"
                    raise Violation(msg)
                return worker.have[bucket]
            case ShareProgress(progress=progress):
                return progress
            case LoadCheckpoint() if rank == lowest(self._members):
                return self._published
        return None

    def _check_may_close(self, rank: int, worker: Worker, step: int) -> None:
        if step < self._engine.world.steps:
            self._check_have(rank, worker, "closes")
        if self._engine.world.all_publish and worker.told < step:
            msg = f"never published: {rank} closes step {step}, and has not published all before"
            raise Violation(msg)

    def _is_of_use(self, this: Sum) -> bool:
        """Return whether anybody can still complete ``this``."""
        never_again = self._members & ~living_ranks(self._workers) | self._failed
        needed = self._members
        for rank in ranks(living_ranks(self._workers) & ~self._failed):
            worker = self._worker(rank)
            if worker.sums == this.number and self._engine.is_rooted(worker.waits):
                needed = 1 << lowest(self._members)
        if needed & ~this.entered & never_again:
            return False
        for rank in ranks(living_ranks(self._workers) & ~self._failed):
            worker = self._worker(rank)
            waits_in_it = worker.sums == this.number and isinstance(worker.waits, SUMS)
            if worker.sums < this.number or waits_in_it:
                return True
        return False

    # -- the end of a move

    def finish(self) -> State:
        """Let everything happen that the move makes happen at once; forget what makes no difference any more."""
        while (living := living_ranks(self._workers)) and self._decides_at_once(living):
            self.decide(0)
        in_weights = [worker.steps for worker in self._workers if worker is not None]
        kept = max([self._published, *in_weights])
        everybody_has = min(in_weights, default=0)
        log = [None if step < everybody_has else what for step, what in enumerate(self._log[:kept])]
        sums = (this for this in sorted(self._sums.values()) if self._is_of_use(this))
        return State(
            workers=tuple(self._workers),
            left=self._left,
            members=self._members,
            failed=self._failed,
            revokers=self._revokers,
            fenced=self._fenced,
            sums=tuple(this._replace(brought=tuple(sorted(this.brought, key=lambda b: b[0]))) for this in sums),
            log=tuple(log),
            published=self._published,
            deaths_left=self._deaths_left,
        )

    def _decides_at_once(self, living: int) -> bool:
        waits = [self._worker(rank).waits for rank in ranks(living)]
        shrinking = [isinstance(order, Shrink) for order in waits]
        if any(shrinking) and any(isinstance(order, Agree) for order in waits):
            msg = f"agree meets shrink: {waits}"
            raise Violation(msg)
        if not self._engine.world.atomic or self._members & self._left:
            return False
        if all(shrinking):
            return True
        return all(isinstance(order, Agree) for order in waits) and Agree(flag=False) in waits

    # -- looking things up

    def _worker(self, rank: int) -> Worker:
        worker = self._workers[rank]
        assert worker is not None
        return worker

    def _set(self, rank: int, **fields: Any) -> None:
        self._workers[rank] = self._worker(rank)._replace(**fields)

    def _check_step(self, rank: int, step: int, does: str) -> None:
        steps = self._worker(rank).steps
        if steps != step:
            msg = f"wrong step: {rank} {does} step {step} with {steps} steps in its weights"
            raise Violation(msg)

    def _check_have(self, rank: int, worker: Worker, does: str) -> None:
        if 0 in worker.have:
            msg = f"bucket missing: {rank} {does} step {worker.steps} without bucket {worker.have.index(0)}"
            raise Violation(msg)


def _number(brought: tuple[int, Payload]) -> int:
    payload = brought[1]
    assert isinstance(payload, int)
    return payload


def _progress(payload: Payload) -> Progress:
    assert isinstance(payload, Progress)
    return payload
