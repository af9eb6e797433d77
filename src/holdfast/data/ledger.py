"""The ledger: which samples are in the weights, checked against the plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.data.plan import Ids, PlanCursor, SamplePlan

_ONCE = np.uint8(1)
"""Of the counter's dtype: adding a value of another dtype takes seven times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """Counts of the plan's samples so far; without errors, ``planned = committed + lost`` and ``repeated = 0``."""

    planned: int = 0  # in the plan
    committed: int = 0  # in the weights
    lost: int = 0  # in the plan, but not or not completely in the weights
    repeated: int = 0  # in the weights more than once

    def plus(self, other: SampleCounts) -> SampleCounts:
        """Return the sum of two accounts."""
        return SampleCounts(
            **{name: number + getattr(other, name) for name, number in dataclasses.asdict(self).items()}
        )


class Ledger:
    """Counts how often each sample of the current epoch was committed; finished epochs are kept as totals.

    It counts the actual content of slices, and checks it against the plan's order, independently of the cursor that cut them.
    """

    def __init__(self, plan: SamplePlan) -> None:
        self._plan = plan
        self._times = np.zeros(plan.num_samples, dtype=np.uint8)
        self._epoch = plan.first_epoch
        self._closed = SampleCounts()

    def commit(self, epoch: int, ids: Ids) -> None:
        """Count ``ids`` as committed in ``epoch``; lost samples must not be among them."""
        if epoch != self._epoch:
            self._closed = self._closed.plus(self._count_until(self._plan.epoch_samples))
            self._times[:] = 0
            self._epoch = epoch
        np.add.at(self._times, ids, _ONCE)

    def account(self, cursor: PlanCursor) -> SampleCounts:
        """Return the account of all samples before ``cursor``."""
        ended = cursor.epoch > self._epoch
        return self._closed.plus(self._count_until(self._plan.epoch_samples if ended else cursor.offset))

    def _count_until(self, until: int) -> SampleCounts:
        begun = self._plan.first_offset if self._epoch == self._plan.first_epoch else 0
        planned = self._plan.order(self._epoch)[begun:until]
        times = self._times[planned]
        return SampleCounts(
            planned=len(planned),
            committed=int((times > 0).sum()),
            lost=int((times == 0).sum()),
            repeated=int((self._times > 1).sum()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        closed = list(dataclasses.astuple(self._closed))
        return {"epoch": self._epoch, "times": torch.from_numpy(self._times.copy()), "closed": closed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        planned, committed, lost, repeated = state["closed"]
        self._epoch = state["epoch"]
        self._times = state["times"].numpy().copy()
        self._closed = SampleCounts(planned=planned, committed=committed, lost=lost, repeated=repeated)
