"""What happens to a training by batched workers, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.faults.plan import Fault, FaultPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Workers leave, or come, as planned: between two steps, so nothing is lost.

    Args:
        step: Before which, ``>= 1``.
        leave: Who leaves.
        join: Who comes: numbers that nobody had before.
    """

    step: int
    leave: tuple[int, ...] = ()
    join: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of a meeting.

    Args:
        step: The step in progress when it began.
        what: ``"redo"`` the step, ``"continue"`` it over the survivors, ``"load"`` a checkpoint, ``"stop"``; ``"grow"`` if
            newcomers were let in, ``"leave"`` if some only left.
        redone_steps: Whose work is done again, the one in progress included.
    """

    step: int
    what: str
    redone_steps: int


def faults_by_step(
    settings: Settings, members: Sequence[int], num_buckets: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Return by step the faults: number, position of the sum that does not complete, and who dies.

    Raises:
        ConfigError: if one cannot strike here.
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
    """Return in which step and before which sum somebody is missed."""
    if fault.kind == "kill" and fault.phase in ("forward", "backward"):
        return fault.step, 0
    if fault.kind == "kill" and fault.phase == "allreduce":
        return fault.step, 0 if fault.bucket is None else fault.bucket + 1
    if fault.kind == "kill" and fault.phase == "optimizer":
        return fault.step + 1, 0
    raise ConfigError(
        f"{fault.to_spec()}: with all slices at once there are only kills in forward, backward, allreduce and optimizer"
    )
