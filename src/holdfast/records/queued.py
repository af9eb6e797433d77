"""Sinks that may be slow or gone: each has a bounded queue and a thread of its own, so the launcher never waits for one.

    workers' files, other launchers ─> record bus ─┬─> job state, view                   immediately
                                                   ├─> queue ─> thread ─> Prometheus
                                                   └─> queue ─> thread ─> Kubeflow Trainer

A full queue drops records, and the report says how many.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.records.files import OF_STEPS
from holdfast.records.types import Record

CAPACITY = 10_000
"""Records that wait for one sink."""
_FOR_STEPS = 0.9
"""Records written in each step take at most this share of a queue: those about failures still find room."""
LAST_S = 3.0
"""The end of a job waits this long for a sink to take its last records."""


class NotTaken(Exception):
    """Raised by a sink that could not pass its records on.

    Args:
        why: The reason, in one line; "" if it was said.
        dropped: How many of the records are lost; None: all that the sink was called with.
    """

    def __init__(self, why: str, *, dropped: int | None = None) -> None:
        super().__init__(why)
        self.dropped = dropped


class SlowSink(Protocol):
    """Receives records on a thread of its own; each method may take any time.

    Args:
        name: Name of the sink in the report.
        trouble: What does not happen if it fails, as a clause: ``"progress is not reported to Kubeflow"``.
        pause_s: Shortest time between two calls of :meth:`take`, in seconds; read again after each call.
        longest_s: It is called without records after this time; infinite: never.

    A sink that keeps records to pass them on later has an attribute ``num_held`` with their number, read by another thread.
    """

    name: str
    trouble: str
    pause_s: float
    longest_s: float

    def take(self, records: Sequence[Record]) -> None:
        """Handle new records, in the order in which the launcher read them.

        Raises:
            NotTaken: if they could not be passed on. They are counted as dropped, unless it says how many were.
        """
        ...

    def close(self, end_s: float) -> None:
        """Handle the end of the run, ``end_s`` seconds after its begin. Nothing follows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCount:
    """How many records a sink received, and how many it did not: its queue was full, or it failed."""

    name: str
    taken: int
    dropped: int


def close_all(sinks: Sequence[QueuedSink], end_s: float, patience_s: float = math.inf) -> list[SinkCount]:
    """End all sinks at the same time, so that slow ones do not add up; return what became of the records of each.

    Args:
        sinks: The sinks.
        end_s: When the run ended, in seconds after its begin.
        patience_s: No sink is waited for longer than this, in seconds.
    """
    for sink in sinks:
        sink.end(end_s, patience_s)
    return [sink.close(end_s) for sink in sinks]


class QueuedSink:
    """The queue and the thread of a sink.

    Args:
        sink: The sink.
        say: Displays a line.
        capacity: Records that may wait, at least 1.
        last_s: How long the end of the job waits for it, in seconds; None: :data:`LAST_S`.
    """

    def __init__(
        self, sink: SlowSink, say: Callable[[str], None], *, capacity: int = CAPACITY, last_s: float | None = None
    ) -> None:
        self._sink, self._say, self._capacity = sink, say, capacity
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._taken = self._dropped = self._in_hand = self._held = 0
        self._end_s: float | None = None
        self._by_s = math.inf  # time.monotonic() at which the end of the job no longer waits for it
        self._has_complained = False
        self._last_s = LAST_S if last_s is None else last_s
        self._thread = threading.Thread(target=self._run, name=f"holdfast-{sink.name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a record, or drop it if there is no room; return immediately."""
        room = self._capacity * (_FOR_STEPS if isinstance(record, OF_STEPS) else 1)
        with self._changed:
            if len(self._waiting) >= room or self._end_s is not None:
                self._dropped += 1
                return
            self._waiting.append(record)
            self._changed.notify()

    def end(self, end_s: float, patience_s: float = math.inf) -> None:
        """Let the sink take what waits, and no more; return immediately.

        Args:
            end_s: When the run ended, in seconds after its begin.
            patience_s: :meth:`close` waits for it at most so long, in seconds, and never longer than ``last_s``.
        """
        with self._changed:
            if self._end_s is None:
                self._last_s = min(self._last_s, patience_s)
                self._end_s, self._by_s = end_s, time.monotonic() + self._last_s
                self._changed.notify()

    def close(self, end_s: float) -> SinkCount:
        """End the sink and wait for it, for some seconds at most; return what became of all records. May be called again."""
        self.end(end_s)
        self._thread.join(max(0.0, self._by_s - time.monotonic()))
        if self._thread.is_alive():
            self._complain(f"it does not answer within {self._last_s:g} s")
        return self.count()

    def count(self) -> SinkCount:
        """Return what became of the records so far; those that the sink has not taken at the end are dropped."""
        with self._changed:
            if self._end_s is None:
                return SinkCount(name=self._sink.name, taken=self._taken, dropped=self._dropped)
            lost = len(self._waiting) + self._in_hand
            held = min(self._taken, self._num_held()) if self._thread.is_alive() else 0
            return SinkCount(name=self._sink.name, taken=self._taken - held, dropped=self._dropped + lost + held)

    def _num_held(self) -> int:
        """Return how many records the sink holds of those that it was given before those in hand."""
        if not self._in_hand:
            self._held = getattr(self._sink, "num_held", 0)
        return self._held

    def _run(self) -> None:
        while (records := self._next()) is not None:
            self._give(records)
            with self._changed:
                self._changed.wait_for(lambda: self._end_s is not None, self._sink.pause_s)
        assert self._end_s is not None
        dropped = self._attempt(functools.partial(self._sink.close, self._end_s), 0)
        with self._changed:
            self._dropped += dropped
            self._taken = max(0, self._taken - dropped)

    def _next(self) -> list[Record] | None:
        """Wait for records, or for the longest time without; return None at the end."""
        longest_s = None if math.isinf(self._sink.longest_s) else self._sink.longest_s
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end_s is not None, longest_s)
            if self._end_s is not None and not self._waiting:
                return None
            records, self._waiting = self._waiting, []
            self._held = getattr(self._sink, "num_held", 0)
            self._in_hand = len(records)
            return records

    def _give(self, records: list[Record]) -> None:
        dropped = self._attempt(lambda: self._sink.take(records), len(records))
        with self._changed:
            self._taken += max(0, len(records) - dropped)
            self._dropped += dropped
            self._in_hand = 0

    def _attempt(self, call: Callable[[], None], records: int) -> int:
        """Call a method of the sink; say why if it fails, the first time. Return how many of the records are lost."""
        try:
            call()
        except NotTaken as error:
            if error.args[0]:
                self._complain(str(error))
            return records if error.dropped is None else error.dropped
        except Exception as error:  # training must not end for a defect of a sink
            self._complain(f"{type(error).__name__}: {error}")
            return records
        return 0

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._say(f"{self._sink.trouble}: {why}; training is not affected")
