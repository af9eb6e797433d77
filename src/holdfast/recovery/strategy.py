"""What a strategy is, and the view of everybody's progress that it decides on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Self

from holdfast.errors import ConfigError, InternalError
from holdfast.recovery.messages import LOADING, Action, Event, Note, ProgressKnown

REPLICATED, PIPELINE, SHARDED = MODELS = ("replicated", "pipeline", "sharded")
"""Kinds of models, by how their parameters lie on the workers."""


class Strategy(ABC):
    """Answers "everybody's progress is known" with orders for everybody.

    Pure: the same event gives the same orders at every worker, so no message is needed to agree on them.
    The orders are carried out one after another and must be safe to do twice, because a further death may
    interrupt them. After the last order training goes on, with the step that then is in progress.

    What else is to be known about a strategy it declares in the traits below. No other code compares names of strategies.
    :mod:`holdfast.recovery.registry` says how a strategy gets a name.
    """

    __slots__ = ()

    exact: ClassVar[bool]
    """After any failures the weights are those of the undisturbed run, bit for bit."""
    needs_checkpoint: ClassVar[bool] = False
    """It may load a checkpoint after any failure, not only where a part of the model is lost."""
    rebuilds: ClassVar[bool] = False
    """The survivors build the application again, so the script has to end with :func:`holdfast.reinit`."""
    restores_parts: ClassVar[bool] = False
    """A lost part of the model is restored from a copy that is some steps old, and the other parts stay."""
    can_change_live: ClassVar[bool] = True
    """A running job can be changed to it."""
    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Kinds of models, of :data:`MODELS`, that it cannot train, and why."""

    @abstractmethod
    def handle(self, event: Event) -> list[Action]:
        """Take one event and say what to do about it."""

    @classmethod
    def check(cls, model: str) -> None:
        """Make sure that the strategy can train a kind of model, one of :data:`MODELS`.

        Raises:
            ConfigError: if it cannot; the message says why.
        """
        if model in cls.refused:
            raise ConfigError(cls.refused[model])


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everybody's progress, seen as a whole.

    Args:
        top: The most sums that anybody alive has completed.
        behind: Somebody alive has completed one sum less.
        step: The step that is in progress once those behind have caught up.
        next_sum: Position in the step of the first sum that nobody has completed; 0 is "between two steps":
            somebody closed the step before, or nobody began this one.
        source: The lowest rank that has completed ``top`` sums.
        all_computed: Everybody alive has the gradients of the step in progress.
        loading: Somebody alive is loading a checkpoint, so everybody is.
        calm: All are between the same two steps, because members change; nobody has seen a failure.
        lost: Nobody alive holds some part of the model.
        corrupt: Somebody's state was found to be corrupt.
        altered: A message of the step in progress was altered, so that its sums are of no use.
        alive: Number of survivors.
    """

    top: int
    behind: bool
    step: int
    next_sum: int
    source: int
    all_computed: bool
    loading: bool
    calm: bool
    lost: bool
    corrupt: bool
    altered: bool
    alive: int

    @classmethod
    def of(cls, event: ProgressKnown) -> Self:
        """Look at the progress of all.

        Raises:
            InternalError: if two survivors are more than one sum apart, which blocking symmetric sums exclude.
        """
        completed = {rank: p.completed for rank, p in event.progress.items()}
        top, low = max(completed.values()), min(completed.values())
        loading = low == LOADING
        if not loading and top - low > 1:
            raise InternalError(f"survivors are {top - low} sums apart, which cannot be: {completed}")
        step, next_sum = divmod(top, event.num_buckets + 1)
        return cls(
            top=top,
            behind=low < top,
            step=step,
            next_sum=next_sum,
            source=min(rank for rank, c in completed.items() if c == top),
            all_computed=all(p.computed for p in event.progress.values()),
            loading=loading,
            calm=all(p.flags & Note.CALM for p in event.progress.values()),
            lost=any(p.flags & Note.LOST for p in event.progress.values()),
            corrupt=any(p.flags & Note.CORRUPT for p in event.progress.values()),
            altered=any(p.flags & Note.ALTERED for p in event.progress.values()),
            alive=len(completed),
        )
