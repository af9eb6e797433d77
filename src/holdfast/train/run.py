"""One training loop: carries out the orders of the protocol, and tells it what happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint import Loaded
from holdfast.comm import OrderedSum
from holdfast.errors import CheckpointCorrupt, ConfigError, InternalError, PeerFailed, ReplicasDiffer, TooFewWorkers
from holdfast.events import (
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
from holdfast.recovery import Protocol, make_strategy
from holdfast.train.batches import Batches, Cursor, MiniBatch, Plan
from holdfast.train.data import fetch
from holdfast.train.ledger import Account, Ledger
from holdfast.train.replica import Replica
from holdfast.train.scribe import Scribe
from holdfast.train.seeds import seed_slice
from holdfast.train.state import RotatingDigest, clone, model_sha256, model_tensors, state_sha256
from holdfast.train.step import Step
from holdfast.train.world import LEAVE, STOP, World


@dataclass(slots=True)
class _Recovery:
    """What is known of the recovery in progress."""

    before: tuple[int, ...]
    decision: str = "continue"
    redone_steps: int = 0


class Run:
    """One call of ``session.steps``.

    Args:
        world: What outlives it.
        replica: The model and its optimizer.
        plan: Which samples belong to which step.
        dataset: Anything with ``len`` and ``[]``.
        collate: Makes a mini-batch of a list of samples; None takes torch's.
    """

    def __init__(self, world: World, replica: Replica, plan: Plan, dataset: Any, collate: Any) -> None:
        self._world = world
        self._replica = replica
        self._dataset = dataset
        self._collate = collate
        self._protocol = Protocol(
            make_strategy(world.settings.strategy, min_workers=world.settings.min_workers), len(replica.buckets)
        )
        self._scribe = Scribe(world)
        self._sum = OrderedSum(world.comm, world.settings.order)
        self._digest = RotatingDigest(replica.model)
        self._use(plan)
        self._ledger = Ledger(plan)
        self._cursor = plan.start
        self._batch: MiniBatch | None = None
        self._attempts = (world.step, 0)
        self._names: dict[str, None] = {}
        self._heard = 0
        self._outcome = "done"
        self._initial: dict[str, Any] | None = None
        self._announced = False
        self._skipped = False
        self._recovery: _Recovery | None = None

    def _use(self, plan: Plan) -> None:
        self._plan = plan
        self._batches = Batches(plan)

    # -- the loop

    def drive(self) -> Iterator[Step]:
        """Yield steps to the script until the protocol says that this worker may leave."""
        event: Event = Started()
        while True:
            for order in self._protocol.handle(event):
                match order:
                    case Publish(step=step):
                        self._publish(step)
                    case ComputeStep(step=step):
                        batch = self._next_batch(step)
                        if batch is None:
                            event = RanOut()
                            continue
                        attempt = self._begin_attempt(batch)
                        yield attempt
                        attempt.check_computed()
                        event = Computed()
                    case Leave():
                        self._leave()
                        return
                    case _:
                        event = self._carry_out(order)

    def _carry_out(self, order: Action) -> Event:
        try:
            return self._try(order)
        except PeerFailed:
            self._see_failure()
            return PeerLost()

    def _try(self, order: Action) -> Event:
        comm = self._world.comm
        match order:
            case SumBucket(step=step, bucket=bucket):
                self._sum_bucket(step, bucket)
                return BucketSummed()
            case CloseStep(step=step):
                self._close(step)
                return StepClosed()
            case ApplyStep(step=step):
                self._apply(step)
                return StepApplied()
            case Revoke():
                comm.revoke()
                return Revoked()
            case Agree(flag=flag):
                self._scribe.mark("recovery" if self._recovery else "gate")
                value = comm.agree(flag)
                if flag and not value:
                    self._see_failure()
                return Agreed(value)
            case Shrink():
                comm.shrink()
                for rank in comm.here:
                    self._world.faults.reach("recovery", self._world.step, rank)
                return Shrunk()
            case ShareProgress(progress=progress):
                known = comm.share_progress(dataclasses.replace(progress, flags=self._heard))
                for other in known.values():
                    self._heard |= other.flags
                return ProgressKnown(known, len(self._replica.buckets))
            case DiscardStep():
                return self._discard()
            case HandOver(bucket=bucket, source=source):
                self._hand_over(bucket, source)
                return HandedOver(order.step, bucket)
            case LoadCheckpoint():
                return CheckpointLoaded(self._load())
            case SaveAndStop():
                return self._save_and_stop()
            case _:
                msg = f"unknown order {order}"
                raise InternalError(msg)

    # -- a step

    def _next_batch(self, step: int) -> MiniBatch | None:
        self._announce()
        self._note_recovery()
        batch = self._batches.mini_batch(step, self._cursor, self._world.comm.members)
        if batch is not None and not self._skipped:
            if not (self._heard or self._outcome == "gave-up"):
                return batch
            if self._heard & LEAVE and self._outcome == "done":
                self._outcome = "stopped"
            if self._outcome == "stopped":
                self._begin_checkpoint()
        self._scribe.mark("gate")
        return None

    def _begin_attempt(self, batch: MiniBatch) -> Step:
        self._batch = batch
        number, times = self._attempts
        self._attempts = (batch.step, times + 1 if number == batch.step else 0)
        self._replica.begin_step()
        self._scribe.mark("forward")
        for rank in self._world.comm.here:
            self._world.faults.reach("forward", batch.step, rank)
        mine = [number for number, rank in batch.owners.items() if rank in self._world.comm.here]
        return Step(self, batch, mine, self._attempts[1])

    def begin_slice(self, batch: MiniBatch, number: int) -> Any:
        """Make everything ready for the slice and return its inputs."""
        ids = batch.slices[number]
        self._world.beacon.mark("forward", batch.step, number, ids)
        self._replica.begin_slice()
        seed_slice(self._plan.seed, batch.step, number)
        return fetch(self._dataset, ids, self._collate)

    def backward(self, loss: torch.Tensor, batch: MiniBatch, number: int) -> None:
        """Compute the gradients of the slice."""
        ids, owner, faults = batch.slices[number], batch.owners[number], self._world.faults
        self._world.beacon.mark("backward", batch.step, number, ids)
        midway = None
        if faults.waits_for("backward", batch.step, owner):
            midway = lambda: faults.reach("backward", batch.step, owner)  # noqa: E731
        self._replica.backward(loss, len(ids), midway)

    def end_slice(self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float]) -> None:
        """Take the gradients away."""
        self._names = dict.fromkeys(metrics)
        self._replica.end_slice(number, metrics, len(batch.slices[number]))

    def ask_to_stop(self) -> None:
        """Remember that training ends with this step."""
        self._world.asked |= STOP

    def _sum_bucket(self, step: int, bucket: int) -> None:
        batch, replica, members = self._in_progress(), self._replica, self._world.comm.members
        self._note_recovery()
        self._scribe.mark("allreduce")
        owners = {number: rank for number, rank in batch.owners.items() if rank in members}
        layout = replica.buckets.layouts[bucket]
        result = self._sum(
            {number: terms[bucket] for number, terms in replica.terms.items()},
            owners,
            length=layout.length,
            dtype=layout.dtype,
            device=layout.device,
            key=bucket,
            midway=lambda: self._reach_in_sum(step, bucket),
        )
        replica.add_sum(result, sorted(owners))

    def _reach_in_sum(self, step: int, position: int) -> None:
        for rank in self._world.comm.here:
            self._world.faults.reach("allreduce", step, rank, position - 1 if position else None)

    def _close(self, step: int) -> None:
        self._note_recovery()
        self._scribe.mark("allreduce")
        self._reach_in_sum(step, len(self._replica.buckets))
        digest = self._digest.of_step(step)
        sent = (digest, ~digest, step, ~step, self._world.asked)
        high, low, last, first, flags = self._world.comm.maximum(sent)
        if last != ~first:
            msg = f"workers closed different steps, {~first} and {last}"
            raise InternalError(msg)
        if high != ~low:
            msg = f"the replicas differ before step {step}: a worker computed wrong bits, or its weights were changed by hand"
            raise ReplicasDiffer(msg)
        self._heard |= flags

    def _apply(self, step: int) -> None:
        world, batch, replica = self._world, self._in_progress(), self._replica
        self._scribe.mark("optimizer")
        for rank in world.comm.here:
            world.faults.reach("optimizer", step, rank)
        lost = replica.missing_slices(batch)
        workers = len({rank for number, rank in batch.owners.items() if number not in lost})
        world.metrics = replica.apply(batch, world.settings.rescale, list(self._names))
        committed = [batch.slices[number] for number in batch.owners if number not in lost]
        for ids in committed:
            self._ledger.commit(batch.epoch, ids)
        self._cursor, self._batch, world.step = batch.after, None, step + 1
        if world.is_lead:
            self._scribe.committed(batch, sum(map(len, committed)), workers, lost)
            if world.keeper.is_due(world.step):
                self._begin_checkpoint()

    def _in_progress(self) -> MiniBatch:
        assert self._batch is not None, "no step is in progress"
        return self._batch

    # -- recovery

    def _see_failure(self) -> None:
        if self._recovery is None:
            self._recovery = _Recovery(before=self._world.comm.members)
            self._scribe.failure_seen()
            self._scribe.mark("recovery")

    def _discard(self) -> Event:
        if self._recovery is not None and self._recovery.decision == "continue":
            self._recovery.decision = "redo"
            self._recovery.redone_steps = int(self._batch is not None)
        if self._batch is not None:
            self._replica.discard_step()
        self._batch = None
        return ActDone()

    def _hand_over(self, bucket: int, source: int) -> None:
        """Give a sum, and the slices that are in it, to those who lack it."""
        comm, replica, layout = self._world.comm, self._replica, self._replica.buckets.layouts[bucket]
        has_it = len(replica.sums) > bucket
        inside = torch.zeros(len(self._in_progress().slices), dtype=torch.uint8)
        if has_it:
            inside[list(replica.summed_slices[bucket])] = 1
        comm.broadcast(inside, source)
        data = replica.sums[bucket] if has_it else torch.empty(layout.length, dtype=layout.dtype, device=layout.device)
        comm.broadcast(data, source)
        if not has_it:
            replica.add_sum(data, [int(i) for i in inside.nonzero()])

    def _note_recovery(self) -> None:
        """Write down what was decided, once training goes on."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            self._scribe.recovered(recovery.before, recovery.decision, recovery.redone_steps)

    # -- the beginning

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            parameters = sum(p.numel() for p in self._replica.model.parameters())
            self._scribe.started(self._plan, len(self._replica.buckets), parameters)

    def _load(self) -> int:
        """Make all replicas equal: from the newest intact checkpoint if there is one to go on from."""
        world = self._world
        reached = world.step + int(self._batch is not None)
        self._discard()
        self._heard &= LEAVE  # a script that asked to stop will ask again
        world.keeper.drop()
        loaded = self._choose_checkpoint()
        if loaded is not None:
            self._restore(loaded)
        else:
            if self._initial is not None:
                self._restore_initial(self._initial)
            self._make_equal()
            if world.settings.strategy == "restart":
                self._initial = clone(self._replica.state_dict())
        if self._recovery is not None:
            self._recovery.decision = "load"
            self._recovery.redone_steps = reached - world.step if self._announced else 0
        return world.step

    def _choose_checkpoint(self) -> Loaded | None:
        """Return what everybody loads, None for what is in memory. One looks, and tells the others.

        A death may interrupt the first loading when some have done it and some have not, so which sums are made here
        must not depend on how far this worker came.
        """
        world = self._world
        step = world.comm.maximum([self._find_checkpoint() if world.is_lead else -1])[0]
        return world.keeper.load(step) if step >= 0 else None

    def _find_checkpoint(self) -> int:
        """Return the newest step that this loop can go on from, -1 for none."""
        world = self._world
        if not self._announced and world.loaded is not None:
            return world.loaded.step
        if not self._announced and (world.loop > 0 or not world.settings.resume):
            world.keeper.check_empty(ours=world.loop > 0)
            return -1
        found = world.keeper.newest(self._warn_damaged)
        of_another_loop = found >= 0 and self._announced and world.keeper.load(found).info["loop"] != world.loop
        return -1 if of_another_loop else found

    def _warn_damaged(self, step: int, damage: CheckpointCorrupt) -> None:
        self._scribe.say(f"the checkpoint of step {step} is damaged and is passed over: {damage}")

    def _restore(self, loaded: Loaded) -> None:
        world, info = self._world, loaded.info
        self._check_fits(info)
        self._replica.load_state_dict(loaded.state["replica"])
        world.step, world.metrics = loaded.step, dict(loaded.state["metrics"])
        self._skipped = info["loop"] > world.loop
        world.loaded = loaded if self._skipped else None
        if not self._skipped:
            world.first_step_of_loop = info["first_step_of_loop"]
            self._cursor = Cursor(epoch=info["epoch"], offset=info["offset"])
            self._ledger.load_state_dict(loaded.state["ledger"])
            world.totals = Account(**info["totals"])

    def _check_fits(self, info: dict[str, Any]) -> None:
        """Compare what must not change between a checkpoint and the run that goes on from it.

        Raises:
            ConfigError: if something did change.
        """
        if info["loop"] > self._world.loop:
            return
        if not self._world.settings.slices and info["slices"] != self._plan.slices:
            self._use(dataclasses.replace(self._plan, slices=info["slices"]))
        for name in ("slices", "seed", "batch_size", "num_samples"):
            if info[name] != getattr(self._plan, name):
                msg = (
                    f"the checkpoint was made with {name}={info[name]} and this run has {getattr(self._plan, name)}: "
                    "the run would not be the same; give the old value, or start anew in an empty directory"
                )
                raise ConfigError(msg)
        if info["order"] != self._world.settings.order:
            msg = f"the checkpoint was made with order={info['order']}, got {self._world.settings.order}"
            raise ConfigError(msg)

    def _restore_initial(self, state: dict[str, Any]) -> None:
        self._replica.load_state_dict(state)
        self._world.step = self._world.first_step_of_loop
        self._cursor = self._plan.start
        self._ledger = Ledger(self._plan)

    def _make_equal(self) -> None:
        """Give everybody the lowest worker's model, unless all are equal already."""
        comm, model = self._world.comm, self._replica.model
        digest = int(model_sha256(model)[:15], 16)
        high, low = comm.maximum((digest, ~digest))
        if high == ~low:
            return
        for _, tensor in model_tensors(model):
            whole = tensor.contiguous()
            comm.broadcast(whole, comm.members[0])
            tensor.copy_(whole)

    # -- checkpoints

    def _begin_checkpoint(self) -> None:
        world, plan = self._world, self._plan
        if not world.is_lead:
            return
        self._scribe.mark("checkpoint")
        world.keeper.begin(
            world.step,
            {"replica": self._replica.state_dict(), "ledger": self._ledger.state_dict(), "metrics": world.metrics},
            {
                "loop": world.loop,
                "first_step_of_loop": world.first_step_of_loop,
                "epoch": self._cursor.epoch,
                "offset": self._cursor.offset,
                "seed": plan.seed,
                "slices": plan.slices,
                "order": world.settings.order,
                "batch_size": plan.batch_size,
                "num_samples": plan.num_samples,
                "workers": len(world.comm.members),
                "totals": dataclasses.asdict(world.totals),
            },
        )

    def _publish(self, stable_step: int) -> None:
        kept = self._world.keeper.publish(stable_step, self._world.comm.generation)
        if kept is not None:
            self._scribe.saved(kept)

    def _save_and_stop(self) -> Event:
        self._outcome = "gave-up"
        if self._recovery is not None:
            self._recovery.decision = "stop"
        self._begin_checkpoint()
        return ActDone()

    # -- the end

    def _leave(self) -> None:
        world, replica = self._world, self._replica
        self._note_recovery()
        self._scribe.finished(
            self._outcome, model_sha256(replica.model), state_sha256(replica.model, replica.optimizer), self.account()
        )
        self._scribe.mark("script")
        world.asked &= ~STOP
        if self._outcome == "gave-up":
            alive, least = len(world.comm.members), world.settings.min_workers
            msg = f"{alive} of at least {least} workers are left; the state before step {world.step} is in {world.keeper.root}"
            raise TooFewWorkers(msg)
        if self._outcome == "stopped":
            self._scribe.say(f"stopped on request; the state before step {world.step} is in {world.keeper.root}")
            raise SystemExit(4)

    def account(self) -> Account:
        """Return the account of all samples, earlier loops included."""
        return self._world.totals.plus(self._ledger.account(self._cursor))
