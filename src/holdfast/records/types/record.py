"""What every record has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NOT_STAMPED: Any = None

STAMPS = ("t_s", "rank", "step")
"""Fields that :class:`holdfast.records.logger.Logger` adds to a record that does not set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of ``events.jsonl``. Created without stamps; a :class:`~holdfast.records.logger.Logger` adds them.

    Args:
        t_s: Seconds since the launcher started the job.
        rank: The rank that wrote it; for :class:`FaultFired` and :class:`WorkerEnded`, its subject; -1: the launcher.
        step: The step in progress, -1 if there is none.
    """

    t_s: float = _NOT_STAMPED
    rank: int = _NOT_STAMPED
    step: int = _NOT_STAMPED

    def missing_stamps(self) -> list[str]:
        """Return which of :data:`STAMPS` the record lacks; empty for a record that was written."""
        return [name for name in STAMPS if getattr(self, name) is _NOT_STAMPED]
