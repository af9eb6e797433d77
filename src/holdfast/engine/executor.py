"""One attempt at a step: what the script computes of it, and the sums of it that all workers make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.comm import OrderedSum
from holdfast.data.loader import Loading, Source
from holdfast.data.plan import MiniBatch
from holdfast.data.position import Place
from holdfast.data.samples import check_dataset
from holdfast.data.seeds import seed_slice
from holdfast.engine.context import World
from holdfast.engine.flips import NOT_WATCHED, watch
from holdfast.engine.scribe import Scribe
from holdfast.errors import ScriptError
from holdfast.integrity.checksums import note_altered
from holdfast.models.loss import Forward, Loss, checked
from holdfast.models.model_parallel import Pipelined
from holdfast.models.replicated import Replica
from holdfast.models.sharded import Shards
from holdfast.models.slice_batching import AtOnce, Slice, has_bits
from holdfast.recovery.messages import Note
from holdfast.session.step import StagedStep, Step

_BESIDE = -2
"""Where the numbers of micro-batches that are evaluated begin, and go down: slices have those from 0 on, what is outside of them -1."""


class Attempts:
    """Begins the step in progress, as often as it takes, and keeps what belongs to it.

    Args:
        world: Who is there.
        replica: What computes.
        place: Says how the data are seeded.
        scribe: Is told where this worker is.
        total: Adds gradients.
        source: Where inputs are from.
    """

    def __init__(
        self,
        world: World,
        replica: Replica | Pipelined | Shards,
        place: Place,
        scribe: Scribe,
        total: OrderedSum,
        source: Source,
    ) -> None:
        self._world = world
        self._replica = replica
        self._place = place
        self._scribe = scribe
        self._sum = total
        self._source = source
        self._loading = Loading(source, lambda batch: place.ahead(batch, world.comm.members), self._loads)
        self.batch: MiniBatch | None = None
        """Of the step in progress."""
        self.names: dict[str, None] = {}
        """Of the figures that the script logs."""
        self._count = (-1, 0)
        self._at_once = None if isinstance(replica, Pipelined) else AtOnce(self._whole, world.clock)
        self._loaded: dict[int, Any] = {}
        self._watched = NOT_WATCHED

    @property
    def _whole(self) -> Replica:
        """The model, with all of which workers compute."""
        return self._replica if isinstance(self._replica, Replica) else self._sharded.flow

    @property
    def _staged(self) -> Pipelined:
        """The model, of which workers compute parts."""
        assert isinstance(self._replica, Pipelined)
        return self._replica

    @property
    def _sharded(self) -> Shards:
        """The model, with all of which workers compute, and of which they hold parts."""
        assert isinstance(self._replica, Shards)
        return self._replica

    def begin(self, batch: MiniBatch) -> Step:
        """Return the next attempt at a step, for the script to compute.

        Raises:
            PeerFailed: if somebody died, where workers need each other to begin.
        """
        self.batch, self._loaded = batch, {}
        number, times = self._count
        self._count = (batch.step, times + 1 if number == batch.step else 0)
        self._alter_state(batch.step)
        if isinstance(self._replica, Shards):  # between stages it is a part of the way forward
            self._reach("handover", None)
        self._replica.begin_step()  # first of all that can fail: the step is taken back to here
        if not self._replica.num_buckets:
            self._sum.open()  # no sum of all workers would, before the closing one
        self._scribe.mark("forward")
        for rank in self._world.comm.here:
            self._world.faults.reach("forward", batch.step, rank)
        self.between_slices(batch)
        if isinstance(self._replica, Pipelined):
            return StagedStep(self, batch, self._replica.slices(batch), self._count[1])
        return Step(self, batch, self._loads(batch), self._count[1])

    def _loads(self, batch: MiniBatch) -> list[int]:
        """Return the slices of which inputs are needed here."""
        if isinstance(self._replica, Pipelined):
            return self._replica.slices(batch)
        return [number for number, rank in batch.owners.items() if rank in self._world.comm.here]

    def close(self) -> None:
        """End what loads ahead of time."""
        self._loading.close()

    def _alter_state(self, step: int) -> None:
        """Let flips strike what a worker has before the step: that worker alone."""
        here, faults = self._world.comm.here, self._world.faults
        for rank in here:
            for target in ("weights", "optimizer"):
                for due in faults.flips(target, step, rank):
                    faults.carry_out(due, self._replica.tensors_of(target, rank, here))

    def _reach(self, phase: str, bucket: int | None) -> None:
        """Let a fault strike that is due in a phase of the step in progress."""
        if phase != "handover":  # a part of the way forward
            self._scribe.mark(phase)
        for rank in self._world.comm.here:
            self._world.faults.reach(phase, self._world.step, rank, bucket)

    def begin_slice(self, batch: MiniBatch, number: int) -> Any:
        """Make everything ready for the slice and return its inputs."""
        ids, owner, faults = batch.slices[number], batch.owners[number], self._world.faults
        self._world.beacon.mark("forward", batch.step, number, ids)
        self._replica.enter(owner)
        self._whole.begin_slice(self._sum.room)
        self._watched = watch(self._whole.model, faults.flips("activations", batch.step, owner), faults)
        return self._inputs(batch, number)

    def _inputs(self, batch: MiniBatch, number: int) -> Any:
        if number not in self._loaded:
            return self._loading(self._place.plan.seed, batch, number)
        seed_slice(self._place.plan.seed, batch.step, number)
        return self._loaded.pop(number)

    def backward(self, loss: torch.Tensor, batch: MiniBatch, number: int) -> None:
        """Compute the gradients of the slice."""
        ids, owner, faults = batch.slices[number], batch.owners[number], self._world.faults
        self._world.beacon.mark("backward", batch.step, number, ids)
        midway = None
        if faults.waits_for("backward", batch.step, owner):
            midway = lambda: faults.reach("backward", batch.step, owner)  # noqa: E731
        self._whole.backward(loss, len(ids), midway)

    def end_slice(self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float]) -> None:
        """Take the gradients away."""
        self._whole.end_slice(number, metrics, len(batch.slices[number]))
        self._watched.close()
        self._end(batch, number, metrics)

    def _end(self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float]) -> None:
        """Look at what a slice logged, and let flips strike what a worker has computed of it."""
        if len(self._whole.terms) > 1 and metrics.keys() != self.names.keys():
            raise ScriptError(
                f"every slice must log the same figures; slice {number} of step {batch.step} logged {', '.join(metrics)}, the one before {', '.join(self.names)}"
            )
        self.names = dict.fromkeys(metrics)
        for due in self._world.faults.flips("gradients", batch.step, batch.owners[number]):
            self._world.faults.carry_out(due, self._whole.gradients_of(number))

    def between_slices(self, batch: MiniBatch) -> None:
        """Make what the script draws outside the slices independent of the slices that were computed here."""
        self._replica.rest(self._world.comm.here)
        seed_slice(self._place.plan.seed, batch.step, -1)

    @contextlib.contextmanager
    def at_once(
        self, batch: MiniBatch, numbers: Sequence[int], forward: Forward, loss: Loss
    ) -> Iterator[Collection[int]]:
        """Compute slices in one pass, where that is known to give each its bits.

        Where it is not known yet, do that too, and compare it with what is computed one by one within this.

        Yields:
            Those that are computed: all or none.
        """
        if self._at_once is None or not self._may_go_at_once(batch, numbers):
            yield ()
            return
        tried = self._at_once.tried([len(batch.slices[number]) for number in numbers])
        is_known = tried.is_over
        slices = [] if tried.why_not else self._load(batch, numbers)
        is_made = bool(slices) and self._at_once.compute(tried, slices, forward, loss)
        if is_made and is_known:
            self._loaded = {}
            for slice_ in slices:
                self._whole.terms[slice_.number] = slice_.terms
                self._end(batch, slice_.number, slice_.figures)
            yield numbers
            return
        copies = [[flat.clone() for flat in slice_.terms.flat] for slice_ in slices if is_made]
        begun_s = self._at_once.now_s(tried)
        yield ()
        if is_made:
            took_s = self._at_once.now_s(tried) - begun_s
            tried.add(self._at_once.took_s, took_s, same=all(map(has_bits, slices, copies)))
        if tried.is_over and tried.told != tried.why_not:
            tried.told = tried.why_not
            self._scribe.slices_tried(tried)

    def _may_go_at_once(self, batch: MiniBatch, numbers: Sequence[int]) -> bool:
        """Return whether nothing is to happen to one of the slices alone."""
        faults, owners = self._world.faults, {batch.owners[number] for number in numbers}
        strikes = any(
            faults.waits_for("backward", batch.step, rank) or faults.flips("activations", batch.step, rank)
            for rank in owners
        )
        return len(numbers) > 1 and not strikes and not self._whole.own.differ

    def _load(self, batch: MiniBatch, numbers: Sequence[int]) -> list[Slice]:
        """Return slices with their inputs, which are not loaded again if they are computed one by one."""
        self._loaded = {number: checked(self._inputs(batch, number)) for number in numbers}
        self._world.beacon.mark("forward", batch.step, numbers[0], batch.slices[numbers[0]])
        self._whole.begin_slice(self._sum.room)
        first = len(self._whole.terms)
        rows = [self._whole.row(first + i, self._sum.room) for i in range(len(numbers))]
        return [
            Slice(number, inputs, len(batch.slices[number]), terms)
            for (number, inputs), terms in zip(self._loaded.items(), rows, strict=True)
        ]

    def ask_to_stop(self) -> None:
        """Remember that training ends with this step."""
        self._world.asked |= Note.STOP

    def compute(self, batch: MiniBatch) -> None:
        """Compute the stages that are this worker's.

        Raises:
            PeerFailed: if somebody died.
        """
        self._staged.compute(batch, self._place.plan.seed, self._fetcher(batch), self._reach)
        self.between_slices(batch)

    def evaluate(self, batch: MiniBatch, dataset: Any, batch_size: int, *, averaged: bool) -> dict[str, float]:
        """Return means over a dataset, with the stages as they are before the step.

        Raises:
            ConfigError: if the dataset has no length.
            PeerFailed: if somebody died.
            ScriptError: if an argument is not allowed.
        """
        check_dataset(dataset)
        if batch_size < 1 or len(dataset) < 1:
            raise ScriptError(
                f"step.evaluate needs at least 1 sample and a batch_size of at least 1, got {len(dataset)} and {batch_size}"
            )
        source, seed = dataclasses.replace(self._source, dataset=dataset), self._place.plan.seed
        parts = np.array_split(np.arange(len(dataset)), range(batch_size, len(dataset), batch_size))

        def begin(number: int, part: int) -> None:
            self._scribe.mark("forward")  # this worker gets further
            seed_slice(seed, batch.step, _BESIDE - number, part)

        figures = self._staged.evaluate(
            list(map(len, parts)),
            lambda number: source.load(seed, batch.step, _BESIDE - number, parts[number]),
            begin,
            averaged=averaged,
        )
        self.between_slices(batch)
        return figures

    def _fetcher(self, batch: MiniBatch) -> Callable[[int], Any]:
        def get(number: int) -> Any:
            self._world.beacon.mark("forward", batch.step, number, batch.slices[number])
            return self._loading(self._place.plan.seed, batch, number)

        return get

    def finish(self, attempt: Step) -> None:
        """Do what is left of computing a step where the model is split.

        Raises:
            PeerFailed: if somebody died.
        """
        if not isinstance(self._replica, Pipelined):
            return
        if attempt.failure is not None:
            raise attempt.failure
        self._replica.finish_step(self.in_progress(), self._reach)

    def in_progress(self) -> MiniBatch:
        """Return the mini-batch of the step in progress; there must be one."""
        assert self.batch is not None, "no step is in progress"
        return self.batch

    def sum_bucket(self, step: int, bucket: int) -> None:
        """Sum the gradients of a bucket over all workers.

        Raises:
            PeerFailed: if it did not complete here.
        """
        batch, replica, members = self.in_progress(), self._whole, self._world.comm.members
        self._scribe.mark("allreduce")
        owners = {number: rank for number, rank in batch.owners.items() if rank in members}
        slices, span = sorted(owners), replica.buckets.layouts[bucket].span
        self._sum.seal(span, len(replica.terms))
        self._alter_message(step, bucket)
        result = self._sum(
            span,
            owners,
            rows=list(replica.terms),
            mean=replica.mean(bucket, batch, slices, self._world.settings.rescale),
            midway=lambda: self.reach_in_sum(step, bucket),
            altered=functools.partial(note_altered, self._world.altered, f"bucket {bucket}", owners),
        )
        replica.add_sum(result, slices)

    def _alter_message(self, step: int, bucket: int) -> None:
        """Let flips strike what a worker gives to a sum: what others read of its slices."""
        faults = self._world.faults
        for rank in self._world.comm.here:
            for due in faults.flips("message", step, rank, bucket):
                mine = {number for number, owner in self.in_progress().owners.items() if owner == rank}
                if message := self._whole.message_of(bucket, mine):  # a spare gives nothing
                    faults.carry_out(due, message)

    def reach_in_sum(self, step: int, position: int) -> None:
        """Let a fault strike that is due in the sum at a position of the step."""
        for rank in self._world.comm.here:
            self._world.faults.reach("allreduce", step, rank, position - 1 if position else None)

    def hand_over(self, bucket: int, source: int) -> None:
        """Give a sum, and the slices that are in it, to those who lack it.

        Raises:
            PeerFailed: if it did not complete here.
        """
        comm, replica = self._world.comm, self._whole
        layout = replica.buckets.layouts[bucket]
        has_it = len(replica.sums) > bucket
        inside = torch.zeros(len(self.in_progress().slices), dtype=torch.uint8)
        if has_it:
            inside[list(replica.summed_slices[bucket])] = 1
        comm.broadcast(inside, source)
        data = torch.empty(layout.length, dtype=layout.dtype, device=layout.device)
        if has_it:  # a copy, because a broadcast writes, and others may still read the sum
            data.copy_(replica.sums[bucket])
        comm.broadcast(data, source)
        if not has_it:
            replica.add_sum(data, [int(i) for i in inside.nonzero()])
