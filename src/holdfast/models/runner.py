"""The interface that computes and all-reduces the steps of a training loop, and what all kinds of model share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.comm import OrderedAllReduce
from holdfast.data.loader import DataSource, SliceLoader
from holdfast.data.plan import MiniBatch
from holdfast.data.position import DataPosition
from holdfast.data.seeds import seed_slice
from holdfast.errors import InternalError
from holdfast.models.step import Step
from holdfast.recovery.messages import Note
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog

Reach = Callable[[str, int | None], None]
"""Called with a phase, and a bucket or slice, of the step in progress, to carry out planned faults."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The training loop's context of a step."""

    job: JobContext
    position: DataPosition
    log: RunLog
    total: OrderedAllReduce  # the all-reduce over all workers
    source: DataSource
    loading: SliceLoader
    reach: Reach
    # called with a step and the number of an all-reduce in it, to carry out planned faults
    reach_in_sum: Callable[[int, int], None]


class Runner(ABC):
    """Computes slices on this worker and all-reduces them; :meth:`Trainable.runner` returns the right one."""

    def __init__(self, context: StepContext, rest: Callable[[Sequence[int]], None]) -> None:
        self._context = context
        self._job = context.job
        self._rest = rest
        self.names: dict[str, None] = {}
        """Names of the metrics that the script logs."""

    @abstractmethod
    def step(self, batch: MiniBatch, slices: list[int], attempt: int) -> Step:
        """Return the next attempt at a step, already begun, with the slices of this worker, for the script."""

    def finish(self, batch: MiniBatch, attempt: Step) -> None:
        """Complete an attempt that the script has computed, or raise the failure that ended it early."""
        if attempt.failure is not None:
            raise attempt.failure

    def give_nothing(self, batch: MiniBatch, slices: Sequence[int]) -> None:
        """Complete ``slices`` without computing them, in a loop that the script has left."""
        raise InternalError(f"step {batch.step} of a session was left: only prepared loops can be")

    def sum_bucket(self, batch: MiniBatch, bucket: int) -> None:
        """All-reduce the gradients of a bucket over all workers; there are :attr:`Trainable.num_buckets` of them."""
        raise InternalError(f"bucket {bucket} of step {batch.step} is not all-reduced over all workers")

    def send_bucket(self, batch: MiniBatch, bucket: int, source: int) -> None:
        """Send the result of a bucket, and the slices included in it, from ``source`` to the workers that lack it."""
        raise InternalError(
            f"bucket {bucket} of step {batch.step} is not all-reduced over all workers: worker {source} has no result"
        )

    def close(self) -> None:  # noqa: B027 - most runners hold nothing
        """Release what outlives a training loop otherwise."""

    def between_slices(self, batch: MiniBatch) -> None:
        """Make random numbers that the script draws outside the slices independent of the slices computed here."""
        self._rest(self._job.comm.local_ranks)
        seed_slice(self._context.position.plan.seed, batch.step, -1)

    def ask_to_stop(self) -> None:
        """Request that training ends with this step."""
        self._job.pending.notes |= Note.STOP
