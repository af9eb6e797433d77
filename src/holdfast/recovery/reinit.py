"""Survivors keep their processes and rebuild the application, from a snapshot or a checkpoint.

Source: Amatya et al., "What does fault tolerant deep learning need from MPI?", EuroMPI 2017, and the Reinit proposal for MPI
that the paper compares with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.recovery.messages import Action, Event, LoadCheckpoint, ProgressKnown, Reinitialise
from holdfast.recovery.rollback import discard_step
from holdfast.recovery.strategy import ProgressView, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinit(Strategy):
    """Loses the time to rebuild the application, and the training that the snapshot or checkpoint lacks.

    Args:
        min_workers: With fewer survivors: save and stop, in the existing application.
    """

    exact: ClassVar[bool] = True
    continues_steps: ClassVar[bool] = False
    rebuilds: ClassVar[bool] = True
    can_change_live: ClassVar[bool] = False

    min_workers: int = 1

    def handle(self, event: Event) -> list[Action]:
        """Finish a step that some survivor committed, so that all are before the same step; then rebuild and load."""
        match event:
            case ProgressKnown():
                view = ProgressView.of(event)
                # A worker that is loading has a new application already, or has not begun. A snapshot of a corrupt
                # state would be useless. A step that is only to be retried needs no new application.
                if view.loading or view.corrupt or view.altered or view.is_planned or view.alive < self.min_workers:
                    return discard_step(view, self.min_workers)
                return [*view.catch_up, Reinitialise(), LoadCheckpoint()]
            case _:
                return []
