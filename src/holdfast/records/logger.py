"""The logger stamps records with time, rank and step, and passes each to all subscribed sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from holdfast.base.clock import Clock
from holdfast.records.types import STAMPS, Record

_Record = TypeVar("_Record", bound=Record)


class RecordSink(Protocol):
    """Receives stamped records; a :class:`~holdfast.records.files.FileRecorder` is one."""

    def write(self, record: Record) -> object:
        """Handle one record immediately; the result is ignored."""
        ...


class Logger:
    """Writes the records of one process.

    Args:
        clock: Gives ``t_s``.
        where: Returns the writing rank, -1 for the launcher, and the step in progress, -1 if there is none.
        *sinks: Receive the records; without sinks, records are dropped.
    """

    def __init__(self, clock: Clock, where: Callable[[], tuple[int, int]], *sinks: RecordSink) -> None:
        self._clock = clock
        self._where = where
        self._sinks = list(sinks)

    def subscribe(self, sink: RecordSink) -> None:
        """Pass all further records to ``sink`` too."""
        self._sinks.append(sink)

    def stamped(self, record: _Record) -> _Record:
        """Return ``record`` with the stamps that it lacks; existing stamps stay, such as the rank of another worker."""
        stamps: dict[str, Any] = dict(zip(STAMPS, (self._clock.now_s(), *self._where()), strict=True))
        return dataclasses.replace(record, **{name: stamps[name] for name in record.missing_stamps()})

    def write(self, record: _Record) -> _Record:
        """Stamp a record, pass it to all sinks, and return the stamped record."""
        record = self.stamped(record)
        for sink in self._sinks:
            sink.write(record)
        return record
