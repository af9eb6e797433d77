"""Which slices of a mini-batch each worker computes: the assignment that every worker computes, computed here again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.base.orders import is_tree
from holdfast.data.assignment import assign_slices, even_ranges
from holdfast.records.types import RunStarted, SettingChanged


class SliceShares:
    """The assignment of one start of a job.

    Args:
        start: Says how mini-batches are divided.
        members: The workers that the start began with, without spares.
    """

    def __init__(self, start: RunStarted, members: Sequence[int]) -> None:
        self._start, self._members = start, tuple(members)
        self._speeds: Mapping[int, float] = {}

    def change(self, changed: SettingChanged) -> None:
        """Take a change of the workers' speeds."""
        if changed.name == "speeds":
            self._speeds = {int(rank): speed for rank, speed in json.loads(changed.value).items()}

    def of(self, active: Sequence[int]) -> dict[int, list[int]]:
        """Return the slices of each worker that computes; empty if a mini-batch is not divided into fixed slices."""
        start, members = self._start, self._members
        is_even = start.split == "even" and (len(active) != len(members) or self._speeds)
        is_local = start.batch == "local" and len(active) < len(members)
        if not (start.slices and active and members) or is_even or is_local:
            return {}
        substitutes = iter([rank for rank in active if rank not in members])
        seats = [rank if rank in active else next(substitutes, -1) for rank in members]
        preferred = dict(zip(seats, even_ranges(start.slices, len(seats)), strict=True))
        preferred = {rank: home for rank, home in preferred.items() if rank >= 0}
        preferred |= {rank: (start.slices, start.slices) for rank in active if rank not in preferred}
        slices: dict[int, list[int]] = {rank: [] for rank in active}
        owners = assign_slices(start.slices, preferred, self._speeds, aligned=is_tree(start.order))
        for number, rank in enumerate(owners):
            slices[rank].append(number)
        return slices
