"""The last checkpoints of a run as a live view shows them, and whether the workers' hash chains agree up to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.records.types import CheckpointSaved, JobRestarted, Record, Recovered, StateHashed

MOST_CHECKPOINTS = 200
"""The last checkpoints that are kept."""
_MOST_STEPS = 4
"""Hashed steps whose links may still arrive, once the links of several workers have."""
_MOST_ALONE = 256
"""Hashed steps if only one worker's links arrive: those of another node come later, and a single worker stays alone."""


@dataclass(slots=True)
class _Row:
    record: CheckpointSaved
    version: int
    is_verified: bool | None = None


class Checkpoints:
    """The last checkpoints.

    A checkpoint is verified once at least two workers recorded the same link of the hash chain, each computed on its
    own, at its step or later. It is not if their links differ. Without a certificate nothing is known.

    Args:
        stamp: Returns the version of the state; a row that changes has that of its last change.
    """

    def __init__(self, stamp: Callable[[], int]) -> None:
        self._stamp = stamp
        self._rows: list[_Row] = []
        self._links: dict[int, dict[int, str]] = {}  # by step, of each rank
        self._agreed = -1
        """The last step up to which chains agree."""

    def take(self, record: Record) -> None:
        """Take a record."""
        match record:
            case CheckpointSaved():
                is_verified = True if record.step <= self._agreed else None
                row = _Row(record, self._stamp(), is_verified)
                kept = [each for each in self._rows if each.record.step != record.step]
                self._rows = [*kept, row][-MOST_CHECKPOINTS:]
            case StateHashed() if record.link:
                self._compare(record)
            case JobRestarted():
                self._links.clear()
            case Recovered() if record.redone_steps > 1:  # steps are hashed again, maybe with other samples
                self._links.clear()

    def as_rows(self, since: int) -> list[dict[str, Any]]:
        """Return the rows that changed after a version."""
        return [
            {
                "id": row.record.step,
                "step": row.record.step,
                "t_s": round(row.record.t_s, 4),
                "size_bytes": row.record.size_bytes,
                "held_s": round(row.record.seconds, 6),
                "write_s": None,
                "verified": row.is_verified,
            }
            for row in self._rows
            if row.version > since
        ]

    def _compare(self, hashed: StateHashed) -> None:
        links = self._links.setdefault(hashed.step, {})
        links[hashed.rank] = hashed.link
        if len(links) < 2:
            self._keep(_MOST_ALONE)
            return
        if agree := len(set(links.values())) == 1:
            self._agreed = max(self._agreed, hashed.step)
        elif self._agreed == hashed.step:  # the first two agreed, and another one differs
            self._agreed = max((step for step in self._links if step < hashed.step), default=-1)
        for row in self._rows:
            is_open = row.is_verified is None if agree else row.record.step > self._agreed
            if row.record.step <= hashed.step and is_open and row.is_verified is not agree:
                row.is_verified, row.version = agree, self._stamp()
        self._keep(_MOST_STEPS)

    def _keep(self, most: int) -> None:
        while len(self._links) > most:
            del self._links[min(self._links)]
