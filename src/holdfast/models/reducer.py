"""The all-reduce of one bucket: what flips alter of it, its checksums, its sum, and the mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.comm import OrderedSum
from holdfast.comm.allreduce.checksums import note_altered
from holdfast.data.plan import MiniBatch
from holdfast.faults.process import Injector
from holdfast.models.part import Part


@dataclass(frozen=True, slots=True)
class BucketReducer:
    """Sums the buckets of a part over all workers that compute or hold it."""

    adds: OrderedSum  # the sum of these workers
    part: Part  # whose gradients; takes the sums
    faults: Injector
    altered: dict[str, int]  # where it is noted what did not arrive here as it was given; see `World.altered`

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
        """Sum a bucket; the part keeps the result.

        Args:
            batch: The mini-batch of the step.
            bucket: Of the part.
            owners: The workers that give the slices which are to be in the sum, by slice.
            givers: The workers that this process plays in it; of each, how many sums of the step it has taken part in.
            name: Of the bucket, in records.
            rescale: See :meth:`StepGradients.mean`.
            midway: Called while the sum goes on, for faults that are due then.
        """
        gradients, slices = self.part.gradients, sorted(owners)
        span = self.part.buckets.layouts[bucket].span
        self.adds.seal(span, len(gradients.terms))
        for rank, number in givers.items():
            self._alter_message(batch.step, rank, number, bucket, owners)
        result = self.adds(
            span,
            owners,
            rows=list(gradients.terms),
            mean=gradients.mean(bucket, batch, slices, rescale),
            midway=midway,
            altered=functools.partial(note_altered, self.altered, name, owners),
        )
        self.part.add_sum(result, slices)

    def _alter_message(self, step: int, rank: int, number: int, bucket: int, owners: Mapping[int, int]) -> None:
        """Let flips strike what a worker gives to a sum: what others read of its slices."""
        for due in self.faults.flips("message", step, rank, number):
            mine = {number for number, owner in owners.items() if owner == rank}
            if message := self.part.gradients.message_of(bucket, mine):  # a spare, or a mirror, gives nothing
                self.faults.carry_out(due, message)
