"""The base class of strategies, and the view of all survivors' progress that they decide on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Self

from holdfast.errors import ConfigError, InternalError
from holdfast.recovery.messages import LOADING, Action, CatchUp, Event, Note, ProgressKnown

REPLICATED, PIPELINE, SHARDED = MODELS = ("replicated", "pipeline", "sharded")
"""Kinds of models, by how their parameters are distributed over the workers."""


class Strategy(ABC):
    """Decides the actions of all workers once the progress of all survivors is known.

    Pure: the same event gives the same actions at every worker, so no message is needed to agree on them. The actions
    are carried out one after another and must be safe to run twice, because a further failure may interrupt them. After
    the last action training resumes, at the step that is then in progress.

    Everything else about a strategy is declared in the traits below. No other code compares names of strategies.
    :mod:`holdfast.recovery.registry` explains how a strategy gets a name.
    """

    __slots__ = ()

    exact: ClassVar[bool]
    """After any failures the weights are bit-identical to those of the undisturbed run."""
    needs_checkpoint: ClassVar[bool] = False
    """It may load a checkpoint after any failure, not only if a part of the model is lost."""
    rebuilds: ClassVar[bool] = False
    """The survivors rebuild the application, so the script must end with :func:`holdfast.reinit`."""
    restores_parts: ClassVar[bool] = False
    """A lost part of the model is restored from a standby some steps old, and the other parts are kept."""
    continues_steps: ClassVar[bool] = True
    """It may continue a step after a failure, so each worker's gradients must last as long as the step."""
    can_change_live: ClassVar[bool] = True
    """A running job can switch to it."""
    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Kinds of models, of :data:`MODELS`, that it cannot train, each with the reason."""

    @abstractmethod
    def handle(self, event: Event) -> list[Action]:
        """Take one event and return the actions that answer it."""

    @classmethod
    def check(cls, model: str) -> None:
        """Check that the strategy can train a kind of model, one of :data:`MODELS`.

        Raises:
            ConfigError: if it cannot; the message gives the reason.
        """
        if model in cls.refused:
            raise ConfigError(cls.refused[model])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """The progress of all survivors, summarised.

    Args:
        top: The largest number of collectives that any survivor has completed.
        behind: Some survivor has completed one collective less.
        step: The step in progress once the survivors that are behind have caught up.
        next_sum: Position in the step of the first collective that no survivor has completed; 0 is "between two
            steps": some survivor committed the previous step, or none has begun this one.
        source: The lowest rank that has completed ``top`` collectives.
        all_computed: Every survivor has its gradients of the step in progress.
        loading: Some survivor is loading a checkpoint, so all must.
        is_planned: All are between the same two steps because the membership changes; no worker has detected a failure.
        lost: Some part of the model has no surviving holder.
        corrupt: Some worker's state was found to be corrupt.
        altered: A message of the step in progress was corrupted, so that its reduced buckets are unusable.
        alive: Number of survivors.
    """

    top: int
    behind: bool
    step: int
    next_sum: int
    source: int
    all_computed: bool
    loading: bool
    is_planned: bool
    lost: bool
    corrupt: bool
    altered: bool
    alive: int

    @classmethod
    def of(cls, event: ProgressKnown) -> Self:
        """Summarise the progress of all survivors.

        Raises:
            InternalError: if two survivors are more than one collective apart, which blocking collectives exclude.
        """
        completed = {rank: p.completed for rank, p in event.progress.items()}
        top, low = max(completed.values()), min(completed.values())
        loading = low == LOADING
        if not loading and top - low > 1:
            raise InternalError(f"survivors are {top - low} collectives apart, which cannot happen: {completed}")
        step, next_sum = divmod(top, event.num_buckets + 1)
        return cls(
            top=top,
            behind=low < top,
            step=step,
            next_sum=next_sum,
            source=min(rank for rank, c in completed.items() if c == top),
            all_computed=all(p.computed for p in event.progress.values()),
            loading=loading,
            is_planned=all(p.flags & Note.PLANNED for p in event.progress.values()),
            lost=any(p.flags & Note.LOST for p in event.progress.values()),
            corrupt=any(p.flags & Note.CORRUPT for p in event.progress.values()),
            altered=any(p.flags & Note.ALTERED for p in event.progress.values()),
            alive=len(completed),
        )

    @property
    def catch_up(self) -> list[Action]:
        """The order to apply the last step, if some survivor has committed it and others have not; none otherwise."""
        is_due = self.behind and self.next_sum == 0 and not self.loading
        return [CatchUp(self.step - 1)] if is_due else []
