"""Making planned faults happen, at the exact step and phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.faults.plan import Fault, FaultPlan


class Injector(Protocol):
    """Is told where each worker is, and strikes where the plan says so."""

    def reach(self, phase: str, step: int, rank: int, bucket: int | None = None) -> None:
        """Say that ``rank`` is at ``phase`` of ``step``; in a sum, ``bucket`` is the bucket summed before it."""
        ...

    def waits_for(self, phase: str, step: int, rank: int) -> bool:
        """Return whether a fault is due there, so that costly preparations are made only then."""
        ...


class NoFaults:
    """Never strikes."""

    def reach(self, phase: str, step: int, rank: int, bucket: int | None = None) -> None:
        """Do nothing."""

    def waits_for(self, phase: str, step: int, rank: int) -> bool:
        """Return False."""
        return False


class PlannedFaults:
    """Strikes as planned, each fault once.

    Args:
        plan: What is due when.
        kill: Ends a worker that is in a phase: for real, or in the virtual world.
        announce: Called just before a fault strikes, with its number in the plan.
    """

    def __init__(
        self, plan: FaultPlan, kill: Callable[[int, str], None], announce: Callable[[int, Fault], None]
    ) -> None:
        self._plan = plan
        self._kill = kill
        self._announce = announce

    def reach(self, phase: str, step: int, rank: int, bucket: int | None = None) -> None:
        """Kill ``rank`` if the plan says so."""
        due = self._plan.due(rank, step, phase, bucket)
        if due is None:
            return
        number, fault = due
        self._plan = self._plan.without([number])
        self._announce(number, fault)
        self._kill(rank, phase)

    def waits_for(self, phase: str, step: int, rank: int) -> bool:
        """Return whether a fault is due there."""
        return self._plan.due(rank, step, phase) is not None
