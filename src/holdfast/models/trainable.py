"""The model as a training loop sees it: :class:`Trainable`, and :class:`Runner`, which runs the steps of one loop.

A model has three implementations: replicated (:mod:`holdfast.models.replicated`), pipeline (:mod:`holdfast.models.pipeline`)
and sharded (:mod:`holdfast.models.sharded`). The loop depends on none of them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast.base.orders import base_of
from holdfast.checkpoint.parts import Wanted
from holdfast.comm import Communicator, MeanDivisor, OrderedAllReduce
from holdfast.comm.allreduce.checksums import note_altered
from holdfast.config import Settings
from holdfast.data.loader import DataSource, SliceLoader
from holdfast.data.plan import MiniBatch
from holdfast.data.position import DataPosition
from holdfast.data.seeds import seed_slice
from holdfast.errors import InternalError
from holdfast.integrity.state_hashes import Fingerprint
from holdfast.models.part import ModelPart, Stateful
from holdfast.models.step import Step
from holdfast.models.training_state import clone
from holdfast.records.types import Record
from holdfast.recovery.registry import strategy_class
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
    reach: Reach
    # called with a step and the number of an all-reduce in it, to carry out planned faults
    reach_in_sum: Callable[[int, int], None]


class ReducedBucket(NamedTuple):
    """The result of a bucket's all-reduce; see :meth:`StepGradients.add_sum`."""

    result: torch.Tensor
    slices: list[int]
    in_host: torch.Tensor | None


