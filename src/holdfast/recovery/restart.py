"""The classic baseline: all workers load the newest intact checkpoint and recompute the steps since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.recovery.messages import Action, Event, LoadCheckpoint, ProgressKnown
from holdfast.recovery.rollback import discard_step
from holdfast.recovery.strategy import ProgressView, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Strategy):
    """Loses the steps since the newest checkpoint. The processes of the survivors keep running.

    Args:
        min_workers: With fewer survivors: save and stop. This saves the step in progress, not the checkpoint.
    """

    exact: ClassVar[bool] = True
    continues_steps: ClassVar[bool] = False
    needs_checkpoint: ClassVar[bool] = True

    min_workers: int = 1

    def handle(self, event: Event) -> list[Action]:
        """Finish a step that some survivor committed, as it may be published; then load, unless a retry is enough."""
        match event:
            case ProgressKnown():
                view = ProgressView.of(event)
                if view.is_planned or view.altered or view.alive < self.min_workers:
                    return discard_step(view, self.min_workers)
                return [*view.catch_up, LoadCheckpoint()]
            case _:
                return []
