"""What a worker of the abstract engine does with its weights and gradients, by itself; and the promises about these.

Replicas are equal as far as they go and at most one step apart; what was published is in everybody's history; everybody
ends at the last step, or saves and stops, or leaves in order while somebody stays, or is a newcomer that is left alone; a
newcomer gets the state before the step that is next, and does nothing before it has it. Unless the world is lossy,
nothing may be missing from a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.recovery.messages import (
    JOINING,
    LOADING,
    ChangesWait,
    CheckpointLoaded,
    Computed,
    DataExhausted,
    Done,
    Event,
    MembersChange,
    Note,
    Revoked,
    SendState,
    StepApplied,
)
from model.abstract_exchanges import Exchanges
from model.abstract_members import Lapse
from model.abstract_memory import Violation, What, ranks
from model.abstract_state import (
    NO_SNAPSHOT,
    Computing,
    Given,
    Offer,
    Payload,
    Snapshot,
    Sum,
    Worker,
    living_ranks,
)


class Work(Exchanges):
    """A state that is being changed, and what one worker may change of it."""

    # -- steps

    def _compute(self, rank: int, step: int) -> Event | None:
        self._check_step(rank, step, "computes")
        if self._worker(rank).corrupt:
            msg = f"corrupt state is trained on: {rank} has heard of it, and computes step {step}"
            raise Violation(msg)
        heard = self._worker(rank).heard
        if heard & Note.CHANGE:
            self._set(rank, calm=True)
            return MembersChange()
        self._set(rank, calm=False)
        if heard & Note.ASK:
            return ChangesWait()
        if heard & Note.LEAVE:
            self._set(rank, saved=True)
        if step >= self._engine.world.steps or heard & Note.LEAVE:
            return DataExhausted()
        everything = (1 << self._engine.buckets) - 1
        self._workers[rank] = self._worker(rank).without_gradients()
        self._set(rank, group=self._members, inputs=everything)
        self._memory.compute(rank, step, self._members)
        if self._engine.world.early:
            self._set(rank, waits=Computing(step), spoiled=False)
            return None
        return Computed() if self._engine.homes is None else self._next_exchange(rank)

    def _discard(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "discards")
        self._drop_gradients(rank)
        if self._engine.world.transient:
            self._set(rank, corrupt=False)
        return Done()

    def _apply(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "applies")
        if self._engine.homes is not None:
            self._apply_parts(rank, step)
        worker = self._worker(rank)
        if self._engine.homes is None:
            self._check_have(rank, worker, "applies")
            self._check_nothing_is_missing(rank, worker)
        self._write(rank, step, (worker.group, worker.taken, worker.homes, *worker.have))
        self._memory.apply(rank, [self._what(rank, bucket) for bucket in range(len(worker.have))])
        self._drop_gradients(rank)
        self._set(rank, steps=step + 1, used=worker.taken, snapshot=-1)
        self._check_nobody_is_far_from(rank, step + 1)
        if (step + 1) % self._engine.world.rotation == 0:
            self._keep(rank, known=False)
        return StepApplied()

    def _check_nobody_is_far_from(self, rank: int, steps: int) -> None:
        for other in self._workers:
            if other is not None and other.steps >= 0 and abs(other.steps - steps) > 1:
                msg = f"more than one apart: {rank} has {steps} steps, somebody has {other.steps}"
                raise Violation(msg)

    def _check_nothing_is_missing(self, rank: int, worker: Worker) -> None:
        for bucket, whose in enumerate(worker.have):
            must_be_in = living_ranks(self._workers) if self._engine.world.lossy else worker.group
            if whose & ~worker.group or must_be_in & ~whose:
                msg = f"gradients are missing: {rank} applies step {worker.steps}, bucket {bucket}, of {list(ranks(whose))} only"
                raise Violation(msg)

    def _publish(self, rank: int, step: int) -> None:
        if self._worker(rank).steps <= step:
            msg = f"published state is not in the history: {rank} publishes step {step} and does not have it"
            raise Violation(msg)
        if self._engine.world.all_publish:
            self._set(rank, told=max(self._worker(rank).told, step + 1))
        if (step + 1) % self._engine.world.checkpoint_every == 0:
            self._set_published(rank, step + 1)

    def _set_published(self, rank: int, steps: int) -> None:
        if steps > self._published:
            self._published, self._published_taken = steps, self._worker(rank).used

    def _revoke(self, rank: int) -> Event:
        if not (self._fenced or self._engine.world.atomic_shrink) and living_ranks(self._workers) != 1 << rank:
            msg = f"revoke meets shrink: {rank} revokes what others may still be building"
            raise Violation(msg)
        self._revokers |= 1 << rank
        return Revoked()

    def _leave(self, rank: int) -> None:
        worker = self._worker(rank)
        if not self._members & 1 << rank:
            self._remove(rank)  # in order, and the others go on
            self._left |= 1 << rank
            return
        if worker.steps != self._engine.world.steps and not worker.saved:
            msg = f"left too early: {rank} leaves after {worker.steps} steps of {self._engine.world.steps}"
            raise Violation(msg)
        if worker.steps < self._published:
            msg = f"published state is not in the history: {rank} leaves without it"
            raise Violation(msg)
        self._check_has_its_parts(rank, "leaves")
        self._set_published(rank, worker.steps)  # its result is out
        self._remove(rank)
        self._left |= 1 << rank

    def _remove(self, rank: int) -> None:
        self._workers[rank] = None
        self._failed &= ~(1 << rank)
        self._revokers &= ~(1 << rank)
        self._wishes = self._wishes.without(1 << rank)

    # -- newcomers, and changes

    def _is_given(self, rank: int, brought: Sequence[tuple[int, Payload]]) -> None:
        given = {payload for _, payload in brought if isinstance(payload, Given)}
        if len(given) != 1:
            msg = f"different states are given to {rank}: {given}"
            raise Violation(msg)
        self._set(rank, given=given.pop())

    def _gives(self, rank: int, order: SendState) -> Given | None:
        """Return what ``rank`` gives, None if it is a newcomer."""
        self._set(rank, calm=True)
        worker = self._worker(rank)
        if rank in order.newcomers:
            return None
        if worker.steps != order.step or worker.group:
            msg = f"wrong state is given: {rank} gives {worker.steps} steps{' and a part of one' * bool(worker.group)}"
            raise Violation(msg)
        return Given(worker.steps, worker.taken, worker.homes)

    def _install(self, rank: int, step: int) -> Event:
        worker = self._worker(rank)
        if worker.steps == JOINING and worker.given is not None:
            steps, taken, homes = worker.given
            self._set(rank, steps=steps, given=None, told=steps, used=taken, homes=homes)
            self._take(rank, taken)
        self._check_step(rank, step, "installs")
        if self._engine.world.flips and Lapse.KEEPS_SNAPSHOTS not in self._engine.world.lapses:
            now = Snapshot(step, self._worker(rank).taken)
            self._set(rank, candidate=now, verified=NO_SNAPSHOT)
        return Done()

    def _make_changes(self, rank: int) -> None:
        worker = self._worker(rank)
        self._take(rank, max(worker.aside, worker.taken))
        self._set(rank, heard=worker.heard & ~Note.ASK, aside=0)

    def _take(self, rank: int, taken: int) -> None:
        mind = self._engine.minds.set_strategy(self._worker(rank).mind, self._engine.strategies[taken])
        self._set(rank, taken=taken, mind=mind)

    def _give_up(self, rank: int) -> None:
        """Let ``rank`` go, who has found that nobody has the state."""
        if not all(worker is None or worker.steps == JOINING for worker in self._workers):
            msg = f"gave up: {rank} goes no further, and somebody has the state"
            raise Violation(msg)
        self._remove(rank)

    def _rebuild(self, rank: int) -> Event:
        """Let ``rank`` build its application again, which has nothing but the snapshot that was taken before, if any was."""
        self._drop_gradients(rank)
        snapshot = self._worker(rank).steps if self._engine.world.snapshots else -1
        self._set(rank, snapshot=snapshot, steps=LOADING)
        return Done()

    def _load_snapshot(self, rank: int) -> Event:
        steps = self._worker(rank).snapshot
        if steps < self._published:
            msg = f"published state is not in the history: {rank} takes a snapshot of step {steps}"
            raise Violation(msg)
        self._drop_gradients(rank)
        self._set(rank, steps=steps)  # its settings are what they were
        self._keep(rank, known=True)
        return CheckpointLoaded(steps)

    # -- soft errors

    def _goes_back(self, this: Sum) -> bool:
        """Return whether somebody who loads has heard that a state is corrupt."""
        return any(isinstance(offer, Offer) and offer.corrupt for _, offer in this.brought)

    def _target(self, this: Sum) -> Snapshot:
        """Return what all go back to: what all have kept, or what was saved when all was right."""
        offers = [offer for _, offer in this.brought if isinstance(offer, Offer)]
        kept = {offer.verified for offer in offers}
        if len(kept) == 1 and (common := kept.pop()) != NO_SNAPSHOT:
            return common
        if Lapse.KEEPS_SNAPSHOTS in self._engine.world.lapses:
            return NO_SNAPSHOT
        trusted = max(offer.trusted for offer in offers)
        (given,) = [offer.given for offer in offers if offer.given is not None]
        every = self._engine.world.checkpoint_every
        return Snapshot(min(given.steps, trusted) // every * every, given.taken)

    def _go_back(self, rank: int, kept: Snapshot) -> Event:
        """Let ``rank`` go back to a state that is known to be right; what was published since is taken back."""
        if kept == NO_SNAPSHOT:  # each to its own
            kept = self._worker(rank).verified
        if kept == NO_SNAPSHOT:
            kept = Snapshot(self._published, self._published_taken)
        del self._log[kept.steps :]
        if kept.steps < self._published:
            self._published, self._published_taken = kept
        self._set(rank, corrupt=False, snapshot=-1, told=min(self._worker(rank).told, kept.steps))
        return self._load(rank, *kept)

    def _keep(self, rank: int, *, known: bool) -> None:
        """Let ``rank`` keep its state, which is ``known`` to be right, or not yet."""
        if not self._engine.world.flips:
            return
        worker = self._worker(rank)
        now = Snapshot(worker.steps, worker.taken)
        verified = now if known else worker.candidate
        self._set(rank, candidate=now, verified=verified, trusted=max(worker.trusted, verified.steps))

    def _load(self, rank: int, steps: int, taken: int) -> Event:
        if steps < self._published:
            msg = f"published state is not in the history: {rank} loads step {steps}"
            raise Violation(msg)
        self._drop_gradients(rank)
        self._set(rank, steps=steps, used=taken)
        self._take(rank, taken)
        self._load_parts(rank, steps)
        self._set(rank, trusted=-1)
        self._keep(rank, known=True)
        return CheckpointLoaded(steps)

    def _hold(self, rank: int, bucket: int, whose: int) -> None:
        worker = self._worker(rank)
        have = (*worker.have[:bucket], whose, *worker.have[bucket + 1 :])
        self._set(rank, have=have, inputs=worker.inputs & ~(1 << bucket))  # known, so its input is dropped
        self._memory.summed(rank, bucket)

    # -- looking things up

    def _what(self, rank: int, bucket: int) -> What:
        worker = self._worker(rank)
        return What(worker.steps, worker.group, worker.have[bucket])

    def _what_is_added(self, rank: int) -> What:
        worker = self._worker(rank)
        return What(worker.steps, worker.group, self._members)

    def _check_have(self, rank: int, worker: Worker, does: str) -> None:
        if 0 in worker.have:
            msg = f"bucket missing: {rank} {does} step {worker.steps} without bucket {worker.have.index(0)}"
            raise Violation(msg)
