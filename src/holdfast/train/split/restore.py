"""Restoring a part of a split model that nobody holds any more: from a backup, a checkpoint, or as training began."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.checkpoint.parts import all_but
from holdfast.errors import CheckpointCorrupt, StateLost
from holdfast.train.scribe import Scribe
from holdfast.train.split.body import Split
from holdfast.train.split.rows import BLOCK_BYTES
from holdfast.train.state import clone
from holdfast.train.world import World


class Restorer:
    """Restores parts under the strategy ``partial``.

    Args:
        world: Who is there.
        model: Whose parts.
        scribe: Is told what was restored from what.
    """

    def __init__(self, world: World, model: Split, scribe: Scribe) -> None:
        self._world = world
        self._model = model
        self._scribe = scribe

    def restore(self, part: int) -> dict[str, Any]:
        """Return the state of a part as it was saved last.

        Raises:
            StateLost: if it was saved nowhere, and cannot be made as it was at the beginning.
        """
        for source in (self._from_backup, self._from_checkpoint, self._from_beginning):
            found = source(part)
            if found is not None:
                state, ages = found
                break
        else:
            msg = f"part {part} of the model is lost with its holders, and there is no checkpoint: the job must begin again"
            raise StateLost(msg)
        reset = self._world.settings.mirror_optimizer == "reset"
        if reset:
            state["optimizer"]["state"] = {}
        self._go_on_with_schedule(state)
        name = source.__name__.removeprefix("_from_")
        self._scribe.restored(part, name, ages, "reset" if reset else "saved")
        return state

    def _from_backup(self, part: int) -> tuple[dict[str, Any], torch.Tensor] | None:
        backups = self._model.backups
        return None if backups is None else backups.restore(part, self._world.step)

    def _from_checkpoint(self, part: int) -> tuple[dict[str, Any], torch.Tensor] | None:
        keeper = self._world.keeper
        step = keeper.newest(self._warn, keep=False)
        if step < 0 or keeper.info(step)["loop"] != self._world.loop:
            return None
        loaded = keeper.load(step, all_but("replica/parts", f"replica/parts/{part}"))
        return self._of_one_age(loaded.state["replica"]["parts"][str(part)], self._world.step - step)

    def _from_beginning(self, part: int) -> tuple[dict[str, Any], torch.Tensor] | None:
        state = self._model.at_beginning(part)
        return None if state is None else self._of_one_age(clone(state), self._world.step)

    @staticmethod
    def _of_one_age(state: dict[str, Any], age: int) -> tuple[dict[str, Any], torch.Tensor]:
        blocks = sum(-(-value.nbytes // BLOCK_BYTES) for value in state["model"].values())
        return state, torch.full((blocks,), age)

    def _go_on_with_schedule(self, state: dict[str, Any]) -> None:
        """Let the part go on with the learning rate of the others: only its numbers are older than theirs."""
        other = next(iter(self._model.holdings.held.values()), None)
        if other is None:
            return
        if "scheduler" in state:
            state["scheduler"] = clone(other.state_dict()["scheduler"])
        for group, theirs in zip(state["optimizer"]["param_groups"], other.optimizer.param_groups, strict=False):
            group["lr"] = clone(theirs["lr"])

    def _warn(self, step: int, damage: CheckpointCorrupt) -> None:
        self._scribe.warn(f"passed over step {step}: {damage}")
