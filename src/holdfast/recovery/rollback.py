"""Immediate mini-batch rollback: discard the step at all workers and compute the same mini-batch again.

Source: Nicolae et al., "Towards low-overhead resilience for data parallel deep learning", CCGrid 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.recovery.messages import Action, DiscardStep, Event, LoadCheckpoint, ProgressKnown, SaveAndStop
from holdfast.recovery.strategy import ProgressView, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(Strategy):
    """Loses at most the work of one step; no sample is lost or repeated, and the weights stay bit-identical.

    Args:
        min_workers: With fewer survivors: save and stop.
    """

    exact: ClassVar[bool] = True
    continues_steps: ClassVar[bool] = False

    min_workers: int = 1

    def handle(self, event: Event) -> list[Action]:
        """Roll back the step in progress, after survivors that are behind have applied a committed step."""
        match event:
            case ProgressKnown():
                return discard_step(ProgressView.of(event), self.min_workers)
            case _:
                return []


def discard_step(view: ProgressView, min_workers: int) -> list[Action]:
    """Return to the start of the step in progress, if it was begun; stop there with fewer than ``min_workers``.

    If a part of the model is lost, or a worker's state is corrupt, the only way back is a saved state.
    """
    orders: list[Action] = []
    if view.loading or view.lost or view.corrupt:
        orders.append(LoadCheckpoint())
    elif not view.is_planned:
        orders += [*view.catch_up, DiscardStep(view.step)]
    if view.alive < min_workers:
        orders.append(SaveAndStop())
    return orders
