"""The model as a training loop sees it: :class:`Trainable`.

There are three implementations: replicated (:mod:`holdfast.models.replicated`), a pipeline
(:mod:`holdfast.models.pipeline`) and sharded (:mod:`holdfast.models.sharded`). The loop knows none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.parts import Wanted
from holdfast.comm import Communicator
from holdfast.config import Settings
from holdfast.data.plan import MiniBatch
from holdfast.engine.context import World
from holdfast.engine.run_log import RunLog
from holdfast.integrity.state_hashes import Fingerprint
from holdfast.models.part import Part, Stateful
from holdfast.models.runner import Reach, Runner, StepContext
from holdfast.models.training_state import clone
from holdfast.records.types import Record
from holdfast.recovery.registry import strategy_class


class Trainable(ABC):
    """A model with its optimizer, whether every worker has all of it or a part."""

    kind: str
    """One of :data:`~holdfast.recovery.strategy.MODELS`."""
    parts: int
    """Parts that have homes of their own at workers; 0 where every worker holds the whole state."""
    num_buckets: int
    """Sums of all workers in a step, besides the closing one; 0 where the gradients of a part are summed by its holders."""
    size_bytes: int
    """Memory of a slice in the sum of all workers."""
    device: torch.device
    """Of the gradients in that sum."""
    numel: int
    """Numbers in the parameters of the whole model."""
    has_stages: bool = False
    """Whether a slice goes through the stages of several workers."""
    sends_copies: bool = False
    """Whether copies of parts are sent to backups between steps."""

    def __init__(self) -> None:
        self.registered: dict[str, Stateful] = {}
        """What the script wants to be kept with the model."""
        self._registered_before: dict[str, Any] = {}

    # -- capabilities

    @property
    def is_replicated(self) -> bool:
        """Whether every worker holds the whole state: no death loses any of it, and one worker alone can save it."""
        return self.parts == 0

    @property
    def whole(self) -> Part | None:
        """The model with its optimizer, as every worker holds it; None where workers hold parts."""
        return None

    @property
    def summed(self) -> Part | None:
        """Whose gradients are summed over all workers; None where the holders of each part do that among themselves."""
        return self.whole

    def named(self, target: str) -> Mapping[str, object] | None:
        """Return what a flip of ``target`` may name; None where that is not known before workers have met."""
        return None

    # -- a loop

    def begin_loop(self, world: World, log: RunLog) -> None:
        """Meet the other workers, if the model goes with the strategy and the guard. Called first of all in each training loop."""
        strategy_class(world.settings.strategy).check(self.kind)

    @abstractmethod
    def runner(self, context: StepContext) -> Runner:
        """Return what computes the steps of a loop."""

    def finish(self) -> None:
        """Give every worker the whole model, when all steps are done."""

    def leave(self) -> None:
        """End what goes on beside the loop: this worker is needed no more."""

    @abstractmethod
    def summary(self) -> Record | None:
        """Return what is written down, without stamps, when training ends; None if there is nothing to say."""

    # -- a step

    def slices(self, batch: MiniBatch, here: Sequence[int]) -> list[int]:
        """Return the slices of which workers ``here`` compute something."""
        return [number for number, rank in batch.owners.items() if rank in here]

    @abstractmethod
    def begin_step(self, reach: Reach) -> None:
        """Begin an attempt at a step: remember what it may change. Faults may be due in what workers give each other for it."""

    @abstractmethod
    def discard_step(self) -> None:
        """Take back all that the attempt changed."""

    def missing_slices(self, batch: MiniBatch) -> dict[int, tuple[int, ...]]:
        """Return the sums that each lost slice is missing from."""
        return {} if self.summed is None else self.summed.gradients.missing_slices(batch)

    def figures(self) -> list[float]:
        """Return all figures of the step, whose sums are known: the loss first, then the others by name."""
        assert self.summed is not None, "a model without sums over all workers has figures of its own"
        return self.summed.gradients.figures()

    @abstractmethod
    def apply(self, batch: MiniBatch, names: Sequence[str]) -> dict[str, float]:
        """Run the optimizer on the mean gradient, and return the figures of the step; the ``names`` are those that were logged here."""

    def computing(self, batch: MiniBatch, lost: Collection[int]) -> set[int]:
        """Return the workers that computed a slice of the step, or something of one, leaving out ``lost`` ones."""
        return {rank for number, rank in batch.owners.items() if number not in lost}

    # -- the state

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what this worker is to save, not copied."""

    @abstractmethod
    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have, not copied."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """Go back to what :meth:`state_dict` or :meth:`shared_state` returned, as far as :meth:`wanted` says.

        If it ``keeps`` them, tensors of the state may become those of this worker.

        Raises:
            CheckpointError: if the state is of other things than this session has.
        """

    def wanted(self, members: Sequence[int]) -> Wanted | None:
        """Return what this worker needs of a checkpoint; None is all."""
        return None

    def writers(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the processes that write a checkpoint, the lead first; any can, where each has all."""
        return comm.processes

    @abstractmethod
    def make_equal(self, comm: Communicator) -> None:
        """Give all workers the lowest one's state, unless all are equal already.

        Raises:
            CheckpointError: if it came damaged.
            StateLost: if there is none to begin with any more.
        """

    @abstractmethod
    def set_learning_rate(self, value: float) -> None:
        """Go on with another learning rate."""

    @abstractmethod
    def sha256s(self, here: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Return by worker the sha256 of its model, and that of its model and its optimizer's state."""

    @abstractmethod
    def fingerprint(self, comm: Communicator, settings: Settings) -> Fingerprint:
        """Return what hashes the state before each step, as the settings ask for it."""

    def _remember_registered(self) -> None:
        self._registered_before = {name: clone(thing.state_dict()) for name, thing in self.registered.items()}

    def _take_back_registered(self) -> None:
        for name, state in self._registered_before.items():
            self.registered[name].load_state_dict(clone(state))
        self._registered_before = {}

    # -- where one process plays several workers, and one of them may have other bits than the others

    @abstractmethod
    def enter(self, rank: int) -> None:
        """Hear that one of the workers that this process plays computes."""

    @abstractmethod
    def rest(self, here: Sequence[int]) -> None:
        """Hear that none of the workers that this process plays computes; see :meth:`OwnStates.rest`."""

    @abstractmethod
    def tensors_of(self, target: str, rank: int, here: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return ``"weights"``, or what the ``"optimizer"`` keeps, by name, to be altered at one of the workers ``here``.

        Raises:
            ConfigError: if no worker can have them for itself.
        """

    # -- placement: parts and their homes; where every worker holds all there are none, so none is lost and none moves

    def lost(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the parts that none of ``members`` holds; none as long as they have no homes."""
        return ()

    def rehome(self, *, restores: bool) -> None:
        """Let all parts have holders among the living; what comes here is kept aside.

        If it ``restores``, parts without a holder are as they were saved last.

        Raises:
            StateLost: if such a part was saved nowhere.
        """

    def settle(self) -> None:
        """Go on with the new homes, which all workers have."""

    def homes(self) -> Any:
        """Return which worker holds which part, as plain JSON; None where there are no parts."""
        return None

    def take_homes(self, homes: Any) -> None:
        """Hear, as a newcomer that holds nothing yet, what :meth:`homes` returned."""
