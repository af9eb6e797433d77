"""Partial recovery: shards without a surviving owner are restored from a standby some steps old; the rest is kept.

Source: Qiao et al., "Fault tolerance in iterative-convergent machine learning", ICML 2019 (SCAR).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from holdfast.recovery.messages import Action, Event, ProgressKnown
from holdfast.recovery.rollback import discard_step
from holdfast.recovery.strategy import REPLICATED, ProgressView, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial(Strategy):
    """Resumes with a perturbed model: the training of the lost parts since their last standby update is lost.

    No sample is lost or repeated, and as long as every part has a surviving holder no bit differs.

    Args:
        min_workers: With fewer survivors: save and stop.
    """

    exact: ClassVar[bool] = False
    continues_steps: ClassVar[bool] = False
    restores_parts: ClassVar[bool] = True
    can_change_live: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {
        REPLICATED: "strategy partial needs a model that is split, a Pipeline or Sharded; a replicated model loses no parts, so use rollback"
    }

    min_workers: int = 1

    def handle(self, event: Event) -> list[Action]:
        """Roll the step in progress back, as rollback does; lost parts are restored when the new placement is made."""
        match event:
            case ProgressKnown():
                return discard_step(replace(ProgressView.of(event), lost=False), self.min_workers)
            case _:
                return []
