"""What computes and sums the steps of a training loop, whatever the model is: the interface, and what all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.comm import OrderedSum
from holdfast.data.loader import Loading, Source
from holdfast.data.plan import MiniBatch
from holdfast.data.position import Place
from holdfast.data.seeds import seed_slice
from holdfast.engine.context import World
from holdfast.engine.run_log import RunLog
from holdfast.errors import InternalError
from holdfast.recovery.messages import Note
from holdfast.session.step import Step

Reach = Callable[[str, int | None], None]
"""Called at a phase, and bucket or slice, of the step in progress, for faults that are due there."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a training loop gives to what computes its steps."""

    world: World
    place: Place
    log: RunLog
    total: OrderedSum  # the sum of all workers
    source: Source
    loading: Loading
    reach: Reach
    # called with a step and a position among its sums, for faults that are due there
    reach_in_sum: Callable[[int, int], None]


class Runner(ABC):
    """Computes slices here, and sums them; :meth:`Trainable.runner` returns the right one."""

    def __init__(self, context: StepContext, rest: Callable[[Sequence[int]], None]) -> None:
        self._context = context
        self._world = context.world
        self._rest = rest
        self.names: dict[str, None] = {}
        """Of the figures that the script logs."""

    @abstractmethod
    def step(self, batch: MiniBatch, slices: list[int], attempt: int) -> Step:
        """Return what the script gets: the next attempt at a step, which is begun, with the slices that are computed here."""

    def finish(self, batch: MiniBatch, attempt: Step) -> None:
        """Do what is left of an attempt that the script has computed, unless computing it ended early."""
        if attempt.failure is not None:
            raise attempt.failure

    def sum_bucket(self, batch: MiniBatch, bucket: int) -> None:
        """Sum the gradients of a bucket over all workers; there are :attr:`Trainable.num_buckets` of them."""
        raise InternalError(f"bucket {bucket} of step {batch.step} is no sum of all workers")

    def hand_over(self, batch: MiniBatch, bucket: int, source: int) -> None:
        """Give the sum of a bucket, and the slices that are in it, from ``source`` to the workers that lack it."""
        raise InternalError(
            f"bucket {bucket} of step {batch.step} is no sum of all workers, so worker {source} has none to give"
        )

    def between_slices(self, batch: MiniBatch) -> None:
        """Make what the script draws outside the slices independent of the slices that were computed here."""
        self._rest(self._world.comm.here)
        seed_slice(self._context.place.plan.seed, batch.step, -1)

    def ask_to_stop(self) -> None:
        """Remember that training ends with this step."""
        self._world.told.notes |= Note.STOP
