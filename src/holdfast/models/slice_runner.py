"""Computes slices with the complete model, one by one, and all-reduces their gradients."""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.comm.allreduce.adding import SINGLE_ROWS, RowPlan, plan_rows
from holdfast.data.plan import MiniBatch
from holdfast.errors import ConfigError, ScriptError
from holdfast.faults.flips import NOT_WATCHED, flip_outputs
from holdfast.models.backward_overlap import BackwardOverlap, why_never
from holdfast.models.loss import on_device
from holdfast.models.media import Histogram, Image
from holdfast.models.part import ModelPart
from holdfast.models.step import Step
from holdfast.models.trainable import ReducedBucket, Runner, StepContext, Trainable
from holdfast.recovery.registry import strategy_class


class SliceRunner(Runner):
    """Computes slices with the complete model, ``part``."""

    def __init__(self, context: StepContext, trainable: Trainable, part: ModelPart) -> None:
        super().__init__(context, trainable)
        self._part = part
        self._room = context.total.room
        part.buckets.copies = context.total.start_copy
        self._watched = NOT_WATCHED
        self._overlap = self._make_overlap()
        self._last = -1
        self._planned: tuple[dict[int, int], RowPlan] = ({}, SINGLE_ROWS)

    def _make_overlap(self) -> BackwardOverlap | None:
        """Return what overlaps all-reduces with the backward pass; None if nothing can."""
        why = why_never(self._job, self._part)
        if not why:
            return BackwardOverlap(self._job, self._context.total, self._part)
        if self._job.settings.overlap == "on" and self._job.is_lead:
            self._context.log.warn(f"--overlap on has no effect, because {why}")
        return None

    def close(self) -> None:
        """End the thread of all-reduces that begin early, too."""
        super().close()
        if self._overlap is not None:
            self._overlap.close()

    def step(self, batch: MiniBatch, slices: list[int], attempt: int) -> Step:
        self._last = slices[-1] if slices else -1
        self._part.gradients.plan = self._plan_rows(batch)
        keeps_terms = strategy_class(self._job.live.strategy).continues_steps
        if self._overlap is not None:
            self._overlap.begin_step()
            keeps_terms |= self._overlap.begins  # the script may read gradients until the slice ends
        self._context.total.keeps_terms = keeps_terms
        return Step(self, batch, slices, attempt)

    def finish(self, attempt: Step) -> None:
        if not self._part.own.differ:  # with a state per worker, another one is in the model now
            self._part.buckets.buffers.constants.check_between()
        super().finish(attempt)

    def _plan_rows(self, batch: MiniBatch) -> RowPlan:
        """Return which slices share a row. A guard that heals compares single slices, and planned flips name them.

        Rows are those of a rank, not of a process: a step may continue without the slices of a rank that has failed.
        """
        if self._job.settings.guard == "heal" or self._job.faults.alters("message"):
            return SINGLE_ROWS
        if self._planned[0] != batch.owners:
            self._planned = batch.owners, plan_rows(batch.owners, self._job.loops.order)
        return self._planned[1]

    # -- a slice

    def begin_slice(self, batch: MiniBatch, number: int) -> Any:
        """Prepare everything for the slice and return its inputs."""
        ids, owner, faults = batch.slices[number], batch.owners[number], self._job.faults
        self._job.beacon.mark("forward", batch.step, number, ids)
        self._part.buckets.buffers.constants.check_between()
        self._trainable.enter(owner)
        self._part.gradients.begin_slice(number, self._room, is_first=number == min(batch.owners))
        self._watched = flip_outputs(self._part.model, faults.flips("activations", batch.step, owner), faults)
        return self._inputs(batch, number)

    def on_device(self, inputs: Any) -> Any:
        """Return inputs on the model's device, for ``step.compute``."""
        return on_device(inputs, self._part.device)

    def _inputs(self, batch: MiniBatch, number: int) -> Any:
        return self._loading(self._context.position.plan.seed, batch, number)

    def backward(
        self, loss: torch.Tensor, batch: MiniBatch, number: int, *, is_only: bool = True, items: float | None = None
    ) -> None:
        """Compute the gradients of a slice; ``is_only``: the script makes no other backward pass for it.

        The loss is the mean over ``items``, if they are given, and over the samples otherwise.
        """
        if items is not None and self._job.settings.overlap_optimizer:
            raise ConfigError(
                "a loss over items cannot be used with --overlap-optimizer, which updates parameters before the items of"
                " the whole mini-batch are known: leave it out"
            )
        ids, owner, faults = batch.slices[number], batch.owners[number], self._job.faults
        self._job.beacon.mark("backward", batch.step, number, ids)
        is_due = faults.waits_for("backward", batch.step, owner)
        midway = functools.partial(faults.reach, "backward", batch.step, owner) if is_due else None
        weight = len(ids) if items is None else items
        with self._overlapping(batch, number, is_only=is_only and weight > 0):
            self._part.backward(loss, weight, midway)

    def _overlapping(self, batch: MiniBatch, number: int, *, is_only: bool) -> AbstractContextManager[None]:
        """Return the context for the backward pass of a slice: the last one begins all-reduces."""
        if self._overlap is None or number != self._last or not is_only:
            return nullcontext()
        gradients = self._part.gradients
        owners, (rows, added) = self._owners(batch), gradients.rows_after(number)

        def reduce(bucket: int) -> ReducedBucket:
            if added:
                self._part.buckets.add_up(added, [bucket])
            return self._reduce_bucket(batch, bucket, owners, rows)

        return self._overlap.watching(gradients.current, reduce)

    def end_slice(
        self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float], items: float | None = None
    ) -> None:
        """Move the gradients of the slice into its terms, and add these to those of other slices as planned."""
        begun = self._overlap.end_slice() if self._overlap is not None and number == self._last else 0
        self._part.gradients.end_slice(number, metrics, len(batch.slices[number]), begun, items)
        self._watched.close()
        self._end(batch, number, metrics)
        self._part.gradients.add_up(number, begun)

    def give_nothing(self) -> None:
        batch, gradients = self.in_progress(), self._part.gradients
        for number in self._own_slices(batch):
            gradients.begin_slice(number, self._room, is_first=number == min(batch.owners))
            gradients.end_slice(number, {"loss": 0.0}, len(batch.slices[number]))
            gradients.add_up(number)

    def log_media(self, batch: MiniBatch, number: int, name: str, media: Image | Histogram) -> None:
        """Record an image or a histogram, if it is of the first slice: whichever worker computes that, it is the same."""
        if number == min(batch.owners):
            self._context.log.media(batch.step, name, media)

    def free_memory(self, error: RuntimeError, batch: MiniBatch, number: int) -> bool:
        """Free what a slice has left that failed for want of memory, and say so; return False for any other error."""
        if classify(error) is not DeviceFailure.OUT_OF_MEMORY:
            return False
        message = str(error).partition("\n")[0]
        self._context.log.warn(f"slice {number} of step {batch.step} is computed again, with memory freed: {message}")
        traceback.clear_frames(error.__traceback__)  # they refer to what the slice had computed
        self._watched.close()
        self._part.buckets.clear()
        if self._part.device.type != "cpu":
            gc.collect()
            torch.accelerator.empty_cache()  # memory that torch keeps for later
        return True

    def begin_uncounted(self, batch: MiniBatch) -> Any:
        """Prepare for a slice that belongs to another worker and return its inputs; its gradients are not kept."""
        self.end_uncounted()
        return self._inputs(batch, min(batch.owners))

    def end_uncounted(self) -> None:
        self._part.buckets.clear()
        self._part.buckets.buffers.rewind()

    def _end(self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float]) -> None:
        """Check the metrics of a slice, and carry out planned flips in its gradients."""
        gradients = self._part.gradients
        if gradients.num_slices > 1 and metrics.keys() != self.names.keys():
            raise ScriptError(
                f"every slice must log the same metrics; slice {number} of step {batch.step} logged"
                f" {', '.join(metrics)}, the previous one {', '.join(self.names)}"
            )
        self.names = dict.fromkeys(metrics)
        for due in self._job.faults.flips("gradients", batch.step, batch.owners[number]):
            self._job.faults.carry_out(due, gradients.of_slice(number))
            gradients.restart_copies(number)

    # -- all-reduces

    def sum_bucket(self, bucket: int) -> None:
        self._context.log.mark("allreduce")
        reduced = None if self._overlap is None else self._overlap.finish(bucket)
        if reduced is None:
            batch = self.in_progress()
            reduced = self._reduce_bucket(batch, bucket, self._owners(batch), list(self._part.gradients.terms))
        self._part.add_sum(*reduced)

    def _owners(self, batch: MiniBatch) -> dict[int, int]:
        """Return the slices that are all-reduced, each with its owner."""
        members = frozenset(self._job.comm.members)
        return {number: rank for number, rank in batch.owners.items() if rank in members}

    def _reduce_bucket(
        self, batch: MiniBatch, bucket: int, owners: Mapping[int, int], rows: Sequence[int]
    ) -> ReducedBucket:
        return self._reduce(
            self._context.total,
            self._part,
            bucket,
            owners,
            mean=self._part.gradients.mean(bucket, batch, owners, self._job.settings.rescale),
            rows=rows,
            givers=dict.fromkeys(self._job.comm.local_ranks, bucket),
            name=f"bucket {bucket}",
            midway=lambda: self._context.reach_in_sum(batch.step, bucket),
        )

    def send_bucket(self, bucket: int, source: int) -> None:
        comm, gradients = self._job.comm, self._part.gradients
        layout = self._part.buckets.layouts[bucket]
        has_it = len(gradients.sums) > bucket
        inside = torch.zeros(len(self.in_progress().slices), dtype=torch.uint8)
        if has_it:
            inside[list(gradients.summed_slices[bucket])] = 1
        comm.broadcast(inside, source)
        data = torch.empty(layout.length, dtype=layout.dtype)  # in host memory, as workers can send it
        if has_it:  # a copy, because a broadcast writes its argument, and others may still read the result
            data.copy_(gradients.sums[bucket])
        comm.broadcast(data, source)
        if not has_it:
            self._part.add_sum(data.to(layout.device), [int(i) for i in inside.nonzero()], data)
