"""The position in the data: the plan, how much of it has been consumed, and which samples are in the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.data.ledger import Ledger, SampleCounts
from holdfast.data.plan import BatchCutter, MiniBatch, PlanCursor, SamplePlan
from holdfast.errors import ConfigError

_MUST_NOT_CHANGE = ("slices", "seed", "batch_size", "num_samples", "shuffle", "drop_last")


class DataPosition:
    """Cuts mini-batches one after another, and keeps the ledger."""

    def __init__(self, plan: SamplePlan, changes: Mapping[str, Any]) -> None:
        self._given = plan
        self._is_ended = False
        self.change(changes)
        self._begin_again()

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply changes, as plain JSON, to the script's values for all following mini-batches.

        They replace earlier changes: another ``batch_size``, number of ``workers`` that share the work, or their ``speeds``.
        """
        values = dict(changes)
        if "speeds" in values:
            values["speeds"] = {int(rank): speed for rank, speed in values["speeds"].items()}
        self.plan = dataclasses.replace(self._given, **values, given_batch_size=self._given.batch_size)
        self._batches, self._ahead = BatchCutter(self.plan), BatchCutter(self.plan)

    def _begin_again(self) -> None:
        self._batches, self._ahead = BatchCutter(self.plan), BatchCutter(self.plan)
        self._ledger = Ledger(self.plan)
        self._cursor = self.plan.start

    def next_batch(self, step: int, members: Sequence[int]) -> MiniBatch | None:
        """Return the mini-batch of ``step`` for ``members``; None at the end of the plan."""
        return None if self._is_ended else self._batches.mini_batch(step, self._cursor, members)

    def ahead(self, batch: MiniBatch, members: Sequence[int]) -> Iterator[MiniBatch]:
        """Yield the mini-batches after ``batch`` for ``members``, provided that these do not change."""
        batches = self._ahead  # separate, because it caches the order of one epoch
        following = batches.mini_batch(batch.step + 1, batch.after, members)
        while following is not None:
            yield following
            following = batches.mini_batch(following.step + 1, following.after, members)

    def end(self) -> None:
        """Leave out the rest of the plan: the last committed mini-batch was the last one."""
        self._is_ended = True

    def is_last(self, batch: MiniBatch) -> bool:
        """Return whether ``batch`` is the last one of the plan."""
        return batch.after.epoch >= self.plan.first_epoch + self.plan.epochs

    def commit(self, batch: MiniBatch, lost: Collection[int]) -> int:
        """Count ``batch`` as committed except for its ``lost`` slices; return the number of committed samples."""
        committed = [batch.slices[number] for number in batch.owners if number not in lost]
        self._ledger.commit(batch.epoch, np.concatenate([*committed, batch.ids[:0]]))
        self._cursor = batch.after
        return sum(map(len, committed))

    def account(self) -> SampleCounts:
        """Return the account of all samples so far."""
        return self._ledger.account(self._cursor)

    def info(self) -> dict[str, Any]:
        """Return the metadata for a checkpoint."""
        return {
            **{name: getattr(self._given, name) for name in _MUST_NOT_CHANGE},
            "epoch": self._cursor.epoch,
            "offset": self._cursor.offset,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state."""
        return self._ledger.state_dict()

    def restore(self, info: dict[str, Any], ledger: dict[str, Any], *, keep_slices: bool) -> None:
        """Restore from :meth:`info` and :meth:`state_dict`; ``keep_slices`` keeps this run's number of slices.

        Raises:
            ConfigError: if the checkpoint was made by a run with other values.
        """
        if not keep_slices:
            self.plan = dataclasses.replace(self.plan, slices=info["slices"])
            self._given = dataclasses.replace(self._given, slices=info["slices"])
        for name in _MUST_NOT_CHANGE:
            if info[name] != getattr(self._given, name):
                raise ConfigError(
                    f"the checkpoint was made with {name}={info[name]} and this run has {getattr(self._given, name)}: "
                    "the run would not be the same; give the old value, or start again in an empty directory"
                )
        self._begin_again()
        self._ledger.load_state_dict(ledger)
        self._cursor = PlanCursor(epoch=info["epoch"], offset=info["offset"])
