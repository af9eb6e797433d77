"""The recoveries of a run as a live view shows them: each opened into the parts that its time went to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.records.types import FailureSeen, JobRestarted, Recovered
from holdfast.summary.event_lines import decision_phrase

MOST_RECOVERIES = 200
"""The last recoveries that are kept; all are counted."""


@dataclass(slots=True)
class RecoveryRow:
    """One decision of the survivors, or one restart of the job.

    Args:
        number: Counted over the run, from 1.
        begin_s: When the first survivor detected the failure, or had decided.
        first_s: When the first survivor had decided.
        last_s: When the last survivor had decided.
        parts: Its seconds by cause of badput, as they become known.
    """

    number: int
    begin_s: float
    first_s: float
    last_s: float
    step: int
    decision: str
    generation: int
    lost: tuple[int, ...]
    workers_after: int
    parts: dict[str, float] = field(default_factory=dict)
    version: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds for which training was interrupted: without the work that is done again."""
        if not self.parts:
            return self.last_s - self.begin_s
        return sum(seconds for name, seconds in self.parts.items() if name != "step_redone")


class Recoveries:
    """The last recoveries of a run.

    Args:
        stamp: Returns the version of the state; a row that changes has the version of its last change.
    """

    def __init__(self, stamp: Callable[[], int]) -> None:
        self._stamp = stamp
        self.rows: list[RecoveryRow] = []
        self.count = 0
        self._seen_s: float | None = None  # when the first survivor detected the failure that is not decided about

    def detect(self, seen: FailureSeen) -> None:
        """Take the detection of a failure by one survivor."""
        row = self.rows[-1] if self.rows else None
        if row is None or seen.t_s > row.last_s:
            self._seen_s = seen.t_s if self._seen_s is None else min(self._seen_s, seen.t_s)
        elif seen.t_s < row.begin_s and (len(self.rows) < 2 or seen.t_s > self.rows[-2].last_s):
            row.begin_s, row.version = seen.t_s, self._stamp()

    def resume(self) -> None:
        """Take that a step was committed: what was detected before belongs to no later recovery."""
        self._seen_s = None

    def decide(self, record: Recovered) -> RecoveryRow | None:
        """Take the decision of one survivor; return the row if it is the first of this recovery."""
        row = self._row_of(record)
        if row is None:
            return self._open(record, record.decision, record.generation, record.lost, len(record.survivors))
        lost = tuple(sorted({*row.lost, *record.lost}))
        if record.t_s > row.last_s or record.t_s < row.first_s or lost != row.lost:
            row.first_s, row.last_s = min(row.first_s, record.t_s), max(row.last_s, record.t_s)
            row.begin_s, row.lost = min(row.begin_s, row.first_s), lost
            row.version = self._stamp()
        return None

    def restart(self, restarted: JobRestarted, lost: tuple[int, ...]) -> RecoveryRow:
        """Take a restart of the job."""
        return self._open(restarted, "restart", -1, lost, len(restarted.workers))

    def explain(self, ended_s: float, parts: Mapping[str, float]) -> None:
        """Add the parts of a recovery whose time ended at ``ended_s``: it is the last one that was decided until then."""
        for row in reversed(self.rows):
            if row.first_s <= ended_s + 1e-9:
                row.parts = {name: row.parts.get(name, 0.0) + parts.get(name, 0.0) for name in {**row.parts, **parts}}
                row.version = self._stamp()
                return

    def as_rows(self, since: int, cause_of: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return the rows that changed after a version; ``cause_of`` returns why a worker was lost."""
        return [
            {
                "id": row.number,
                "t_s": round(row.begin_s, 4),
                "step": row.step,
                "lost": [{"rank": rank, "cause": cause_of(rank)} for rank in row.lost],
                "decision": decision_phrase(row.decision, row.step),
                "duration_s": round(row.duration_s, 6),
                "parts": {name: round(seconds, 6) for name, seconds in row.parts.items()},
                "workers_after": row.workers_after,
            }
            for row in self.rows
            if row.version > since
        ]

    def refresh(self, rank: int) -> None:
        """Show the last row that names ``rank`` again: why it was lost has become known."""
        for row in reversed(self.rows):
            if rank in row.lost:
                row.version = self._stamp()
                return

    def _row_of(self, record: Recovered) -> RecoveryRow | None:
        """Return the row of this decision, if another survivor wrote it, too."""
        for row in reversed(self.rows[-8:]):
            if row.decision == "restart" and record.t_s >= row.first_s:
                return None
            is_same = row.generation == record.generation and (row.decision == "heal") == (record.decision == "heal")
            if is_same and (record.decision != "heal" or not row.parts):  # healing needs no new communicator
                return row
        return None

    def _open(
        self, record: Recovered | JobRestarted, decision: str, generation: int, lost: tuple[int, ...], after: int
    ) -> RecoveryRow:
        self.count += 1
        begin_s = record.t_s if self._seen_s is None else min(self._seen_s, record.t_s)
        self._seen_s = None
        row = RecoveryRow(
            number=self.count, begin_s=begin_s, first_s=record.t_s, last_s=record.t_s, step=record.step,
            decision=decision, generation=generation, lost=tuple(sorted(lost)), workers_after=after,
            version=self._stamp(),
        )  # fmt: skip
        self.rows = [*self.rows, row][-MOST_RECOVERIES:]
        return row
