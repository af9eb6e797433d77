"""Trains many virtual workers with all slices of a step together, to measure how failures affect accuracy.

Protocol, strategies, buckets, slicing and reassignment are those of production. The protocol decides first: a step is
computed when it is to be applied, and discarded work is never computed. Then all samples that contribute to the same
all-reduces go through the model together. That is the whole mini-batch, unless workers failed in the middle of a step
that ``forward`` continues. Then each all-reduce has its own samples, and the samples of failed workers go through
separately, grouped by the all-reduce they missed.

So a thousand workers cost as much as one, but no hash is promised. Gradients are added in another order; random numbers
in the model are drawn for the whole mini-batch; and batch norm in training uses mean and variance of the mini-batch
instead of each slice, which is a different computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.config import Settings
from holdfast.data.ledger import Ledger, SampleCounts
from holdfast.data.plan import BatchCutter, MiniBatch, PlanCursor, SamplePlan
from holdfast.data.samples import fetch
from holdfast.data.seeds import seed_slice
from holdfast.errors import ConfigError, InternalError, JobError, ScriptError, TooFewWorkers
from holdfast.models.gradients import BucketLayout
from holdfast.models.step import Step
from holdfast.models.training_state import clone, model_tensors
from holdfast.recovery import Protocol, make_strategy
from holdfast.recovery.messages import (
    JOINING,
    Action,
    AdoptState,
    Agree,
    Agreed,
    ApplyStep,
    BucketReduced,
    CheckpointLoaded,
    Computed,
    ComputeStep,
    DataExhausted,
    DiscardStep,
    Done,
    Event,
    Leave,
    LoadCheckpoint,
    MembersChange,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    ReduceBucket,
    Revoke,
    Revoked,
    SaveAndStop,
    SendState,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast_lab.virtual_ddp.plan import MembershipChange, MembershipDecision, faults_by_step

__all__ = ["STRATEGIES", "MembershipChange", "MembershipDecision", "VirtualDdp", "VirtualSnapshot"]


STRATEGIES = ("rollback", "forward", "restart")
"""The strategies that differ here; ``reinit`` trains like ``rollback``, and ``partial`` is for split models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualSnapshot:
    """A copy of the state of a training.

    Args:
        step: Number of committed steps.
        cursor: Position in the data plan.
        model: All parameters and buffers by name.
        optimizer: State of the optimizer.
        ledger: State of the ledger.
    """

    step: int
    cursor: PlanCursor
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    ledger: dict[str, Any]


@dataclass(slots=True)
class _Attempt:
    """A step in progress: its mini-batch, in one piece if no worker can fail, and where each failed worker failed."""

    batch: MiniBatch
    full_size: int
    died_at: dict[int, int] = field(default_factory=dict)


