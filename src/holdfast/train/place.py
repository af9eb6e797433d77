"""Where training is in the data: the plan, how far it has been used up, and what of it is in the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast.train.batches import Batches, Cursor, MiniBatch, Plan
from holdfast.train.ledger import Account, Ledger

_MUST_NOT_CHANGE = ("slices", "seed", "batch_size", "num_samples", "shuffle", "drop_last")


class Place:
    """Cuts mini-batches one after another, and keeps the ledger.

    Args:
        plan: Which samples belong to which step.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.begin_again()

    def change(self, **values: Any) -> None:
        """Cut what follows otherwise: with another ``batch_size``, number of ``workers``, or their ``speeds``."""
        self.plan = dataclasses.replace(self.plan, **values)
        self._batches = Batches(self.plan)

    def changes(self) -> dict[str, Any]:
        """Return what :meth:`change` may have changed, as plain JSON; see :meth:`take_changes`."""
        plan = self.plan
        speeds = {str(rank): speed for rank, speed in plan.speeds.items()}
        return {"batch_size": plan.batch_size, "workers": plan.workers, "speeds": speeds}

    def take_changes(self, changes: dict[str, Any]) -> None:
        """Cut as the worker does that returned ``changes``."""
        self.change(**(changes | {"speeds": {int(rank): speed for rank, speed in changes["speeds"].items()}}))

    def begin_again(self) -> None:
        """Go back to before the first step."""
        self._batches = Batches(self.plan)
        self._ledger = Ledger(self.plan)
        self._cursor = self.plan.start

    def next_batch(self, step: int, members: Sequence[int]) -> MiniBatch | None:
        """Return the mini-batch of ``step`` among ``members``; None when the plan is used up."""
        return self._batches.mini_batch(step, self._cursor, members)

    def commit(self, batch: MiniBatch, lost: Collection[int]) -> int:
        """Count ``batch`` as committed but for the slices that were ``lost``; return how many samples are in."""
        committed = [batch.slices[number] for number in batch.owners if number not in lost]
        self._ledger.commit(batch.epoch, np.concatenate([*committed, batch.ids[:0]]))
        self._cursor = batch.after
        return sum(map(len, committed))

    def account(self) -> Account:
        """Return the account of everything so far."""
        return self._ledger.account(self._cursor)

    def info(self) -> dict[str, Any]:
        """Return what a checkpoint says in plain words."""
        return {
            **{name: getattr(self.plan, name) for name in _MUST_NOT_CHANGE},
            "epoch": self._cursor.epoch,
            "offset": self._cursor.offset,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state."""
        return self._ledger.state_dict()

    def restore(self, info: dict[str, Any], ledger: dict[str, Any], *, keep_slices: bool) -> None:
        """Go on from a checkpoint.

        Args:
            info: What :meth:`info` returned.
            ledger: What :meth:`state_dict` returned.
            keep_slices: The number of slices was asked for; otherwise it is the checkpoint's.

        Raises:
            ConfigError: if the run that made it was another one.
        """
        if not keep_slices:
            self.plan = dataclasses.replace(self.plan, slices=info["slices"])
        for name in _MUST_NOT_CHANGE:
            if info[name] != getattr(self.plan, name):
                msg = (
                    f"the checkpoint was made with {name}={info[name]} and this run has {getattr(self.plan, name)}: "
                    "the run would not be the same; give the old value, or start anew in an empty directory"
                )
                raise ConfigError(msg)
        self.begin_again()
        self._ledger.load_state_dict(ledger)
        self._cursor = Cursor(epoch=info["epoch"], offset=info["offset"])
