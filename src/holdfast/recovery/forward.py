"""Lossy forward recovery: keep every bucket that any survivor has reduced, and all-reduce the rest over the survivors.

Sources: Nicolae et al., CCGrid 2022. If no bucket is reduced yet, it is the ULFM path of Amatya et al.,
"What does fault tolerant deep learning need from MPI?", EuroMPI 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from holdfast.recovery.messages import Action, ContinueStep, Event, HandOver, ProgressKnown
from holdfast.recovery.rollback import discard_step
from holdfast.recovery.strategy import PIPELINE, SHARDED, ProgressView, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Strategy):
    """Loses no time, only the failed worker's gradients of this step in buckets that were not yet reduced.

    The rule is "reduced by *any* survivor". Under "reduced by all survivors", a worker that holds a reduced bucket
    no longer has its own gradients and could not contribute to a retried all-reduce.

    Args:
        min_workers: With fewer survivors: save the state before the step in progress and stop.
    """

    exact: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {
        PIPELINE: "strategy must be rollback, restart, reinit or partial for a Pipeline, got forward: a step cannot continue without a stage",
        SHARDED: "strategy must be rollback, restart, reinit or partial for a Sharded model, got forward: a step cannot continue while no worker holds a shard",
    }

    min_workers: int = 1

    def handle(self, event: Event) -> list[Action]:
        """Hand over the one bucket that some survivors may lack, then continue the step over the survivors."""
        match event:
            case ProgressKnown():
                return self._go_on(ProgressView.of(event))
            case _:
                return []

    def _go_on(self, view: ProgressView) -> list[Action]:
        # All survivors must hold gradients of the same assignment of slices. If one still has to catch up, or has
        # not computed its gradients, the step has not begun: the survivors compute it from its start.
        goes_back = view.loading or view.corrupt or view.altered or view.is_planned
        cannot_go_on = goes_back or not view.all_computed or view.catch_up
        if cannot_go_on or view.alive < self.min_workers:
            return discard_step(view, self.min_workers)
        orders: list[Action] = []
        if view.behind:
            orders.append(HandOver(view.step, view.next_sum - 1, view.source))
        orders.append(ContinueStep(view.step, view.next_sum))
        return orders
