"""The last events of a run as a live view shows them: one line each, the same as on the terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.base.formatting import clean, listing
from holdfast.records.types import (
    ActionRequested,
    CheckpointSaved,
    CorruptionFound,
    CorruptionHealed,
    DeviceLost,
    FaultFired,
    Finished,
    JobRestarted,
    Left,
    Record,
    Recovered,
    RunStarted,
    ScriptFailed,
    SeatTaken,
    SettingChanged,
    StateHashed,
    StepCommitted,
    ValuesAltered,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.event_lines import EventFormatter

MOST_EVENTS = 300
"""The last events that are kept."""

_KINDS: dict[type[Record], str] = {
    FaultFired: "fault",
    ValuesAltered: "fault",
    WorkerEnded: "lost",
    WorkerFenced: "lost",
    DeviceLost: "lost",
    ScriptFailed: "lost",
    Recovered: "recovery",
    CheckpointSaved: "checkpoint",
    SeatTaken: "join",
    Left: "left",
    SettingChanged: "change",
    ActionRequested: "change",
    CorruptionFound: "corruption",
    CorruptionHealed: "corruption",
    JobRestarted: "restart",
    Finished: "end",
}
_OFTEN = (StepCommitted, StateHashed)


class EventList:
    """The last events.

    Args:
        stamp: Returns the version of the state; an event has that of its arrival.
    """

    def __init__(self, stamp: Callable[[], int]) -> None:
        self._stamp = stamp
        self._format = EventFormatter()
        self._rows: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MOST_EVENTS)
        self._count = 0
        self._has_begun = False
        self._finished = False

    def take(self, record: Record) -> None:
        """Take a record; most have no line, and an event that every survivor records has one."""
        if isinstance(record, _OFTEN) and self._has_begun:
            return
        self._has_begun |= isinstance(record, StepCommitted)
        text = self._format.format(record) or self._own_line(record)
        if text:
            kind = _KINDS.get(type(record), "info")
            if isinstance(record, Recovered) and record.joined and not record.lost:
                kind = "join"
            rank = record.rank if record.rank >= 0 and not isinstance(record, RunStarted | Recovered) else None
            self.add(record.t_s, kind, rank, text)

    def add(self, t_s: float, kind: str, rank: int | None, text: str) -> None:
        """Add an event."""
        self._count += 1
        row = {"id": self._count, "t_s": round(t_s, 4), "kind": kind, "rank": rank, "text": clean(text)}
        self._rows.append((self._stamp(), row))

    def as_rows(self, since: int) -> list[dict[str, Any]]:
        """Return the events that were added after a version, the oldest first."""
        return [row for version, row in self._rows if version > since]

    def _own_line(self, record: Record) -> str:
        """Return a line for what the terminal does not report, because something else says it there."""
        match record:
            case CorruptionFound() | CorruptionHealed():
                return corruption_line(record)
            case ScriptFailed():
                where = f"rank {record.rank}: " if record.rank >= 0 else ""
                return f"{where}{record.message}"
            case Finished(outcome="done") if not self._finished:
                self._finished = True
                return f"training is complete after step {record.step - 1}" if record.step > 0 else "the script ended"
        return ""


def corruption_line(record: CorruptionFound | CorruptionHealed) -> str:
    """Return a line about a finding of the guard, or about its end."""
    ranks = f" of {'rank' if len(record.ranks) == 1 else 'ranks'} {listing(record.ranks)}" if record.ranks else ""
    if isinstance(record, CorruptionHealed):
        if record.is_training:
            return f"the same values were computed again: training causes them since step {record.found_at}"
        return f"corruption{ranks} in step {record.found_at} is healed: rollback to step {record.went_back_to}"
    names = listing(record.where[:3]) + (" and others" if len(record.where) > 3 else "")
    what = {"replicas": "replicas differ", "range": "a value is out of range", "message": "a message was altered"}
    return f"guard, step {record.step}: {what.get(record.what, record.what)}{ranks} ({names}); {record.policy}"
