"""A replicated model: every worker holds the complete model and optimizer state.

Every worker hashes the same state, so no digest needs to be sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.base.clock import Clock
from holdfast.comm import Communicator, VirtualCommunicator
from holdfast.config import Settings
from holdfast.faults.flips import module_names, weights
from holdfast.integrity.fingerprint import EVERYTHING, HALVES, LONGEST_ROTATION, RotatingDigest, StateDigests
from holdfast.integrity.hash_chain import digest_of_tensors
from holdfast.integrity.state_hashes import Fingerprint, hash_tensors
from holdfast.models.overlap import OverlappedOptimizer
from holdfast.models.part import ModelPart, Stateful
from holdfast.models.slice_runner import SliceRunner
from holdfast.models.trainable import Reach, StepContext, Trainable
from holdfast.models.training_state import model_sha256
from holdfast.records.certified import HashedState
from holdfast.records.types import OptimizerOverlapped
from holdfast.recovery.strategy import REPLICATED
from holdfast.recovery.vote import MinMax
from holdfast.state.context import OverlapCost
from holdfast.state.transfer import adopt_lowest


class ReplicatedModel(ModelPart, Trainable):
    """This worker's replica of the model, with its optimizer; the arguments are those of :class:`ModelPart`."""

    kind = REPLICATED
    parts = 0
    overlapped: OverlappedOptimizer | None = None
    """Updates buckets before the commit vote."""

    # -- capabilities

    @property
    def whole(self) -> ModelPart:
        return self

    def named(self, target: str) -> Mapping[str, object] | None:
        if target in ("weights", "gradients"):
            return weights(self.model)
        return module_names(self.model) if target == "activations" else None

    # -- a loop

    def begin_loop(self, context: StepContext) -> SliceRunner:
        """From the first loop on, overlap the optimizer if configured."""
        job = context.job
        self.check_device()
        if job.settings.overlap_optimizer:
            self.overlap_optimizer(job.clock, job.spent, beside=not isinstance(job.comm, VirtualCommunicator))
        return SliceRunner(context, self, self)

    def overlap_optimizer(self, clock: Clock, spent: OverlapCost, *, beside: bool) -> None:
        """From now on, update the parameters of a bucket as soon as it is all-reduced; see :class:`OverlappedOptimizer`."""
        if self.overlapped is None:
            self.overlapped = OverlappedOptimizer(self.buckets, self.optimizer, clock, spent, beside=beside)

    def summary(self) -> OptimizerOverlapped | None:
        """Return the cost of the overlapped optimizer, if it is used."""
        if self.overlapped is None:
            return None
        spent: dict[str, Any] = dataclasses.asdict(self.overlapped.spent) | {"copy_bytes": self.overlapped.size_bytes}
        return OptimizerOverlapped(**spent)

    # -- a step

    def begin_step(self, reach: Reach) -> None:
        """Begin a step, which needs no communication."""
        self.begin()
        self._remember_registered()

    def discard_step(self) -> None:
        if self.overlapped is not None:
            self.overlapped.undo()
        self.discard()
        self._take_back_registered()

    def add_sum(self, result: torch.Tensor, slices: Sequence[int], in_host: torch.Tensor | None = None) -> None:
        """Keep the result of the next bucket, which includes ``slices``, and update its parameters if overlapped."""
        super().add_sum(result, slices, in_host)
        if (overlapped := self._early) is not None:
            overlapped.update(len(self.gradients.sums) - 1, result)

    @property
    def _early(self) -> OverlappedOptimizer | None:
        """The overlapped optimizer; None if it is off, or local ranks have diverged."""
        return None if self.own.differ else self.overlapped

    def wait_updated(self) -> None:
        if self.overlapped is not None:
            self.overlapped.wait()

    def _update(self) -> None:
        if (overlapped := self._early) is not None:
            overlapped.keep()
        else:
            super()._update()

    # -- the state

    def shared_state(self) -> dict[str, Any]:
        """Return the state that all workers have: everything."""
        return self.state_dict()

    def make_equal(self, comm: Communicator) -> None:
        state = adopt_lowest(comm, self.state_dict())
        if state is not None:
            self.load_state_dict(state, keeps=True)

    def sha256s(self, here: Sequence[int]) -> dict[int, tuple[str, str]]:
        return self.own.of_each(here, lambda: (model_sha256(self.model), self.state_sha256()))

    def fingerprint(self, comm: Communicator, settings: Settings) -> WholeFingerprint:
        return WholeFingerprint(self, comm, settings)

    def _stateful(self) -> dict[str, Stateful]:
        return super()._stateful() | {f"registered.{name}": thing for name, thing in self.registered.items()}

    # -- planned alterations

    def enter(self, rank: int) -> None:
        self.own.enter(rank)

    def rest(self, here: Sequence[int]) -> None:
        self.own.rest(here)


class WholeFingerprint(Fingerprint):
    """The fingerprint of a replicated model: every worker has the complete state, and knows which part others hash."""

    def __init__(self, whole: ModelPart, comm: Communicator, settings: Settings) -> None:
        super().__init__(comm, settings)
        self._whole = whole
        self.digest: RotatingDigest = RotatingDigest(
            whole.model,
            whole.optimizer,
            LONGEST_ROTATION if settings.guard in ("warn", "heal") else 0,
            buffers=whole.beside() if self._is_certified else (),
        )

    def _windows(self, step: int) -> Mapping[int, StateDigests]:
        return self._whole.own.of_each(self._comm.local_ranks, lambda: self.digest.take(step))

    def _certify(self, digests: Mapping[int, int]) -> None:
        self.state = f"{digests[min(digests)]:016x}"

    def _certify_whole(self, everything: Sequence[HashedState]) -> None:
        (hashed,) = everything
        self.state = digest_of_tensors(hashed.tensors)

    def everything(self) -> list[HashedState]:
        return [HashedState(rank=min(self._comm.local_ranks), tensors=hash_tensors(self.digest))]

    def where(self, step: int) -> str:
        return self.digest.where(step)

    def remember_buffers(self) -> None:
        self._whole.buckets.buffers.begin_step()

    def compare_all(self) -> None:
        self.is_of_all = True
        self._whole.wait_updated()
        numbers = self._whole.own.of_each(self._comm.local_ranks, lambda: self.digest.of_step(EVERYTHING))
        self.replicas = MinMax.of(numbers.values())

    def compared(self, step: int, half: str = "") -> tuple[str, ...]:
        if self.is_of_all:
            return (half or "everything",)
        return tuple(dict.fromkeys(piece.path for piece in self.digest.pieces(step, (half,) if half else HALVES)))

    def of_halves(self, step: int) -> dict[str, dict[int, int]]:
        self._whole.wait_updated()
        window = EVERYTHING if self.is_of_all else step
        return {half: self._of_half(window, half) for half in HALVES}

    def _of_half(self, window: int, half: str) -> dict[int, int]:
        return self._whole.own.of_each(self._comm.local_ranks, lambda: self.digest.of_step(window, (half,)))
