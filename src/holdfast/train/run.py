"""One training loop: carries out the orders of the protocol, and tells it what happened."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint import Loaded
from holdfast.clock import Clock
from holdfast.comm import Communicator, OrderedSum
from holdfast.errors import CheckpointCorrupt, ConfigError, InternalError, PeerFailed, ReplicasDiffer, TooFewWorkers
from holdfast.events import (
    ActDone,
    Action,
    Agree,
    Agreed,
    ApplyStep,
    BucketSummed,
    CheckpointLoaded,
    CheckpointSaved,
    CloseStep,
    Computed,
    ComputeStep,
    DiscardStep,
    Event,
    FailureSeen,
    Finished,
    HandedOver,
    HandOver,
    Leave,
    LoadCheckpoint,
    PeerLost,
    ProgressKnown,
    Publish,
    RanOut,
    Recovered,
    Revoke,
    Revoked,
    RunStarted,
    SamplesLost,
    SaveAndStop,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    StepClosed,
    StepCommitted,
    SumBucket,
)
from holdfast.faults.process import Injector
from holdfast.records import Beacon, NoBeacon, Recorder
from holdfast.recovery import Protocol, make_strategy
from holdfast.settings import Settings
from holdfast.train.batches import Batches, Cursor, MiniBatch, Plan
from holdfast.train.data import fetch
from holdfast.train.keeper import Keeper
from holdfast.train.ledger import Account, Ledger
from holdfast.train.replica import Replica
from holdfast.train.seeds import seed_slice
from holdfast.train.state import RotatingDigest, clone, model_sha256, model_tensors, state_sha256
from holdfast.train.step import Step

STOP = 1
"""Flag in the closing sum: a script asked to stop after this step."""
LEAVE = 2
"""Flag in the closing sum: a worker was told to leave (SIGTERM)."""


@dataclass(slots=True)
class World:
    """What outlives one training loop: who is there, and where things are written.

    Args:
        settings: As asked for.
        comm: The living.
        clock: For ``t_s``.
        recorder: Takes records.
        beacon: Says where this worker is.
        faults: Strikes as planned.
        keeper: Checkpoints.
        first_members: The workers that the job was started with.
        step: Steps committed.
        epoch: Epochs begun by earlier loops.
        loop: Number of training loops before this one.
        asked: Flags that this worker wants in the next closing sum.
        metrics: Of the last committed step.
        first_step_of_loop: Steps committed before this loop.
        loaded: A checkpoint of a later loop than this one: the loops before it are left out.
        finished: The ``Finished`` records of the last loop.
        totals: Accounts of earlier loops.
    """

    settings: Settings
    comm: Communicator
    clock: Clock
    recorder: Recorder
    beacon: Beacon | NoBeacon
    faults: Injector
    keeper: Keeper
    first_members: tuple[int, ...]
    step: int = 0
    epoch: int = 0
    loop: int = 0
    asked: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    first_step_of_loop: int = 0
    loaded: Loaded | None = None
    finished: list[Finished] = field(default_factory=list)
    totals: Account = field(default_factory=Account)

    @property
    def is_lead(self) -> bool:
        """Whether the lowest worker alive is played here: it writes what is written once."""
        return self.comm.members[0] in self.comm.here


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
        self._phase = "start"
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
                self._mark("recovery" if self._recovery else "gate")
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
        self._mark("gate")
        return None

    def _begin_attempt(self, batch: MiniBatch) -> Step:
        self._batch = batch
        number, times = self._attempts
        self._attempts = (batch.step, times + 1 if number == batch.step else 0)
        self._replica.begin_step()
        self._mark("forward")
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
        self._mark("allreduce")
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
        self._mark("allreduce")
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
        self._mark("optimizer")
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
            self._write_step(batch, sum(map(len, committed)), workers, lost)
            if world.keeper.is_due(world.step):
                self._begin_checkpoint()

    def _write_step(self, batch: MiniBatch, samples: int, workers: int, lost: dict[int, tuple[int, ...]]) -> None:
        now_s, rank, world = self._world.clock.now_s(), self._world.comm.members[0], self._world
        world.recorder.write(
            StepCommitted(
                t_s=now_s,
                rank=rank,
                step=batch.step,
                epoch=batch.epoch,
                samples=samples,
                workers=workers,
                metrics=world.metrics,
            )
        )
        for number, buckets in lost.items():
            ids = tuple(int(i) for i in batch.slices[number])
            world.recorder.write(
                SamplesLost(t_s=now_s, rank=rank, step=batch.step, epoch=batch.epoch, ids=ids, buckets=buckets)
            )

    def _in_progress(self) -> MiniBatch:
        assert self._batch is not None, "no step is in progress"
        return self._batch

    # -- recovery

    def _see_failure(self) -> None:
        if self._recovery is not None:
            return
        world = self._world
        self._recovery = _Recovery(before=world.comm.members)
        dead = world.comm.failed()
        rank = next((rank for rank in world.comm.here if rank not in dead), world.comm.here[0])
        world.recorder.write(FailureSeen(t_s=world.clock.now_s(), rank=rank, step=world.step, phase=self._phase))
        self._mark("recovery")

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
        recovery, world = self._recovery, self._world
        if recovery is None:
            return
        self._recovery = None
        members = world.comm.members
        for rank in world.comm.here:
            world.recorder.write(
                Recovered(
                    t_s=world.clock.now_s(),
                    rank=rank,
                    step=world.step,
                    lost=tuple(r for r in recovery.before if r not in members),
                    survivors=members,
                    decision=recovery.decision,
                    redone_steps=recovery.redone_steps,
                    generation=world.comm.generation,
                )
            )
        lost = [r for r in recovery.before if r not in members]
        self._say(f"lost {lost} at step {world.step}; {len(members)} workers go on ({recovery.decision})")

    # -- the beginning

    def _announce(self) -> None:
        if self._announced:
            return
        self._announced = True
        world, settings, plan = self._world, self._world.settings, self._plan
        world.recorder.write(
            RunStarted(
                t_s=world.clock.now_s(),
                rank=world.comm.here[0],
                step=world.step,
                fabric="virtual" if len(world.comm.processes) < len(world.comm.members) else "ulfm",
                strategy=settings.strategy,
                seed=plan.seed,
                workers=len(world.comm.members),
                slices=plan.slices,
                order=settings.order,
                split=plan.split,
                batch=plan.batch,
                rescale=settings.rescale,
                steps_planned=world.first_step_of_loop + plan.num_steps,
                samples_planned=plan.epochs * plan.epoch_samples,
                num_buckets=len(self._replica.buckets),
                parameters=sum(p.numel() for p in self._replica.model.parameters()),
            )
        )

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
        elif self._initial is not None:
            self._restore_initial(self._initial)
        else:
            self._make_equal()
            if world.settings.strategy == "restart":
                self._initial = clone(self._replica.state_dict())
        if self._recovery is not None:
            self._recovery.decision = "load"
            self._recovery.redone_steps = reached - world.step if self._announced else 0
        return world.step

    def _choose_checkpoint(self) -> Loaded | None:
        """Return what everybody loads, None for what is in memory. One looks, and tells the others."""
        world = self._world
        if world.loaded is not None and not self._announced:
            return world.loaded
        if not self._announced and (world.loop > 0 or not world.settings.resume):
            world.keeper.check_empty(ours=world.loop > 0)
            return None
        found = -1
        if world.is_lead:
            found = world.keeper.newest(self._warn_damaged)
            if found >= 0 and self._announced and world.keeper.load(found).info["loop"] != world.loop:
                found = -1
        step = world.comm.maximum([found])[0]
        return world.keeper.load(step) if step >= 0 else None

    def _warn_damaged(self, step: int, damage: CheckpointCorrupt) -> None:
        self._say(f"the checkpoint of step {step} is damaged and is passed over: {damage}")

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
        self._mark("checkpoint")
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
        world = self._world
        kept = world.keeper.publish(stable_step, world.comm.generation)
        if kept is not None:
            world.recorder.write(
                CheckpointSaved(
                    t_s=world.clock.now_s(),
                    rank=world.comm.members[0],
                    step=kept.saved.step,
                    path=str(kept.saved.path),
                    size_bytes=kept.saved.size_bytes,
                    seconds=kept.seconds,
                )
            )

    def _save_and_stop(self) -> Event:
        self._outcome = "gave-up"
        if self._recovery is not None:
            self._recovery.decision = "stop"
        self._begin_checkpoint()
        return ActDone()

    # -- the end

    def _leave(self) -> None:
        world = self._world
        self._note_recovery()
        account = self.account()
        world.finished = [
            Finished(
                t_s=world.clock.now_s(),
                rank=rank,
                step=world.step,
                outcome=self._outcome,
                sha256=model_sha256(self._replica.model),
                state_sha256=state_sha256(self._replica.model, self._replica.optimizer),
                planned=account.planned,
                committed=account.committed,
                lost=account.lost,
                repeated=account.repeated,
                metrics=world.metrics,
                checkpoint="" if self._outcome == "done" else str(world.keeper.root),
            )
            for rank in world.comm.here
        ]
        for record in world.finished:
            world.recorder.write(record)
        self._mark("script")
        world.asked &= ~STOP
        if self._outcome == "gave-up":
            alive, least = len(world.comm.members), world.settings.min_workers
            msg = f"{alive} of at least {least} workers are left; the state before step {world.step} is in {world.keeper.root}"
            raise TooFewWorkers(msg)
        if self._outcome == "stopped":
            self._say(f"stopped on request; the state before step {world.step} is in {world.keeper.root}")
            raise SystemExit(4)

    def account(self) -> Account:
        """Return the account of all samples, earlier loops included."""
        return self._world.totals.plus(self._ledger.account(self._cursor))

    # -- saying where we are

    def _mark(self, phase: str) -> None:
        self._phase = phase
        self._world.beacon.mark(phase, self._world.step)

    def _say(self, text: str) -> None:
        """Tell the user; under the launcher the records do."""
        if self._world.is_lead and not self._world.settings.run_dir:
            sys.stderr.write(f"holdfast: {text}\n")
            sys.stderr.flush()
