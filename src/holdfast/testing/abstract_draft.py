"""The draft of a state: what each move of the abstract engine changes, and the promises that it may break.

Checked in every run: whoever waits is answered; nobody meets a ``Shrink`` with an ``Agree`` or a revoke; nobody adds
up gradients of different attempts; replicas are equal as far as they go and at most one step apart; what was
published is in everybody's history; everybody ends at the last step, or saves and stops. Unless the world is lossy,
nothing may be missing from a step. All is checked here, but the first, which is for ``Engine.is_stuck``, and what lies
in shared memory, which is for ``abstract_memory``.
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
    Add,
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
    Read,
    Returning,
    State,
    Stop,
    Sum,
    Wake,
    Worker,
    living_ranks,
    lowest,
)
from holdfast.testing.abstract_memory import Adding, AtBarrier, MemoryDraft, Rule, Violation, What, ranks


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
        case Add(rank):
            draft.add(rank)
        case Stop(rank):
            draft.stop(rank)
        case Wake(rank):
            draft.wake(rank)
        case Read(rank):
            draft.read(rank)
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
        self._memory = MemoryDraft(state.memory, engine.world.without, keep_input=engine.world.keep_input)

    # -- moves

    def die(self, rank: int) -> None:
        """Stop ``rank``."""
        self._remove(rank)
        self._deaths_left -= 1

    def complete(self, rank: int) -> None:
        """Let ``rank`` have the result of the sum that it waits in."""
        worker = self._worker(rank)
        if isinstance(worker.waits, AtBarrier):
            self._pass_barrier(rank, worker.waits)
            return
        this = self._sums[worker.sums]
        if not self._engine.is_rooted(worker.waits):
            self._fenced = True  # everybody has entered it, so everybody is back from the shrink
        match worker.waits:
            case SumBucket(bucket=bucket):
                self._know_sum(rank, bucket)
            case CloseStep():
                self.tell(rank, StepClosed())
            case HandOver(step=step, bucket=bucket):
                self._hold(rank, bucket, _number(this.brought[0]))
                self._memory.read(rank, bucket, self._what(rank, bucket))
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
        self._memory.failed(rank)
        self.tell(rank, PeerLost())

    def add(self, rank: int) -> None:
        """Let ``rank`` finish adding its share."""
        adding = self._worker(rank).waits
        assert isinstance(adding, Adding)
        bucket = adding.order.bucket
        self._memory.add(rank, bucket, self._what_is_added(rank))
        if self._memory.keeps(Rule.BARRIER_B):
            self._enter(rank, AtBarrier("B", adding.order))
        else:
            self._know_sum(rank, bucket)

    def stop(self, rank: int) -> None:
        """Stop ``rank`` for a while, in the middle of adding its share."""
        worker = self._worker(rank)
        assert isinstance(worker.waits, Adding)
        self._memory.stop(rank, worker.waits.order.bucket, self._what_is_added(rank), worker.sums + 1)
        self.die(rank)

    def wake(self, rank: int) -> None:
        """Let ``rank``, that all take for dead, finish adding its share, and enter barrier B if it is still there."""
        late = self._memory.wake(rank)
        if not (late.barrier and self._memory.keeps(Rule.BARRIER_B)):
            return
        self._announce(rank, late.barrier)
        barrier = AtBarrier("B", SumBucket(late.what.step, late.bucket))
        this = self._sums.get(late.barrier) or Sum(late.barrier, (barrier, late.what.step, late.what.group), 0, ())
        self._sums[late.barrier] = this._replace(entered=this.entered | 1 << rank)

    def read(self, rank: int) -> None:
        """Let the optimizer of ``rank``, that runs beside the sums, have read its results."""
        self._memory.finish_reading(rank)

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
            self._memory.renew()
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
            case SumBucket() if self._engine.world.shared:
                self._enter_sum(rank, order)
            case _:
                self._enter(rank, order)
        return None

    def _compute(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "computes")
        if step >= self._engine.world.steps:
            return RanOut()
        everything = (1 << self._engine.world.buckets) - 1
        self._set(rank, group=self._members, inputs=everything, have=(0,) * self._engine.world.buckets)
        self._memory.compute(rank, step, self._members)
        return Computed()

    def _discard(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "discards")
        self._drop_gradients(rank)
        return ActDone()

    def _apply(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "applies")
        worker = self._worker(rank)
        self._check_have(rank, worker, "applies")
        self._check_nothing_is_missing(rank, worker)
        self._write(rank, step, (worker.group, *worker.have))
        self._memory.apply(rank, [self._what(rank, bucket) for bucket in range(len(worker.have))])
        self._drop_gradients(rank)
        self._set(rank, steps=step + 1)
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
        self._drop_gradients(rank)
        self._set(rank, steps=steps)
        self.tell(rank, CheckpointLoaded(steps))

    def _hold(self, rank: int, bucket: int, whose: int) -> None:
        worker = self._worker(rank)
        have = (*worker.have[:bucket], whose, *worker.have[bucket + 1 :])
        self._set(rank, have=have, inputs=worker.inputs & ~(1 << bucket))  # known, so its input is dropped
        self._memory.summed(rank, bucket)

    def _drop_gradients(self, rank: int) -> None:
        self._workers[rank] = self._worker(rank).without_gradients()
        self._memory.drop(rank)

    # -- sums

    def _enter(self, rank: int, order: Action) -> None:
        brought = self._brings(rank, order)
        if isinstance(order, LoadCheckpoint):
            self._drop_gradients(rank)
            self._set(rank, steps=LOADING)
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
        if isinstance(order, AtBarrier):
            self._announce(rank, number)

    def _enter_sum(self, rank: int, order: SumBucket) -> None:
        self._memory.enter(rank, order.bucket)
        if self._memory.keeps(Rule.BARRIER_A):
            self._enter(rank, AtBarrier("A", order))
        else:
            self._begin_to_add(rank, order)

    def _pass_barrier(self, rank: int, barrier: AtBarrier) -> None:
        number = self._worker(rank).sums
        this = self._sums.get(number)
        looks = self._memory.keeps(Rule.WORDS_AFTER_A if barrier.name == "A" else Rule.WORDS_AFTER_B)
        if this is not None and this.entered == self._members:
            self._fenced = True
        elif looks and not self._memory.all_announced(self._members, number):
            self.fail(rank)
            return
        if barrier.name == "A":
            self._begin_to_add(rank, barrier.order)
        else:
            self._know_sum(rank, barrier.order.bucket)

    def _begin_to_add(self, rank: int, order: SumBucket) -> None:
        self._set(rank, waits=Adding(order))
        self._memory.begin_to_add(rank, order.bucket, self._what_is_added(rank))
        if not self._memory.keeps(Rule.WORD_COMES_LAST):
            self._announce(rank, self._worker(rank).sums + 1)

    def _know_sum(self, rank: int, bucket: int) -> None:
        self._hold(rank, bucket, self._members)
        self.tell(rank, BucketSummed())

    def _announce(self, rank: int, barrier: int) -> None:
        if self._engine.world.lying:  # else the words never say anything new
            self._memory.announce(rank, barrier)

    def _brings(self, rank: int, order: Action) -> Payload | None:
        worker = self._worker(rank)
        match order:
            case SumBucket(bucket=bucket) | AtBarrier(name="A", order=SumBucket(bucket=bucket)):
                if not worker.inputs & 1 << bucket:
                    msg = f"rubbish is summed: {rank} has no gradient of bucket {bucket} any more"
                    raise Violation(msg)
            case CloseStep(step=step):
                self._check_may_close(rank, worker, step)
            case HandOver(bucket=bucket, source=source) if source == rank:
                return self._hands_over(rank, bucket)
            case ShareProgress(progress=progress):
                return progress
            case LoadCheckpoint() if rank == lowest(self._members):
                return self._published
        return None

    def _hands_over(self, rank: int, bucket: int) -> int:
        if not self._worker(rank).have[bucket]:
            if not self._engine.world.shared:
                msg = f"bucket missing: {rank} hands over bucket {bucket} and does not hold it"
                raise Violation(msg)
            self._hold(rank, bucket, self._memory.what_lies(rank, bucket))  # it takes what it finds
        self._memory.read(rank, bucket, self._what(rank, bucket))
        return self._worker(rank).have[bucket]

    def _check_may_close(self, rank: int, worker: Worker, step: int) -> None:
        if step < self._engine.world.steps:
            self._check_have(rank, worker, "closes")
        if self._engine.world.all_publish and worker.told < step:
            msg = f"never published: {rank} closes step {step}, and has not published all before"
            raise Violation(msg)

    def _is_of_use(self, this: Sum) -> bool:
        """Return whether anybody can still complete ``this``."""
        may_enter = living_ranks(self._workers) | self._memory.may_enter(this.number)
        never_again = self._members & ~may_enter | self._failed
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
            memory=self._memory.finish(living_ranks(self._workers), self._members),
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

    def _what(self, rank: int, bucket: int) -> What:
        worker = self._worker(rank)
        return What(worker.steps, worker.group, worker.have[bucket])

    def _what_is_added(self, rank: int) -> What:
        worker = self._worker(rank)
        return What(worker.steps, worker.group, self._members)

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
