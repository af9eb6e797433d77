"""The draft of a state: what each move of the abstract engine changes, and the promises that it may break.

Checked in every run: whoever waits is answered; nobody meets a ``Shrink`` with an ``Agree`` or a revoke. What is summed, and
what is promised about that, is in ``abstract_sums``, what one worker does by itself in ``abstract_work``, with the parts of a
split model in ``abstract_exchanges``; that whoever waits is answered is for ``Engine.is_stuck``, and what lies in shared
memory for ``abstract_memory``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.recovery.messages import (
    JOINING,
    VOTED,
    Action,
    Admitted,
    AdoptPlacement,
    AdoptState,
    Agree,
    Agreed,
    ApplyConfig,
    ApplyStep,
    BucketReduced,
    Computed,
    ComputeStep,
    CorruptionSeen,
    DiscardStep,
    Done,
    Event,
    FetchConfig,
    HandedOver,
    HandOver,
    Leave,
    LeftGroup,
    LoadCheckpoint,
    MoveParts,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    ReduceBucket,
    Reinitialise,
    Revoke,
    SaveAndStop,
    SendState,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepVoted,
    VoteStep,
)
from model.abstract_engine import Engine
from model.abstract_members import Lapse, Wish
from model.abstract_memory import Adding, AtBarrier, Rule, Violation, ranks
from model.abstract_parts import EXCHANGES, UNKNOWN, Giving, Swap
from model.abstract_state import (
    Add,
    Begin,
    Begun,
    Complete,
    Compute,
    Computing,
    Decide,
    Die,
    Do,
    Doing,
    Fail,
    Given,
    GiveUp,
    Hear,
    Move,
    Offer,
    Payload,
    Read,
    Returning,
    Spoil,
    State,
    Stop,
    Sum,
    Wake,
    living_ranks,
    lowest,
)
from model.abstract_sums import Sums


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
        case Begin(rank):
            draft.begin(rank)
        case Compute(rank):
            draft.tell(rank, Computed())
        case Spoil(rank):
            draft.spoil(rank)
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
        case Wish():
            draft.wish(move)
    return draft.finish()


class Draft(Sums):
    """A state that is being changed by one move."""

    # -- moves

    def die(self, rank: int) -> None:
        """Stop ``rank``."""
        self._remove(rank)
        self._deaths_left -= 1

    def spoil(self, rank: int) -> None:
        """Let ``rank`` compute its step, and find that gradients have changed that were being summed."""
        self._deaths_left -= 1
        self._set(rank, spoiled=True)
        self.tell(rank, Computed())

    def wish(self, wish: Wish) -> None:
        """Let somebody want to come or to leave, or new settings be there."""
        self._wishes = self._wishes.after(wish)

    def complete(self, rank: int) -> None:
        """Let ``rank`` have the result of the sum that it waits in."""
        worker = self._worker(rank)
        if isinstance(worker.waits, Computing):
            self._fenced = True
            self._set(rank, thread=Begun.NOTHING, uncounted=worker.uncounted + 1)
            return
        if isinstance(worker.waits, AtBarrier):
            self._pass_barrier(rank, worker.waits)
            return
        if isinstance(worker.waits, SendState):
            if rank in worker.waits.newcomers:
                self._is_given(rank, self._sums[worker.sums].brought)
            self.tell(rank, Done())
            return
        if isinstance(worker.waits, EXCHANGES):
            computed = self._complete_exchange(rank, worker.waits)
            if computed is not None:
                self.tell(rank, computed)
            return
        if isinstance(worker.waits, Giving):
            self._is_given_parts(rank, worker.waits, self._sums[worker.sums].brought)
            self.tell(rank, Done())
            return
        this = self._sums[worker.sums]
        if not self._engine.is_rooted(worker.waits):
            self._fenced = True  # everybody has entered it, so everybody is back from the shrink
        match worker.waits:
            case ReduceBucket(bucket=bucket):
                self._know_sum(rank, bucket)
            case VoteStep():
                heard = self._result(this, self._wishes.heard(self._members, worker.taken))
                if heard == Note.CORRUPT:
                    self._wishes = self._wishes._replace(hidden=False)
                    self._set(rank, corrupt=True)
                    self.tell(rank, CorruptionSeen())
                else:
                    self._set(rank, heard=worker.heard | heard)
                    self.tell(rank, StepVoted())
            case FetchConfig():
                self._set(rank, aside=self._result(this, self._wishes.asked))
                if Lapse.TAKES_AT_ONCE in self._engine.world.lapses:
                    self._make_changes(rank)
                self.tell(rank, Done())
            case HandOver(step=step, bucket=bucket):
                self._hold(rank, bucket, _number(this.brought[0]))
                self._memory.read(rank, bucket, self._what(rank, bucket))
                self.tell(rank, HandedOver(step, bucket))
            case ShareProgress():
                everybody = {who: _progress(payload) for who, payload in this.brought}
                for progress in everybody.values():
                    worker = self._worker(rank)
                    heard, corrupt = progress.flags & VOTED, bool(progress.flags & self._finding)
                    self._set(rank, heard=worker.heard | heard, corrupt=worker.corrupt or corrupt)
                self.tell(rank, ProgressKnown(everybody, self._engine.buckets))
            case LoadCheckpoint() if self._engine.world.flips and self._goes_back(this):
                self.tell(rank, self._go_back(rank, self._target(this)))
            case LoadCheckpoint() if self._worker(rank).snapshot >= 0:
                self.tell(rank, self._load_snapshot(rank))
            case LoadCheckpoint():
                given = _state(this.brought)
                self.tell(rank, self._load(rank, given.steps, given.taken))

    def fail(self, rank: int) -> None:
        """Let the sum that ``rank`` waits in fail there."""
        worker = self._worker(rank)
        self._failed |= 1 << rank
        if isinstance(worker.waits, Computing):
            self._set(rank, thread=Begun.FAILED)
            return
        if self._engine.world.in_place and isinstance(worker.waits, ReduceBucket):
            self._set(rank, inputs=worker.inputs & ~(1 << worker.waits.bucket))
        self._memory.failed(rank)
        self._set(rank, calm=False)
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
        barrier = AtBarrier("B", ReduceBucket(late.what.step, late.bucket))
        what = (barrier, late.what.step, late.what.group, 0, UNKNOWN)
        this = self._sums.get(late.barrier) or Sum(late.barrier, what, 0, ())
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
        if isinstance(self._worker(lowest(living)).waits, Shrink):
            self._shrink(living)
            return
        self._fenced = True
        for rank in ranks(living):
            value = bool(yes & 1 << rank)
            if not value and self._worker(rank).waits == Agree(flag=True):
                self._set(rank, calm=False)
            self._answer(rank, Agreed(value))

    def _shrink(self, living: int) -> None:
        heard = sum(1 << rank for rank in ranks(living) if self._worker(rank).heard & Note.CHANGE)
        leaving, admitted = self._wishes.shrink(living, heard, self._engine.world.lapses)
        self._members, self._failed, self._revokers, self._fenced = living, 0, 0, False
        self._sums, self._swaps = {}, {}
        self._memory.renew()
        for rank in ranks(living):
            self._check_nothing_is_begun(rank)
            self._set(rank, sums=0, heard=self._worker(rank).heard & ~Note.CHANGE)
        if not living & ~leaving:
            msg = f"nobody stays: {list(ranks(leaving))} leave, who alone have the state"
            raise Violation(msg)
        self._members = living & ~leaving | admitted
        self._wishes = self._wishes.without(admitted)
        for rank in ranks(leaving):
            self.tell(rank, LeftGroup())
            while self._is_doing(rank):
                self.do(rank)
        for rank in ranks(admitted):
            self._workers[rank] = self._engine.newborn()
        for rank in ranks(self._members):
            self._answer(rank, Admitted() if admitted & 1 << rank else Shrunk())

    def _answer(self, rank: int, event: Event) -> None:
        """Let ``rank`` hear what was decided, at once if that makes no difference."""
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
                return self._save_and_stop(rank)
            case Revoke():
                return self._revoke(rank)
            case Agree() | Shrink():
                self._set(rank, waits=order)
            case AdoptState(step=step):
                return self._install(rank, step)
            case ApplyConfig():
                self._make_changes(rank)
                return Done()
            case MoveParts():
                self._enter(rank, self._begin_giving(rank, order))
            case AdoptPlacement():
                return self._settle(rank)
            case Reinitialise():
                return self._rebuild(rank)
            case LoadCheckpoint() if Lapse.HEALS_ALONE in self._engine.world.lapses and self._worker(rank).corrupt:
                return self._go_back(rank, self._worker(rank).verified)
            case Leave():
                self._leave(rank)
            case GiveUp():
                self._give_up(rank)
            case ReduceBucket() if self._engine.world.early:
                return self._count(rank, order)
            case ReduceBucket() if self._engine.world.shared:
                self._enter_sum(rank, order)
            case _:
                self._enter(rank, order)
        return None

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

    def _know_sum(self, rank: int, bucket: int) -> None:
        self._hold(rank, bucket, self._members)
        self.tell(rank, BucketReduced())

    # -- the end of a move

    def finish(self) -> State:
        """Let everything happen that the move makes happen at once; forget what makes no difference any more."""
        while (living := living_ranks(self._workers)) and self._decides_at_once(living):
            self.decide(0)
        sums = tuple(this for this in sorted(self._sums.values()) if self._is_of_use(this))
        somewhere = [*self._steps_somewhere(sums)]
        kept, everybody_has = max([self._published, *somewhere]), min(somewhere, default=0)
        log = [None if step < everybody_has else what for step, what in enumerate(self._log[:kept])]
        return State(
            workers=tuple(self._workers),
            left=self._left,
            members=self._members,
            failed=self._failed,
            revokers=self._revokers,
            fenced=self._fenced,
            swaps=tuple(this for this in sorted(self._swaps.values(), key=_name) if self._is_still_needed(this)),
            sums=tuple(this._replace(brought=tuple(sorted(this.brought, key=lambda b: b[0]))) for this in sums),
            log=tuple(log),
            published=self._published,
            published_taken=self._published_taken,
            deaths_left=self._deaths_left,
            memory=self._memory.finish(living_ranks(self._workers), self._members),
            wishes=self._wishes,
        )

    def _steps_somewhere(self, sums: Sequence[Sum]) -> Iterator[int]:
        """Yield how many steps are in the weights or the snapshot of somebody, or in what a newcomer was given, or may yet be."""
        for worker in self._workers:
            if worker is None:
                continue
            if worker.steps != JOINING:
                yield worker.steps
            if worker.given is not None:
                yield worker.given.steps
            if worker.snapshot >= 0:
                yield worker.snapshot
            if self._engine.world.flips:
                yield from (kept.steps for kept in (worker.verified, worker.candidate) if kept.steps >= 0)
        for _, payload in (each for this in sums for each in this.brought):
            if isinstance(payload, Given):
                yield payload.steps
            if isinstance(payload, Offer):
                yield from (steps for steps in (payload.verified.steps, payload.trusted) if steps >= 0)

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


def _name(this: Swap) -> tuple[str, str]:
    return type(this.order).__name__, repr(this.order)


def _number(brought: tuple[int, Payload]) -> int:
    payload = brought[1]
    assert isinstance(payload, int)
    return payload


def _state(brought: Sequence[tuple[int, Payload]]) -> Given:
    """Return what the lowest gives, who alone does."""
    given = [p.given if isinstance(p, Offer) else p for _, p in brought]
    (state,) = [p for p in given if isinstance(p, Given)]
    return state


def _progress(payload: Payload) -> Progress:
    assert isinstance(payload, Progress)
    return payload