class Trainable(ABC):
    """A model with its optimizer, replicated on every worker or placed in parts."""

    kind: str
    """One of :data:`~holdfast.recovery.strategy.MODELS`."""
    parts: int
    """Number of parts with a placement; 0 if every worker holds the complete state."""
    num_buckets: int
    """All-reduces over all workers per step, besides the commit vote; 0 if each part's holders reduce its gradients."""
    size_bytes: int
    """Memory per slice of the all-reduce over all workers, bytes."""
    device: torch.device
    """Device of the gradients in that all-reduce."""
    numel: int
    """Number of elements in the parameters of the complete model."""
    has_stages: bool = False
    """Whether a slice passes through the stages of several workers."""
    sends_copies: bool = False
    """Whether saves of parts are sent to delta standbys between steps."""

    def __init__(self) -> None:
        self.registered: dict[str, Stateful] = {}
        """Objects that the script has registered to be saved with the model."""
        self._registered_before: dict[str, Any] = {}

    # -- capabilities

    @property
    def is_replicated(self) -> bool:
        """Whether every worker holds the complete state: no failure loses any of it, and any worker can save it."""
        return self.parts == 0

    @property
    def whole(self) -> ModelPart | None:
        """The model with its optimizer, as every worker holds it; None if workers hold parts."""
        return None

    @property
    def summed(self) -> ModelPart | None:
        """The part whose gradients are all-reduced over all workers; None if the holders of each part do that."""
        return self.whole

    def named(self, target: str) -> Mapping[str, object] | None:
        """Return the names that a flip of ``target`` may use; None if they are unknown before workers connect."""
        return None

    # -- a loop

    @abstractmethod
    def begin_loop(self, context: StepContext) -> Runner:
        """Set up communication, after checking strategy and guard for this model; return what runs the steps of a loop."""

    def finish(self) -> None:
        """Give every worker the complete model after the last step."""

    def leave(self) -> None:
        """Stop background work: this worker is no longer needed."""

    @abstractmethod
    def summary(self) -> Record | None:
        """Return the record to write when training ends, without stamps; None if there is none."""

    # -- a step

    def slices(self, batch: MiniBatch, here: Sequence[int]) -> list[int]:
        """Return the slices that workers ``here`` compute, entirely or in part."""
        return [number for number, rank in batch.owners.items() if rank in here]

    @abstractmethod
    def begin_step(self, reach: Reach) -> None:
        """Begin an attempt at a step: save what it may change. Planned faults may strike in messages sent for this."""

    @abstractmethod
    def discard_step(self) -> None:
        """Undo everything that the attempt changed."""

    def missing_slices(self, batch: MiniBatch) -> dict[int, tuple[int, ...]]:
        """Return the buckets that each lost slice is missing from."""
        return {} if self.summed is None else self.summed.gradients.missing_slices(batch)

    def figures(self) -> list[float]:
        """Return all metrics of the step, after its all-reduces: the loss first, then the others by name."""
        assert self.summed is not None, "a model without all-reduces over all workers has its own metrics"
        return self.summed.gradients.figures()

    @abstractmethod
    def apply(self, batch: MiniBatch, names: Sequence[str]) -> dict[str, float]:
        """Run the optimizer on the mean gradient, and return the step's metrics; ``names`` are those logged here."""

    def take_notes(self) -> tuple[str, ...]:
        """Return lines for the user about what slices have changed besides gradients, each once; on every worker alike."""
        return () if self.summed is None else self.summed.buckets.buffers.take_notes()

    def computing(self, batch: MiniBatch, lost: Collection[int]) -> set[int]:
        """Return the workers that computed a slice of the step, or a part of one, except slices in ``lost``."""
        return {rank for number, rank in batch.owners.items() if number not in lost}

    # -- the state

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that this worker saves, not copied."""

    @abstractmethod
    def shared_state(self) -> dict[str, Any]:
        """Return the state that all workers have, not copied."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """Restore what :meth:`state_dict` or :meth:`shared_state` returned, restricted to :meth:`wanted`.

        If ``keeps``, tensors of the state may become those of this worker.

        Raises:
            CheckpointError: if the state does not match the objects of this session.
        """

    def wanted(self, members: Sequence[int]) -> Wanted | None:
        """Return what this worker needs of a checkpoint; None means everything."""
        return None

    def writers(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the processes that write a checkpoint, the lead first; with a replicated model all can."""
        return comm.processes

    @abstractmethod
    def make_equal(self, comm: Communicator) -> None:
        """Give all workers the state of the lowest rank, unless all are equal already.

        Raises:
            CheckpointError: if it arrived damaged.
            StateLost: if no initial state exists any more.
        """

    @abstractmethod
    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate."""

    @abstractmethod
    def sha256s(self, here: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Return by worker the sha256 of its model, and that of its model and optimizer state."""

    @abstractmethod
    def fingerprint(self, comm: Communicator, settings: Settings) -> Fingerprint:
        """Return the object that hashes the state before each step, as configured."""

    def _remember_registered(self) -> None:
        self._registered_before = {name: clone(thing.state_dict()) for name, thing in self.registered.items()}

    def _take_back_registered(self) -> None:
        for name, state in self._registered_before.items():
            self.registered[name].load_state_dict(clone(state))
        self._registered_before = {}

    # -- for a process that runs several workers, one of which may have diverged

    @abstractmethod
    def enter(self, rank: int) -> None:
        """Prepare for computation by one of the workers of this process."""

    @abstractmethod
    def rest(self, here: Sequence[int]) -> None:
        """Note that none of the workers of this process computes; see :meth:`DivergentReplicas.rest`."""

    @abstractmethod
    def tensors_of(self, target: str, rank: int, here: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the ``"weights"`` or the ``"optimizer"`` state by name, to be altered on one of the workers ``here``.

        Raises:
            ConfigError: if no worker can have them separately.
        """

    # -- placement of parts; with a replicated model there is none, so no part is lost or moved

    def lost(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the parts that none of ``members`` holds; none before there is a placement."""
        return ()

    def rehome(self, *, restores: bool) -> None:
        """Give all parts holders among the survivors; received states are staged.

        If ``restores``, parts without a surviving holder are restored from their last save.

        Raises:
            StateLost: if such a part was never saved.
        """

    def settle(self) -> None:
        """Adopt the new placement, which all workers have."""

    def placement(self) -> Any:
        """Return the placement of the parts as plain JSON; None if there are no parts."""
        return None

    def adopt_placement(self, placement: Any) -> None:
        """On a newcomer that holds nothing yet, adopt what :meth:`placement` returned."""


class Runner(ABC):
    """Begins each attempt at a step, computes slices and all-reduces them; :meth:`Trainable.begin_loop` returns the right one."""

    def __init__(self, context: StepContext, trainable: Trainable) -> None:
        self._context = context
        self._job = job = context.job
        self._trainable = trainable
        strategy_class(job.settings.strategy).check(trainable.kind)
        position = context.position
        self._loading = SliceLoader(
            context.source, lambda batch: position.ahead(batch, job.comm.members), self._own_slices
        )
        self._count = (-1, 0)
        self.batch: MiniBatch | None = None
        """The mini-batch of the step in progress."""
        self.names: dict[str, None] = {}
        """Names of the metrics that the script logs."""

    def begin(self, batch: MiniBatch) -> Step:
        """Return the next attempt at a step, for the script to compute.

        Raises:
            PeerFailed: if a peer died and workers need each other to begin a step.
        """
        self.batch = batch
        number, times = self._count
        self._count = (batch.step, times + 1 if number == batch.step else 0)
        # Before anything that can fail: a rollback returns to this point.
        self._trainable.begin_step(self._context.reach)
        self._context.total.begin()
        if not self._trainable.num_buckets:
            self._context.total.open()  # without buckets, no all-reduce before the commit vote would open it
        self._context.reach("forward", None)
        self.between_slices(batch)
        slices = self._own_slices(batch)
        self._job.load.note(len(slices))
        return self.step(batch, slices, self._count[1])

    def in_progress(self) -> MiniBatch:
        """Return the mini-batch of the step in progress; there must be one."""
        assert self.batch is not None, "no step is in progress"
        return self.batch

    def _own_slices(self, batch: MiniBatch) -> list[int]:
        return self._trainable.slices(batch, self._job.comm.local_ranks)

    @abstractmethod
    def step(self, batch: MiniBatch, slices: list[int], attempt: int) -> Step:
        """Return the attempt that has begun, with the slices of this worker, for the script."""

    def between_slices(self, batch: MiniBatch) -> None:
        """Make random numbers that the script draws outside the slices independent of the slices computed here."""
        self._trainable.rest(self._job.comm.local_ranks)
        seed_slice(self._context.position.plan.seed, batch.step, -1)

    def ask_to_stop(self) -> None:
        """Request that training ends with this step."""
        self._job.pending.ends_loop = True

    def give_nothing(self) -> None:
        """Complete this worker's slices without computing them, in a loop that the script has left: no worker commits them."""
        raise InternalError(f"step {self.in_progress().step} of a session was left: only prepared loops can be")

    def finish(self, attempt: Step) -> None:
        """Complete an attempt that the script has computed, or raise the failure that ended it early.

        Raises:
            PeerFailed: if a peer died.
        """
        if attempt.failure is not None:
            raise attempt.failure

    def close(self) -> None:
        """Stop the prefetching of inputs, and what else outlives a training loop otherwise."""
        self._loading.close()

    # -- all-reduces

    def sum_bucket(self, bucket: int) -> None:
        """All-reduce the gradients of a bucket over all workers; there are :attr:`Trainable.num_buckets` of them.

        Raises:
            PeerFailed: if the all-reduce did not complete here.
        """
        raise InternalError(f"bucket {bucket} of step {self.in_progress().step} is not all-reduced over all workers")

    def send_bucket(self, bucket: int, source: int) -> None:
        """Send the result of a bucket, and the slices included in it, from ``source`` to the workers that lack it.

        Raises:
            PeerFailed: if the transfer did not complete here.
        """
        raise InternalError(
            f"bucket {bucket} of step {self.in_progress().step} is not all-reduced over all workers: worker {source} has no"
            " result"
        )

    def _reduce(
        self,
        adds: OrderedAllReduce,
        part: ModelPart,
        bucket: int,
        owners: Mapping[int, int],
        *,
        mean: MeanDivisor,
        rows: Sequence[int],
        givers: Mapping[int, int],
        name: str,
        midway: Callable[[], None],
    ) -> ReducedBucket:
        """All-reduce a bucket over the workers that compute or hold a part; return the result, which is not counted yet.

        Args:
            adds: The all-reduce over these workers.
            part: Provides the gradients.
            bucket: Bucket of the part.
            owners: The slices to include, each with the worker that computed it.
            mean: The divisor of their sum.
            rows: The first slice of each row of this process.
            givers: Local ranks that take part, each with its number of earlier all-reduces in this step.
            name: Name of the bucket in records.
            midway: Called during the all-reduce, to carry out planned faults.
        """
        layout = part.buckets.layouts[bucket]
        adds.seal(layout.span, len(rows))
        for rank, number in givers.items():
            for due in self._job.faults.flips("message", self._job.step, rank, number):
                own_slices = {number for number, owner in owners.items() if owner == rank}
                message = part.gradients.message_of(bucket, own_slices, adds.shared_room)
                if message:  # a hot spare or standby has no terms
                    self._job.faults.carry_out(due, message)
        result = adds(
            layout.span,
            part.gradients.plan.rows(owners),
            rows=rows,
            order=adds.order if layout.may_be_rounded else base_of(adds.order),
            mean=mean,
            midway=midway,
            altered=functools.partial(note_altered, self._job.altered, name, owners),
        )
        return ReducedBucket(result, sorted(owners), adds.in_host)
