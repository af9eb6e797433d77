"""The samples of a step, how they are cut into slices, and which worker has which slice.

All of it is a function of (seed, position, survivors), so workers agree on it without messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from holdfast.data.assignment import assign_slices, even_ranges
from holdfast.data.seeds import order_of
from holdfast.errors import ConfigError

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Indices of samples in the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCursor:
    """A position in the plan."""

    epoch: int
    offset: int  # samples of that epoch's order that committed steps have consumed


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one step."""

    step: int
    epoch: int  # the epoch of its samples
    slices: tuple[Ids, ...]  # samples of each slice, in order; a slice of a short mini-batch may be empty
    owners: dict[int, int]  # the rank that computes each non-empty slice
    full_size: int  # size of the mini-batch with all workers alive
    after: PlanCursor  # the cursor once the step is committed

    @property
    def ids(self) -> Ids:
        """All samples of the step."""
        return np.concatenate(self.slices)

    def samples_of(self, slices: Iterable[int]) -> int:
        """Return the number of samples in these slices."""
        return sum(len(self.slices[number]) for number in slices)


class EpochOrders(Protocol):
    """The order of each epoch, where it is not the plan's own; see :class:`~holdfast.data.sampling.SamplerOrder`."""

    def __call__(self, epoch: int) -> Ids:
        """Return the indices of the samples of ``epoch``, in order."""
        ...

    def digest(self, epoch: int) -> int:
        """Return a digest of the order of ``epoch``, from 0 to 2**62 - 1."""
        ...


