"""Lossy forward recovery: keep every bucket that anybody alive has, sum the rest over the survivors.

Sources: Nicolae et al., CCGrid 2022; with nothing summed yet it is the ULFM path of Amatya et al.,
"What does fault tolerant deep learning need from MPI?", EuroMPI 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from holdfast.recovery.messages import Action, ContinueStep, Event, HandOver, ProgressKnown
from holdfast.recovery.rollback import take_back
from holdfast.recovery.strategy import PIPELINE, SHARDED, Strategy, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Strategy):
    """Loses no time, but the dead worker's gradients of this step for the buckets not yet summed.

    The rule is "summed by *anybody* alive": with "summed by all" a worker that holds a bucket has already
    forgotten its input, and has nothing to give to a repeated sum.

    Args:
        min_workers: With fewer survivors: save and stop, before the step in progress.
    """

    exact: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {
        PIPELINE: "strategy must be rollback, restart, reinit or partial for a Pipeline, got forward: a step cannot go on without a stage",
        SHARDED: "strategy must be rollback, restart, reinit or partial for a Sharded model, got forward: a step cannot go on while a shard has no home",
    }

    min_workers: int = 1

    def handle(self, event: Event) -> list[Action]:
        """Hand over the one bucket that may be missing somewhere, then go on over the survivors."""
        match event:
            case ProgressKnown():
                return self._go_on(View.of(event))
            case _:
                return []

    def _go_on(self, view: View) -> list[Action]:
        # All must hold the gradients of one and the same distribution of slices. Where somebody has yet to
        # catch up, or does not have its gradients, the step has not begun: it is computed by the survivors.
        goes_back = view.loading or view.corrupt or view.altered or view.calm
        cannot_go_on = goes_back or not view.all_computed or (view.behind and view.next_sum == 0)
        if cannot_go_on or view.alive < self.min_workers:
            return take_back(view, self.min_workers)
        orders: list[Action] = []
        if view.behind:
            orders.append(HandOver(view.step, view.next_sum - 1, view.source))
        orders.append(ContinueStep(view.step, view.next_sum))
        return orders
