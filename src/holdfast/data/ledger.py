"""The ledger: which samples are in the weights, checked against the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.data.plan import Ids, PlanCursor, SamplePlan
from holdfast.errors import InternalError


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

    With a sampler that repeats samples, a sample counts as lost or repeated as often as it is missing or too many.

    It counts the actual content of slices, and checks it against the plan's order, independently of the cursor that cut them.
    """

    def __init__(self, plan: SamplePlan) -> None:
        self._plan = plan
        self._times: Any = np.zeros(plan.num_samples, dtype=np.uint8 if plan.sampler is None else np.int32)
        self._one = self._times.dtype.type(1)
        self._epoch = plan.first_epoch
        self._closed = SampleCounts()

    def commit(self, epoch: int, ids: Ids) -> None:
        """Count ``ids`` as committed in ``epoch``; lost samples must not be among them."""
        if epoch != self._epoch:
            self._closed = self._closed.plus(self._count_until(self._plan.samples_in(self._epoch)))
            self._times[:] = 0
            self._epoch = epoch
        np.add.at(self._times, ids, self._one)  # of the counter's dtype: another takes seven times as long

    def account(self, cursor: PlanCursor) -> SampleCounts:
        """Return the account of all samples before ``cursor``."""
        ended = cursor.epoch > self._epoch
        return self._closed.plus(self._count_until(self._plan.samples_in(self._epoch) if ended else cursor.offset))

    def _count_until(self, until: int) -> SampleCounts:
        begun = self._plan.first_offset if self._epoch == self._plan.first_epoch else 0
        planned = self._plan.order(self._epoch)[begun:until]
        if self._plan.sampler is not None:
            return self._count_drawn(planned)
        times = self._times[planned]
        return SampleCounts(
            planned=len(planned),
            committed=int((times > 0).sum()),
            lost=int((times == 0).sum()),
            repeated=int((self._times > 1).sum()),
        )

    def _count_drawn(self, planned: Ids) -> SampleCounts:
        """Return the account of an order in which a sample may occur several times."""
        wanted = np.bincount(planned, minlength=len(self._times))
        return SampleCounts(
            planned=len(planned),
            committed=int(np.minimum(self._times, wanted).sum()),
            lost=int(np.maximum(wanted - self._times, 0).sum()),
            repeated=int(np.maximum(self._times - wanted, 0).sum()),
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


class StreamLedger:
    """The ledger of a stream: counts positions, of which there may be any number, as ranges.

    The number of samples of an epoch is known at its end, from the stream, independently of the cursor.

    Args:
        epoch: The first epoch.
        begun: Samples at the beginning of the first epoch that do not belong to the plan.
    """

    def __init__(self, epoch: int, begun: int = 0) -> None:
        self._epoch = epoch
        self._begun = (epoch, begun)
        self._once, self._again = PositionRanges(), PositionRanges()
        self._closed = SampleCounts()

    def commit(self, epoch: int, ids: Ids) -> None:
        """Count ``ids`` as committed in ``epoch``; lost samples must not be among them.

        Raises:
            InternalError: if an earlier epoch has not ended.
        """
        if epoch != self._epoch:
            raise InternalError(f"samples of epoch {epoch} of a stream were committed in epoch {self._epoch}")
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        for run in np.split(ids, cuts):
            if len(run):
                for start, stop in self._once.add(int(run[0]), int(run[-1]) + 1):
                    self._again.add(start, stop)

    def end_epoch(self, length: int) -> None:
        """Note that the epoch has ended, and how many of its samples belong to the plan."""
        self._closed = self._closed.plus(self._count_until(length))
        self._epoch += 1
        self._once, self._again = PositionRanges(), PositionRanges()

    def account(self, cursor: PlanCursor) -> SampleCounts:
        """Return the account of all samples before ``cursor``."""
        return self._closed.plus(self._count_until(cursor.offset))

    def _count_until(self, until: int) -> SampleCounts:
        planned = until - self._begun[1] if self._epoch == self._begun[0] else until
        committed = self._once.count(until)
        return SampleCounts(
            planned=planned, committed=committed, lost=planned - committed, repeated=self._again.count()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {
            "epoch": self._epoch,
            "once": self._once.as_list(),
            "again": self._again.as_list(),
            "closed": list(dataclasses.astuple(self._closed)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        planned, committed, lost, repeated = state["closed"]
        self._epoch = state["epoch"]
        self._once, self._again = PositionRanges(state["once"]), PositionRanges(state["again"])
        self._closed = SampleCounts(planned=planned, committed=committed, lost=lost, repeated=repeated)


class PositionRanges:
    """A set of whole numbers as disjoint ranges; one range if they are consecutive."""

    def __init__(self, flat: Sequence[int] = ()) -> None:
        self._ranges = list(zip(flat[::2], flat[1::2], strict=True))

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Add the numbers from ``start`` to before ``stop``; return the ranges of those that were there already."""
        before = [span for span in self._ranges if span[1] < start]
        after = [span for span in self._ranges if span[0] > stop]
        touched = self._ranges[len(before) : len(self._ranges) - len(after)]
        overlaps = [(max(start, low), min(stop, high)) for low, high in touched]
        low, high = min([start, *(span[0] for span in touched)]), max([stop, *(span[1] for span in touched)])
        self._ranges = [*before, (low, high), *after]
        return [(low, high) for low, high in overlaps if low < high]

    def count(self, until: int | None = None) -> int:
        """Return how many numbers there are, or how many below ``until``."""
        return sum(max(0, (stop if until is None else min(stop, until)) - start) for start, stop in self._ranges)

    def as_list(self) -> list[int]:
        """Return start and end of each range, one after the other."""
        return [number for span in self._ranges for number in span]