class SampleStream(Protocol):
    """Samples that can only be read in order; see :class:`~holdfast.data.stream.Stream`."""

    def limit(self, epoch: int, upto: int) -> int:
        """Return ``upto``, or the number of samples of ``epoch`` if that is less."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """The order of samples and the policies that cut it."""

    num_samples: int  # size of the dataset; -1 for a stream
    batch_size: int  # samples of a step with all workers alive
    first_epoch: int  # number of the first epoch; epochs are counted throughout the job
    epochs: int  # number of epochs
    seed: int  # seed of the order
    shuffle: bool  # otherwise samples come in the order of the dataset
    drop_last: bool  # leave out the short mini-batch at the end of an epoch
    slices: int  # slices of a mini-batch, fixed for the job
    members: tuple[int, ...]  # the initial workers of the job, without spares
    split: str  # `"slices"` or `"even"`, see `Settings`
    batch: str  # `"global"` or `"local"`
    in_tree: bool = False  # slices are reduced in a tree, so ranges that end at large groups are better
    workers: int = -1  # number of live workers that share the work; -1: as many as `members`
    # relative speeds of workers, by rank; the default is 1
    speeds: Mapping[int, float] = field(default_factory=dict)
    # the script's value, if `batch_size` was changed since: the length of an epoch does not change
    given_batch_size: int = 0
    # the order of each epoch, if the script gave a sampler; then `shuffle` is not used
    sampler: EpochOrders | None = None
    # the samples, if they can only be read in order; then the length of an epoch is not known before it ends
    stream: SampleStream | None = None
    first_offset: int = 0  # samples of the first epoch that were consumed before this job

    @property
    def seats(self) -> int:
        """The number of workers that share the work while none is missing."""
        return len(self.members) if self.workers < 0 else self.workers

    @property
    def start(self) -> PlanCursor:
        """The cursor before the first step."""
        return PlanCursor(epoch=self.first_epoch, offset=self.first_offset)

    @property
    def epoch_samples(self) -> int:
        """Number of samples per epoch that belong to the plan; with a sampler, of the first epoch; 0 for a stream."""
        return self.samples_in(self.first_epoch) if self.stream is None else 0

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole plan with all workers alive; 0 for a stream."""
        return self.epochs * -(-self.epoch_samples // self.batch_size) - self.first_offset // self.batch_size

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of ``epoch`` that belong to the plan."""
        return self._kept(self.num_samples if self.sampler is None else len(self.sampler(epoch)))

    def _kept(self, number: int) -> int:
        """Return how many of the samples of an epoch belong to the plan."""
        return number - number % (self.given_batch_size or self.batch_size) if self.drop_last else number

    def stream_end(self, stream: SampleStream, cursor: PlanCursor, size: int) -> int:
        """Return the number of samples of the cursor's epoch that belong to the plan, as far as a mini-batch depends on it.

        It is exact if the epoch ends with the mini-batch of ``size`` samples at ``cursor``, and otherwise beyond it.

        Raises:
            ConfigError: if no sample of the epoch belongs to the plan.
        """
        upto = cursor.offset + max(size, self.batch_size) + (self.given_batch_size or self.batch_size)
        number = stream.limit(cursor.epoch, upto)
        end = self._kept(number) if number < upto else number
        if not end:
            raise ConfigError(
                f"drop_last leaves no batch: epoch {cursor.epoch} of the stream has {number} samples, and batch_size is"
                f" {self.given_batch_size or self.batch_size}"
            )
        return end

    def order(self, epoch: int) -> Ids:
        """Return the order of ``epoch``; only its first :meth:`samples_in` are used."""
        if self.sampler is not None:
            return self.sampler(epoch)
        if self.shuffle:
            return order_of(self.seed, epoch, self.num_samples)
        return np.arange(self.num_samples, dtype=np.int64)


class BatchCutter:
    """Cuts mini-batches from a plan; keeps the order of one epoch."""

    def __init__(self, plan: SamplePlan) -> None:
        self._plan = plan
        self._epoch = -1
        self._order: Any = None
        self._distributed: tuple[Sequence[int], list[int], list[float]] = ((), [], [])

    def mini_batch(self, step: int, cursor: PlanCursor, members: Sequence[int]) -> MiniBatch | None:
        """Return the mini-batch at ``cursor`` for ``members``; None at the end of the plan."""
        plan = self._plan
        if cursor.epoch >= plan.first_epoch + plan.epochs:
            return None
        holders, shares = self._distribute_once(members)
        pieces = len(holders)
        size = plan.batch_size if plan.batch == "global" else -(-plan.batch_size * pieces // plan.slices)
        ids, end = self._ids(cursor, size)
        slices = tuple(ids[start:stop] for start, stop in pairwise(_cuts(len(ids), pieces, shares)))
        offset = cursor.offset + len(ids)
        done = offset >= end
        return MiniBatch(
            step=step,
            epoch=cursor.epoch,
            slices=slices,
            owners={i: holders[i] for i in range(pieces) if len(slices[i])},
            full_size=min(plan.batch_size, end - cursor.offset),
            after=PlanCursor(epoch=cursor.epoch + 1, offset=0)
            if done
            else PlanCursor(epoch=cursor.epoch, offset=offset),
        )

    def _ids(self, cursor: PlanCursor, size: int) -> tuple[Ids, int]:
        """Return the next ``size`` samples, fewer at the end of the epoch, and the number of samples of the epoch."""
        if (stream := self._plan.stream) is not None:
            end = self._plan.stream_end(stream, cursor, size)
            return np.arange(cursor.offset, max(cursor.offset, min(cursor.offset + size, end)), dtype=np.int64), end
        order, end = self._order_of(cursor.epoch), self._plan.samples_in(cursor.epoch)
        return order[cursor.offset : min(cursor.offset + size, end)], end

    def _distribute_once(self, members: Sequence[int]) -> tuple[list[int], list[float]]:
        if self._distributed[0] != members:
            self._distributed = (members, *self._distribute(members))
        return self._distributed[1:]

    def _distribute(self, members: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return the owner of each piece of a mini-batch, and the relative sizes of the pieces if they differ.

        The lowest ranks share the work; spares have higher ranks, and replace failed workers. It makes no
        difference whether there are fewer workers because of failures or because the user asked for it.
        """
        plan = self._plan
        active = list(members[: plan.seats])
        seats = self._seats(active)
        if len(active) < len(plan.members) and plan.batch == "local":
            owners = [
                seats[seat]
                for seat, (start, stop) in enumerate(even_ranges(plan.slices, len(seats)))
                for _ in range(start, stop)
            ]
            return [rank for rank in owners if rank >= 0] or active, []
        if plan.split == "even" and (len(active) != len(plan.members) or plan.speeds):
            return active, [plan.speeds.get(rank, 1.0) for rank in active] if plan.speeds else []
        preferred = dict(zip(seats, even_ranges(plan.slices, len(seats)), strict=True))
        preferred = {rank: ranges for rank, ranges in preferred.items() if rank >= 0}
        preferred |= {rank: (plan.slices, plan.slices) for rank in active if rank not in preferred}
        return assign_slices(plan.slices, preferred, plan.speeds, aligned=plan.in_tree), []

    def _seats(self, active: Sequence[int]) -> list[int]:
        """Return the rank in each seat of the initial workers, -1 for an empty seat."""
        substitutes = iter([rank for rank in active if rank not in self._plan.members])
        return [rank if rank in active else next(substitutes, -1) for rank in self._plan.members]

    def _order_of(self, epoch: int) -> Ids:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._plan.order(epoch)
        order: Ids = self._order
        return order


def _cuts(count: int, pieces: int, shares: Sequence[float]) -> list[int]:
    """Return the start of each piece of ``count`` samples, and the end of the last: as even as possible, or proportional to ``shares``."""
    if not shares:
        return [i * count // pieces for i in range(pieces + 1)]
    *parts, whole = accumulate(shares)
    return [0, *(int(count * part / whole) for part in parts), count]
