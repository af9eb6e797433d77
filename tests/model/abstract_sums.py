"""How workers of the abstract engine take part in sums; and the promises about these.

Nobody adds up gradients of different attempts, nor after different changes of the settings, nor gives parts of a model to
those who take others. What lies in shared memory is for ``abstract_memory``.
"""

from __future__ import annotations

import dataclasses

from holdfast.recovery.messages import (
    LOADING,
    Action,
    BucketReduced,
    Event,
    FetchConfig,
    HandOver,
    LoadCheckpoint,
    Note,
    PeerLost,
    ReduceBucket,
    SendState,
    ShareProgress,
    VoteStep,
)
from model.abstract_members import Lapse
from model.abstract_memory import Adding, AtBarrier, Rule, Violation, ranks
from model.abstract_parts import ABSENT, Giving
from model.abstract_state import (
    Begun,
    Computing,
    Given,
    Offer,
    Payload,
    Sum,
    Worker,
    living_ranks,
    lowest,
    waits_in_sum,
)
from model.abstract_work import Work


class Sums(Work):
    """A state that is being changed, and how its workers take part in sums."""

    # -- sums

    def _enter(self, rank: int, order: Action) -> None:
        brought = self._brings(rank, order)
        if isinstance(order, LoadCheckpoint):
            self._drop_gradients(rank)
            self._set(rank, steps=LOADING, parts=(ABSENT,) * len(self._worker(rank).parts))
            self._workers[rank] = self._worker(rank).without_staged()
        worker = self._worker(rank)
        # What is added up must be gradients of the same attempt of the same step on the same weights.
        what: tuple[object, ...] = (order, worker.steps, worker.group, worker.taken, worker.homes)
        if isinstance(order, LoadCheckpoint):
            what = (order, worker.steps)  # it brings settings and homes of its own
        if isinstance(order, ShareProgress | SendState | FetchConfig):
            what = (type(order),)
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

    def begin(self, rank: int) -> None:
        """Let the thread of ``rank`` enter the sum of the next bucket, while ``rank`` computes."""
        worker = self._worker(rank)
        assert isinstance(worker.waits, Computing)
        self._enter(rank, ReduceBucket(worker.waits.step, worker.uncounted))
        self._set(rank, waits=worker.waits, thread=Begun.WAITS)

    def _count(self, rank: int, order: ReduceBucket) -> Event | None:
        """Let ``rank`` wait for a sum that its thread has begun, or enter one that it has not."""
        worker = self._worker(rank)
        if worker.uncounted and not (worker.thread is Begun.FAILED and self._forgets_to_count):
            self._set(rank, uncounted=worker.uncounted - 1)
            self._hold(rank, order.bucket, self._members)
            return BucketReduced()
        self._set(rank, thread=Begun.NOTHING, uncounted=0)
        match worker.thread:
            case Begun.NOTHING if worker.spoiled:
                self._failed |= 1 << rank
                self._set(rank, calm=False, spoiled=False)
                return PeerLost()
            case Begun.NOTHING:
                self._enter(rank, order)
            case Begun.WAITS:
                self._set(rank, waits=order)
            case Begun.FAILED:
                self._set(rank, calm=False, spoiled=False)
                return PeerLost()
        return None

    @property
    def _forgets_to_count(self) -> bool:
        return Lapse.FORGETS_TO_COUNT in self._engine.world.lapses

    def _check_nothing_is_begun(self, rank: int) -> None:
        worker = self._worker(rank)
        if worker.uncounted or worker.thread is not Begun.NOTHING:
            msg = f"half-open: {rank} leaves a step with a sum that it has begun, and not counted"
            raise Violation(msg)

    def _enter_sum(self, rank: int, order: ReduceBucket) -> None:
        self._memory.enter(rank, order.bucket)
        if self._memory.keeps(Rule.BARRIER_A):
            self._enter(rank, AtBarrier("A", order))
        else:
            self._begin_to_add(rank, order)

    def _begin_to_add(self, rank: int, order: ReduceBucket) -> None:
        self._set(rank, waits=Adding(order))
        self._memory.begin_to_add(rank, order.bucket, self._what_is_added(rank))
        if not self._memory.keeps(Rule.WORD_COMES_LAST):
            self._announce(rank, self._worker(rank).sums + 1)

    def _announce(self, rank: int, barrier: int) -> None:
        if self._engine.world.lying:  # else the words never say anything new
            self._memory.announce(rank, barrier)

    def _brings(self, rank: int, order: Action) -> Payload | None:
        worker = self._worker(rank)
        match order:
            case ReduceBucket(bucket=bucket) | AtBarrier(name="A", order=ReduceBucket(bucket=bucket)):
                if not worker.inputs & 1 << bucket:
                    msg = f"rubbish is summed: {rank} has no gradient of bucket {bucket} any more"
                    raise Violation(msg)
            case VoteStep(step=step):
                self._check_may_close(rank, worker, step)
            case HandOver(bucket=bucket, source=source) if source == rank:
                return self._hands_over(rank, bucket)
            case ShareProgress(progress=progress):
                passed_on = worker.heard & ~Note.ASK if Lapse.KEEPS_ASK in self._engine.world.lapses else worker.heard
                corrupt = worker.corrupt and Lapse.NOBODY_SAYS_CORRUPT not in self._engine.world.lapses
                flags = (
                    passed_on
                    | Note.PLANNED.when(worker.calm)
                    | Note.LOST.when(self._says_lost(rank))
                    | self._finding.when(corrupt)
                )
                return dataclasses.replace(progress, flags=flags)
            case SendState():
                return self._gives(rank, order)
            case Giving():
                return self._gives_parts(rank)
            case LoadCheckpoint():
                leads = rank == lowest(self._members)
                given = Given(self._published, self._published_taken) if leads else None
                flips = self._engine.world.flips
                goes_back = worker.corrupt and not self._engine.world.transient
                return Offer(goes_back, worker.verified, worker.trusted, given) if flips else given
        return None

    def _hands_over(self, rank: int, bucket: int) -> int:
        if not self._worker(rank).have[bucket]:
            if not self._engine.world.shared:
                msg = f"bucket missing: {rank} hands over bucket {bucket} and does not hold it"
                raise Violation(msg)
            self._hold(rank, bucket, self._memory.what_lies(rank, bucket))  # it takes what it finds
        self._memory.read(rank, bucket, self._what(rank, bucket))
        return self._worker(rank).have[bucket]

    @property
    def _finding(self) -> Note:
        """What a worker that has heard of a flip says of it."""
        return Note.ALTERED if self._engine.world.transient else Note.CORRUPT

    def _check_may_close(self, rank: int, worker: Worker, step: int) -> None:
        if worker.corrupt:
            msg = f"what is corrupt is gone on with: {rank} has heard of it, and closes step {step}"
            raise Violation(msg)
        if self._engine.homes is not None:
            self._check_may_close_split(rank)
        elif step < self._engine.world.steps:
            self._check_have(rank, worker, "closes")
        stable = step if self._engine.buckets else step - 1  # without buckets, this sum shows that the step before is
        if self._engine.world.all_publish and worker.told < stable:
            msg = f"never published: {rank} closes step {step}, and has not published all before"
            raise Violation(msg)

    def _result(self, this: Sum, result: int) -> int:
        """Return what a sum says; ``result`` if nobody knows it yet."""
        if this.result < 0:
            self._sums[this.number] = this = this._replace(result=result)
        return this.result

    def _is_of_use(self, this: Sum) -> bool:
        """Return whether anybody can still complete ``this``."""
        living = living_ranks(self._workers)
        never_again = self._members & ~(living | self._memory.may_enter(this.number)) | self._failed
        needed, may_be_completed = self._members, False
        for rank in ranks(living & ~self._failed):
            worker = self._worker(rank)
            if worker.sums < this.number:
                may_be_completed = True
            elif worker.sums == this.number and waits_in_sum(worker):
                may_be_completed = True
                needed &= self._engine.needed(self._members, rank, worker.waits)
        return may_be_completed and not needed & ~this.entered & never_again