class VirtualDdp:
    """Runs all workers of a job with one copy of the model.

    Args:
        model: The model, trained in place, on any device.
        optimizer: The optimizer of its parameters.
        changes: Planned changes of the workers.
        begin: Starting point: a :meth:`snapshot` of a training with the same data, seed and ``batch_size`` in which
            nothing has happened yet. None: start at the first step.
        **settings: Fields of :class:`holdfast.config.Settings`. Used are ``workers``, ``spares``, ``strategy``,
            ``slices``, ``split``, ``batch``, ``rescale``, ``min_workers``, ``checkpoint_every`` (in memory),
            ``bucket_bytes``, ``seed`` and ``faults``, which may be kills in a forward or backward pass or an
            all-reduce.

    Raises:
        ConfigError: if a setting is not allowed, or a fault is not supported here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        changes: Sequence[MembershipChange] = (),
        begin: VirtualSnapshot | None = None,
        **settings: Any,
    ) -> None:
        self._settings = Settings(**settings)
        if self._settings.strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy must be one of {', '.join(STRATEGIES)} where all slices are computed together, got "
                f"{self._settings.strategy}"
            )
        self.model, self.optimizer = model, optimizer
        self._buckets = BucketLayout(model, self._settings.bucket_bytes)
        self.members = tuple(range(self._settings.workers + self._settings.spares))
        """Ranks that are alive."""
        self._changes = {change.step: change for change in changes}
        if len(self._changes) < len(changes):
            raise ConfigError(
                f"at most one change is allowed before a step, got {len(changes)} for {len(self._changes)} steps; "
                "merge the changes of a step"
            )
        self._faults = faults_by_step(self._settings, self.members, len(self._buckets))
        self._fired: set[int] = set()
        self.step = 0
        """Number of steps in the weights."""
        self.loss: torch.Tensor | None = None
        """Mean over the samples of the last all-reduce of the last step."""
        self.decisions: list[MembershipDecision] = []
        """The decision of each regrouping."""
        self._cursor = PlanCursor(epoch=0, offset=0)
        self._attempt: _Attempt | None = None
        self._dead: set[int] = set()
        self._change: MembershipChange | None = None
        self._stopped = self._met = False
        self._saved: list[VirtualSnapshot] = []
        self._groups: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor | None] = []
        self._begin_at = begin

    @property
    def num_buckets(self) -> int:
        """Number of buckets of a step."""
        return len(self._buckets)

    def account(self) -> SampleCounts:
        """Return the account of the samples."""
        return self._ledger.account(self._cursor)

    def steps(
        self, dataset: Any, batch_size: int, epochs: int = 1, *, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[Step]:
        """Yield the steps that are committed, like ``session.steps`` with slices together.

        A loaded checkpoint may undo some of them.

        Args:
            dataset: Anything with ``len`` and ``[]``.
            batch_size: Samples per step, over all workers.
            epochs: Passes over the dataset.
            shuffle: Use an order that depends only on the seed and the epoch.
            drop_last: Drop the short mini-batch at the end of an epoch.

        Raises:
            TooFewWorkers: if fewer than ``min_workers`` are left.
            JobError: if no worker is left.
        """
        settings = self._settings
        self._dataset = dataset
        self._plan = SamplePlan(
            num_samples=len(dataset),
            batch_size=batch_size,
            first_epoch=0,
            epochs=epochs,
            seed=settings.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            slices=settings.slices or settings.workers,
            members=self.members[: settings.workers],
            split=settings.split,
            batch=settings.batch,
        )
        self._ledger = Ledger(self._plan)
        if self._begin_at is not None:
            self._set(self._begin_at)
        self._recut()
        if settings.strategy == "restart":
            self._saved.append(self.snapshot())
        strategy = make_strategy(settings.strategy, min_workers=settings.min_workers)
        protocol = Protocol(strategy, self.num_buckets)
        event: Event = Started()
        while True:
            for order in protocol.handle(event):
                match order:
                    case Publish(step=step):
                        self._publish(step)
                    case ApplyStep():
                        yield from self._apply()
                        event = StepApplied()
                    case Leave():
                        self._check_enough()
                        return
                    case _:
                        event = self._carry_out(order)

    def _carry_out(self, order: Action) -> Event:
        match order:
            case ComputeStep(step=step):
                return self._begin(step)
            case ReduceBucket(step=step, bucket=position):
                return PeerLost() if self._strike(step, position) else BucketReduced()
            case VoteStep(step=step):
                return PeerLost() if self._strike(step, self.num_buckets) else StepVoted()
            case Revoke():
                return Revoked()
            case Agree(flag=flag):
                return Agreed(flag)
            case Shrink():
                return self._shrink()
            case ShareProgress(progress=progress):
                return ProgressKnown(self._progress(progress), self.num_buckets)
            case DiscardStep():
                self._decide("redo", 1)
                self._attempt = None
            case LoadCheckpoint():
                return CheckpointLoaded(self._load())
            case SendState() | AdoptState():
                pass  # there is one copy of the state
            case SaveAndStop():
                self._decide("stop", 0)
                self._stopped = True
            case _:
                raise InternalError(f"{order} is not supported with all slices computed together")
        return Done()

    # -- members

    def _strike(self, step: int, position: int) -> bool:
        """Apply the faults at an all-reduce; return whether any worker failed."""
        if self._met:  # and nothing was discarded
            self._decide("continue", 0)
        for number, at, rank in self._faults.get(step, ()):
            if at != position or number in self._fired:
                continue
            self._fired.add(number)
            if rank in self.members:
                assert self._attempt is not None
                self._attempt.died_at[rank] = position
                self._dead.add(rank)
        return bool(self._dead)

    def _shrink(self) -> Event:
        leave = self._change.leave if self._change else ()
        join = self._change.join if self._change else ()
        self.members = tuple(sorted({*self.members, *join} - self._dead - set(leave)))
        self._dead.clear()
        if not self.members:
            raise JobError(f"every worker has failed in step {self.step}")
        if self._change:
            self._decide("grow" if join else "leave", 0)
        self._met = not self._change
        self._recut()
        return Shrunk()

    def _progress(self, mine: Progress) -> dict[int, Progress]:
        """Return the progress of all members: that of this process, except for newcomers."""
        flags = Note.PLANNED.when(self._change is not None)
        known = dict.fromkeys(self.members, dataclasses.replace(mine, flags=flags))
        if self._change:
            newcomer = Progress(JOINING, computed=False, flags=flags)
            known |= dict.fromkeys(self._change.join, newcomer)
        self._change = None
        return known

    def _decide(self, what: str, redone_steps: int) -> None:
        self._met = False
        self.decisions.append(MembershipDecision(self.step, what, redone_steps))

    def _check_enough(self) -> None:
        if self._stopped:
            raise TooFewWorkers(
                f"{len(self.members)} of at least {self._settings.min_workers} workers are left in step {self.step}"
            )

    # -- a step

    def _recut(self) -> None:
        """Determine the number of samples of a step for the current members."""
        plan, self._batches = self._plan, BatchCutter(self._plan)
        cut = self._batches.mini_batch(self.step, plan.start, self.members)
        assert cut is not None
        size = plan.batch_size if plan.batch == "global" else -(-plan.batch_size * len(cut.slices) // plan.slices)
        # Same samples in one piece: cutting a thousand slices takes as long as training a small model.
        self._whole = BatchCutter(
            dataclasses.replace(
                plan, slices=1, members=(0,), batch="global", batch_size=size, given_batch_size=plan.batch_size
            )
        )

    def _begin(self, step: int) -> Event:
        if step in self._changes:
            self._change = self._changes.pop(step)
            return MembersChange()
        waits = any(n not in self._fired and rank in self.members for n, _, rank in self._faults.get(step, ()))
        batches, members = (self._batches, self.members) if waits else (self._whole, (0,))
        batch = batches.mini_batch(step, self._cursor, members)
        if batch is None:
            return DataExhausted()
        full_size = min(self._plan.batch_size, self._plan.epoch_samples - self._cursor.offset)
        self._attempt = _Attempt(batch, full_size)
        return Computed()

    def _apply(self) -> Iterator[Step]:
        """Let the script compute the step, grouped by the all-reduces that samples contribute to; run the optimizer."""
        attempt = self._attempt
        assert attempt is not None
        groups = _groups(attempt, self.num_buckets)
        ids = [np.concatenate([attempt.batch.slices[number] for number in numbers]) for _, numbers in groups]
        self._groups = [(position, len(some)) for (position, _), some in zip(groups, ids, strict=True)]
        batch = dataclasses.replace(attempt.batch, slices=tuple(ids), owners={})
        self.optimizer.zero_grad(set_to_none=True)
        step = Step(self, batch, list(range(len(ids))), 0)
        yield step
        step.check_computed()
        if not self._is_whole:
            self._average(attempt.full_size)
        self.optimizer.step()
        committed = [some for (position, _), some in zip(groups, ids, strict=True) if position == self.num_buckets]
        self._ledger.commit(batch.epoch, np.concatenate([*committed, attempt.batch.ids[:0]]))
        self._cursor, self._attempt = batch.after, None
        self.step += 1
        every = self._settings.checkpoint_every
        if every and self.step % every == 0 and self._settings.strategy == "restart":
            self._saved.append(self.snapshot())  # which counts once its step is durable

    def begin_slice(self, batch: MiniBatch, number: int) -> Any:
        """Return the inputs of a group."""
        if self._groups[number][0] < self.num_buckets:
            # For failed workers: gradients of all-reduces that they missed do not count, nor do their buffers.
            self._before = [buffer.clone() for buffer in self.model.buffers()]
            self._kept = [parameter.grad for parameter in self._later(number)]
            for parameter in self._later(number):
                parameter.grad = None
        seed_slice(self._plan.seed, batch.step, number)
        return fetch(self._dataset, batch.slices[number], None)

    def backward(
        self, loss: torch.Tensor, batch: MiniBatch, number: int, *, is_only: bool = True, items: float | None = None
    ) -> None:
        """Compute the gradients of a group, either of the mean over the step or as sums that are divided later."""
        if items is not None:
            raise ScriptError("virtual DDP weighs groups by samples: call step.backward without items")
        samples = len(batch.slices[number])
        if self._is_whole:
            assert self._attempt is not None
            divisor = samples if self._settings.rescale == "survivors" else self._attempt.full_size
            (loss if samples == divisor else loss * (samples / divisor)).backward()
        else:
            (loss * samples).backward()

    def end_slice(
        self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float], items: float | None = None
    ) -> None:
        """Undo the effects that are not to count."""
        if self._groups[number][0] < self.num_buckets:
            for parameter, gradient in zip(self._later(number), self._kept, strict=True):
                parameter.grad = gradient
            for buffer, before in zip(self.model.buffers(), self._before, strict=True):
                buffer.copy_(before)
        self.loss = torch.as_tensor(metrics["loss"])

    def on_device(self, inputs: Any) -> Any:
        """Leave inputs where they are."""
        return inputs

    def log_media(self, *_: Any) -> None:
        """Drop it: no launcher logs."""

    def free_memory(self, error: RuntimeError, batch: MiniBatch, number: int) -> bool:
        """Let every error end the computation."""
        return False

    def between_slices(self, batch: MiniBatch) -> None:
        """Make random numbers that the script draws between the groups independent of the groups."""
        seed_slice(self._plan.seed, batch.step, -1)

    def ask_to_stop(self) -> None:
        """Refuse: training by virtual workers runs to its end.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "training with all slices computed together cannot be stopped inside a step; give fewer epochs"
        )

    @property
    def _is_whole(self) -> bool:
        """Whether all samples of the step contribute to all of its all-reduces."""
        return [position for position, _ in self._groups] == [self.num_buckets]

    def _later(self, number: int) -> list[nn.Parameter]:
        """Return the parameters whose gradients from a group are in no all-reduce."""
        position = self._groups[number][0]
        return [place.parameter for bucket in self._buckets.layouts[position:] for place in bucket.places]

    def _average(self, full_size: int) -> None:
        """Divide each bucket's sum by the number of samples in it, or by the number with all workers alive."""
        for number, bucket in enumerate(self._buckets.layouts):
            inside = sum(samples for position, samples in self._groups if position > number)
            divisor = max(1, inside) if self._settings.rescale == "survivors" else full_size
            for place in bucket.places:
                if place.parameter.grad is not None:
                    place.parameter.grad /= divisor

    # -- checkpoints

    def snapshot(self) -> VirtualSnapshot:
        """Return a copy of the state after ``step`` steps.

        This is valid also while the next step is in progress but not computed.
        """
        return VirtualSnapshot(
            step=self.step,
            cursor=self._cursor,
            model={name: tensor.clone() for name, tensor in model_tensors(self.model)},
            optimizer=clone(self.optimizer.state_dict()),
            ledger=clone(self._ledger.state_dict()),
        )

    def _set(self, snapshot: VirtualSnapshot) -> None:
        for name, tensor in model_tensors(self.model):
            tensor.copy_(snapshot.model[name])
        self.optimizer.load_state_dict(clone(snapshot.optimizer))
        self._ledger.load_state_dict(clone(snapshot.ledger))
        self.step, self._cursor, self._attempt = snapshot.step, snapshot.cursor, None

    def _publish(self, stable_step: int) -> None:
        stable = [saved for saved in self._saved if saved.step <= stable_step + 1]
        self._saved = stable[-1:] + self._saved[len(stable) :]

    def _load(self) -> int:
        """Go back to the newest valid state; every training starts with this, too."""
        if not self._met:
            return self.step
        saved, self._saved = self._saved[0], self._saved[:1]
        reached = self.step + (self._attempt is not None)
        self._decide("load", reached - saved.step)
        self._set(saved)
        return saved.step


def _groups(attempt: _Attempt, num_buckets: int) -> list[tuple[int, list[int]]]:
    """Return the slices that go through the model together, as number of buckets and slice numbers; survivors last."""
    if not attempt.died_at:
        return [(num_buckets, list(range(len(attempt.batch.slices))))]
    groups: dict[int, list[int]] = {}
    for number, owner in attempt.batch.owners.items():  # of slices that have samples
        groups.setdefault(attempt.died_at.get(owner, num_buckets), []).append(number)
    groups.pop(0, None)  # in no all-reduce
    return sorted(groups.items())
