"""The all-reduce of one bucket: planned flips, checksums, the reduction and the mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.base.orders import base_of
from holdfast.comm import OrderedAllReduce
from holdfast.comm.allreduce.checksums import note_altered
from holdfast.data.plan import MiniBatch
from holdfast.faults.process import Injector
from holdfast.models.part import ModelPart


class ReducedBucket(NamedTuple):
    """The result of a bucket's all-reduce; see :meth:`StepGradients.add_sum`."""

    result: torch.Tensor
    slices: list[int]
    in_host: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BucketReducer:
    """All-reduces the buckets of a part over all workers that compute or hold it."""

    adds: OrderedAllReduce  # the all-reduce over these workers
    part: ModelPart  # provides the gradients, and takes the results
    faults: Injector
    altered: dict[str, int]  # terms that failed their checksum on this worker; see `JobContext.altered`

    def sum(
        self,
        batch: MiniBatch,
        bucket: int,
        owners: Mapping[int, int],
        *,
        givers: Mapping[int, int],
        name: str,
        rescale: str,
        midway: Callable[[], None],
    ) -> None:
        """All-reduce a bucket; the part keeps the result. For the arguments see :meth:`reduce`."""
        rows = list(self.part.gradients.terms)
        self.part.add_sum(
            *self.reduce(batch, bucket, owners, rows=rows, givers=givers, name=name, rescale=rescale, midway=midway)
        )

    def reduce(
        self,
        batch: MiniBatch,
        bucket: int,
        owners: Mapping[int, int],
        *,
        rows: Sequence[int],
        givers: Mapping[int, int],
        name: str,
        rescale: str,
        midway: Callable[[], None],
    ) -> ReducedBucket:
        """All-reduce a bucket and return the result, which is not counted yet.

        Args:
            batch: The mini-batch of the step.
            bucket: Bucket of the part.
            owners: The slices to include, each with the worker that computed it.
            rows: The first slice of each row of this process.
            givers: Local ranks that take part, each with its number of earlier all-reduces in this step.
            name: Name of the bucket in records.
            rescale: See :meth:`StepGradients.mean`.
            midway: Called during the all-reduce, to carry out planned faults.
        """
        gradients, slices = self.part.gradients, sorted(owners)
        layout = self.part.buckets.layouts[bucket]
        span = layout.span
        self.adds.seal(span, len(rows))
        for rank, number in givers.items():
            self._alter_message(batch.step, rank, number, bucket, owners)
        result = self.adds(
            span,
            gradients.plan.rows(owners),
            rows=rows,
            order=self.adds.order if layout.may_be_rounded else base_of(self.adds.order),
            mean=gradients.mean(bucket, batch, slices, rescale),
            midway=midway,
            altered=functools.partial(note_altered, self.altered, name, owners),
        )
        return ReducedBucket(result, slices, self.adds.in_host)

    def _alter_message(self, step: int, rank: int, number: int, bucket: int, owners: Mapping[int, int]) -> None:
        """Carry out planned flips in the terms that other workers read."""
        for due in self.faults.flips("message", step, rank, number):
            own_slices = {number for number, owner in owners.items() if owner == rank}
            message = self.part.gradients.message_of(bucket, own_slices, self.adds.shared_room)
            if message:  # a hot spare or standby has no terms
                self.faults.carry_out(due, message)
