"""Restores a part without a surviving holder: from a delta standby, from disk, or from its initial state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from holdfast.checkpoint.parts import all_but
from holdfast.errors import CheckpointCorrupt, StateLost
from holdfast.models.flat_params import BLOCK_BYTES
from holdfast.models.resident_parts import ResidentParts
from holdfast.models.standby import DeltaStandbys, RestoredPart
from holdfast.models.training_state import clone
from holdfast.records.types import PartRestored
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog

_Found = tuple[str, RestoredPart]
"""The source of a part, and the part."""


class PartRestorer:
    """Restores parts under strategy ``partial``: from memory, from disk, or from the initial state."""

    def __init__(
        self,
        job: JobContext,
        resident: ResidentParts,
        backups: DeltaStandbys | None,
        initial_part: Callable[[int], dict[str, Any] | None],
        log: RunLog,
    ) -> None:
        self._job = job
        self._resident = resident
        self._backups = backups
        self._initial_part = initial_part
        self._log = log

    def restore(self, part: int) -> dict[str, Any]:
        """Return the state of a part as last saved, or its initial state.

        Raises:
            StateLost: if neither exists.
        """
        result = self._in_memory(part) or self._on_disk(part) or self._initial_state(part)
        if result is None:
            raise StateLost(
                f"part {part} of the model is lost with its holders, without a checkpoint: the job must start over"
            )
        source, restored = result
        if self._job.settings.mirror_optimizer == "reset":
            restored.state["optimizer"]["state"] = {}
        self._go_on_with_schedule(restored.state)
        self._record(part, source, restored)
        return restored.state

    def _record(self, part: int, source: str, restored: RestoredPart) -> None:
        ages, policy = restored.ages, self._job.settings.mirror_optimizer
        unique_ages, counts = ages.unique(return_counts=True)
        self._log.write(
            PartRestored(
                part=part,
                source=source,
                ages=tuple(unique_ages.tolist()),
                blocks=tuple(counts.tolist()),
                optimizer="saved" if policy == "kept" and restored.optimizer_age is None else policy,
                optimizer_age=restored.optimizer_age,
            )
        )
        mean = float(ages.double().mean()) if len(ages) else 0.0
        self._log.warn(
            f"part {part} of the model has no surviving holder: restored from its {source}, mean age {mean:.1f} steps"
        )

    def _in_memory(self, part: int) -> _Found | None:
        backups = self._backups
        restored = None if backups is None else backups.restore(part, self._job.step, self._job.comm.local_ranks)
        return None if restored is None else ("backup", restored)

    def _on_disk(self, part: int) -> _Found | None:
        """Return the copy that a standby wrote, or that in the newest checkpoint if it is not older."""
        backups, step = self._backups, self._job.step
        restored = None if backups is None else backups.restore_written(part, step)
        if restored is None:
            return self._in_checkpoint(part)
        oldest = math.ceil(step - float(restored.ages.double().mean()))
        is_there = self._job.checkpoints.last() >= oldest  # checking a checkpoint reads all of it
        return (self._in_checkpoint(part, oldest) if is_there else None) or ("copy", restored)

    def _in_checkpoint(self, part: int, oldest: int = 0) -> _Found | None:
        """Return the part from the newest intact checkpoint of this loop, if that is of step ``oldest`` or later."""
        checkpoints = self._job.checkpoints
        step = checkpoints.newest(self._warn, keep=False)
        if step is None or step < oldest or checkpoints.info(step)["loop"] != self._job.loop:
            return None
        loaded = checkpoints.load(step, all_but("replica/parts", f"replica/parts/{part}"))
        return "checkpoint", self._of_one_age(loaded.state["replica"]["parts"][str(part)], self._job.step - step)

    def _initial_state(self, part: int) -> _Found | None:
        state = self._initial_part(part)
        return None if state is None else ("beginning", self._of_one_age(clone(state), self._job.step))

    @staticmethod
    def _of_one_age(state: dict[str, Any], age: int) -> RestoredPart:
        blocks = sum(-(-value.nbytes // BLOCK_BYTES) for value in state["model"].values())
        return RestoredPart(state, torch.full((blocks,), age))

    def _go_on_with_schedule(self, state: dict[str, Any]) -> None:
        """Give the part the learning rate of the other parts: only its tensors are older than theirs."""
        other = next(iter(self._resident.held.values()), None)
        if other is None:
            return
        if "scheduler" in state:
            state["scheduler"] = clone(other.state_dict()["scheduler"])
        for group, other_group in zip(state["optimizer"]["param_groups"], other.optimizer.param_groups, strict=False):
            group["lr"] = clone(other_group["lr"])

    def _warn(self, step: int, damage: CheckpointCorrupt) -> None:
        self._log.warn(f"skipped step {step}: {damage}")
