"""Planned changes and faults of a training by virtual workers, and its recovery decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.faults.plan import Fault, FaultPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """A planned change of the workers between two steps, in which nothing is lost.

    Args:
        step: The step before which it happens, ``>= 1``.
        leave: Ranks that leave.
        join: Ranks that join; they must be new.
    """

    step: int
    leave: tuple[int, ...] = ()
    join: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MembershipDecision:
    """The result of regrouping.

    Args:
        step: The step in progress at its begin.
        what: ``"redo"`` the step, ``"continue"`` it over the survivors, ``"load"`` a checkpoint, ``"stop"``; ``"grow"``
            if newcomers were admitted, ``"leave"`` if workers only left.
        redone_steps: Steps whose work is redone, including the one in progress.
    """

    step: int
    what: str
    redone_steps: int


def faults_by_step(
    settings: Settings, members: Sequence[int], num_buckets: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Return the faults by step: number of the fault, position of the failing all-reduce, and the rank that fails.

    Raises:
        ConfigError: if a fault is not supported here.
    """
    if not settings.faults:
        return {}
    plan = FaultPlan.from_json(settings.faults)
    plan.check(members, num_buckets)
    found: dict[int, list[tuple[int, int, int]]] = {}
    for number, fault in enumerate(plan.faults):
        step, position = _place(fault)
        found.setdefault(step, []).append((number, position, fault.rank))
    return found


def _place(fault: Fault) -> tuple[int, int]:
    """Return the step and the all-reduce in which the failed worker is missed."""
    if fault.kind == "kill" and fault.phase in ("forward", "backward"):
        return fault.step, 0
    if fault.kind == "kill" and fault.phase == "allreduce":
        return fault.step, 0 if fault.bucket is None else fault.bucket + 1
    if fault.kind == "kill" and fault.phase == "optimizer":
        return fault.step + 1, 0
    raise ConfigError(
        f"{fault.to_spec()}: with all slices computed together, only kills in forward, backward, allreduce and "
        "optimizer are possible"
    )
