"""Recoveries as spans: when each began and ended, and its parts, which are its children in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.records.types import FailureSeen, FaultFired, JobRestarted, Record, Recovered, RunStarted, WorkerEnded
from holdfast.summary.goodput import RECOVERY_PARTS, SETTLED_S, TimeAccount

Attributes = Mapping[str, str | int | float | tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a recovery.

    Args:
        name: A cause of badput, as in the report; see :data:`holdfast.summary.goodput.CAUSES`.
        begin_s: When it began, in seconds since the launcher started.
        end_s: When it ended.
    """

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpan:
    """A recovery that is over, from the failure to the decision of the last survivor, or to the restart.

    Args:
        begin_s: When the failure began to cost time, in seconds since the launcher started.
        end_s: When training resumed.
        parts: What it consisted of, one after the other, without empty ones.
        redone_s: Work that was discarded, in seconds: it lies before the failure, or is done again after the recovery.
        attributes: What was lost, and what was decided.
    """

    begin_s: float
    end_s: float
    parts: tuple[Part, ...]
    redone_s: float
    attributes: Attributes


class RecoveryTrace:
    """Finds the recoveries of a run in its records, while it runs."""

    def __init__(self) -> None:
        self._account = TimeAccount()
        self._attributes: dict[str, str | int | float | tuple[int, ...]] = {}
        self._interrupted: RecoverySpan | None = None  # until the launcher had decided to restart the job

    def take(self, record: Record) -> None:
        """Take a record; it counts when no older one can arrive any more."""
        self._account.add(record)

    def settle(self, now_s: float) -> list[RecoverySpan]:
        """Return the recoveries that have become known; ``now_s`` is the time since the launcher started."""
        spans: list[RecoverySpan] = []
        for record in self._account.settle(now_s - SETTLED_S):
            spans += self._new_spans()
            if isinstance(record, JobRestarted) and spans:
                self._interrupted = spans.pop()
            self._note(record)
        return spans

    def close(self, end_s: float) -> list[RecoverySpan]:
        """Return the last recoveries: the run has ended."""
        spans = self.settle(float("inf"))
        self._account.close(end_s)
        spans += self._new_spans()
        return spans if self._interrupted is None else [*spans, self._interrupted]

    def _new_spans(self) -> list[RecoverySpan]:
        spans = [_span(parts, end_s, self._attributes) for end_s, parts in self._account.new_recoveries()]
        if not spans:
            return spans
        self._attributes = {}
        if self._interrupted is not None:
            spans[0], self._interrupted = _joined(self._interrupted, spans[0]), None
        return spans

    def _note(self, record: Record) -> None:
        """Remember what the next span has to say."""
        attributes = self._attributes
        match record:
            case FaultFired():
                attributes["holdfast.injected"] = record.kind
            case FailureSeen():
                attributes |= {"holdfast.step": record.step, "holdfast.detected_in": record.phase}
            case Recovered():
                attributes |= {
                    "holdfast.step": record.step,
                    "holdfast.decision": record.decision,
                    "holdfast.lost": record.lost,
                    "holdfast.joined": record.joined,
                    "holdfast.workers": len(record.survivors),
                    "holdfast.steps_redone": record.redone_steps,
                }
            case WorkerEnded() if record.exit_code:
                attributes["holdfast.exit_code"] = record.exit_code
            case JobRestarted():
                attributes |= {
                    "holdfast.decision": "restart",
                    "holdfast.restart": record.restart,
                    "holdfast.reason": record.reason,
                }
            case RunStarted():
                self._attributes = {}


def _span(parts_s: Mapping[str, float], end_s: float, attributes: Attributes) -> RecoverySpan:
    """Return the span of a recovery; its parts follow each other in the order of :data:`RECOVERY_PARTS`."""
    lasted = {name: parts_s[name] for name in RECOVERY_PARTS if name != "step_redone" and parts_s[name] > 0}
    begin_s = at_s = end_s - sum(lasted.values())
    parts = []
    for name, seconds in lasted.items():
        parts.append(Part(name=name, begin_s=at_s, end_s=at_s + seconds))
        at_s += seconds
    return RecoverySpan(
        begin_s=begin_s, end_s=end_s, parts=tuple(parts), redone_s=parts_s["step_redone"], attributes=dict(attributes)
    )


def _joined(before: RecoverySpan, after: RecoverySpan) -> RecoverySpan:
    """Return the span of a recovery in which the launcher restarted the job: until it did, and since then."""
    return RecoverySpan(
        begin_s=before.begin_s,
        end_s=after.end_s,
        parts=before.parts + after.parts,
        redone_s=before.redone_s + after.redone_s,
        attributes={**before.attributes, **after.attributes},
    )
