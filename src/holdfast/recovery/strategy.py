"""What a strategy is, and the view of everybody's progress that it decides on."""

from __future__ import annotations

import importlib
import typing
from dataclasses import dataclass
from typing import Self

from holdfast.errors import ConfigError, InternalError
from holdfast.events import ALTERED, CALM, CORRUPT, LOADING, LOST, Action, Event, ProgressKnown


class Strategy(typing.Protocol):
    """Answers "everybody's progress is known" with orders for everybody.

    Pure: the same event gives the same orders at every worker, so no message is needed to agree on them.
    The orders are carried out one after another and must be safe to do twice, because a further death may
    interrupt them. After the last order training goes on, with the step that then is in progress.
    """

    def handle(self, event: Event) -> list[Action]:
        """Take one event and say what to do about it."""
        ...


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
            msg = f"survivors are {top - low} sums apart, which cannot be: {completed}"
            raise InternalError(msg)
        step, next_sum = divmod(top, event.num_buckets + 1)
        return cls(
            top=top,
            behind=low < top,
            step=step,
            next_sum=next_sum,
            source=min(rank for rank, c in completed.items() if c == top),
            all_computed=all(p.computed for p in event.progress.values()),
            loading=loading,
            calm=all(p.flags & CALM for p in event.progress.values()),
            lost=any(p.flags & LOST for p in event.progress.values()),
            corrupt=any(p.flags & CORRUPT for p in event.progress.values()),
            altered=any(p.flags & ALTERED for p in event.progress.values()),
            alive=len(completed),
        )


def make_strategy(name: str, *, min_workers: int = 1) -> Strategy:
    """Return the strategy called ``name``.

    Args:
        name: ``"rollback"``, ``"forward"``, ``"restart"``, ``"reinit"`` or ``"partial"``.
        min_workers: With fewer survivors it orders to save and stop, ``>= 1``.

    Raises:
        ConfigError: if there is no such strategy.
    """
    kinds = ("rollback", "forward", "restart", "reinit", "partial")
    if name not in kinds:
        msg = f"strategy must be one of {', '.join(kinds)}, got {name!r}"
        raise ConfigError(msg)
    kind = getattr(importlib.import_module(f"holdfast.recovery.{name}"), name.capitalize())
    strategy: Strategy = kind(min_workers=min_workers)
    return strategy
