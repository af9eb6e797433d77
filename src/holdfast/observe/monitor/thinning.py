"""What metrics can do without: a run that lasts for weeks takes memory for its failures alone."""

from __future__ import annotations

from holdfast.records.run_model import Retention
from holdfast.records.types import FailureSeen, FaultFired, JobRestarted, Record, Recovered, StepCommitted

_MOST_SEEN = 8
"""Survivors whose detection of a failure is kept: the first ones say when it was detected first."""


class Thinning(Retention):
    """Of undisturbed steps in a row keeps only the last, and of what all survivors record only what the first of them say."""

    def __init__(self) -> None:
        self._follows_step = False
        self._is_loose = False  # whether the last kept step is one that the next step replaces
        self._is_redoing = False
        self._seen: list[int] = []  # survivors whose detection of the last failure was kept
        self._generation = self._seen_after = -1  # of the last kept decision, and of the one before these detections
        self._awaited: set[int] = set()  # steps in progress at a failure, whose next commits end outages

    def replaces_step(self, record: StepCommitted, highest: int) -> bool:
        """See :meth:`Retention.replaces_step`."""
        is_past = self._is_redoing and record.step > highest
        is_needed = is_past or record.step in self._awaited or not self._follows_step
        self._is_redoing = record.step <= highest
        self._awaited.discard(record.step)
        was_loose, self._is_loose, self._follows_step = self._is_loose, not is_needed, True
        return was_loose and not is_needed

    def keeps(self, record: Record) -> bool:
        """See :meth:`Retention.keeps`."""
        if isinstance(record, FailureSeen | FaultFired):
            self._awaited.add(record.step)
        if isinstance(record, FailureSeen):
            if self._seen_after != self._generation:  # the next failure
                self._seen, self._seen_after = [], self._generation
            if len(self._seen) >= _MOST_SEEN:
                return False
            self._seen.append(record.rank)
        elif isinstance(record, Recovered):
            is_new = record.generation != self._generation or record.decision == "heal"  # needs no new communicator
            if not is_new and record.rank not in self._seen:
                return False
            self._generation = record.generation
        elif isinstance(record, JobRestarted):
            self._generation, self._seen_after, self._seen = -1, -1, []
        self._follows_step = self._is_loose = False
        return True
