"""What a job that has not trained yet waits for, in words. Pure: no clock, process or file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from holdfast.launch.health.starting import StartupStatus

CONNECTING = "connect"
"""Phase of a worker that waits to be connected to the others."""


def what_workers_wait_for(signs: Mapping[int, StartupStatus], *, script: str, connecting: str, node: str = "") -> str:
    """Return which workers a job waits for, and what these do: ``"waiting for 2 of 4 workers: importing torch"``.

    Args:
        signs: What is observed of each worker that runs; "" is returned for none.
        script: Name of the script.
        connecting: What workers do while they are connected: ``"MPI_Init"``, for instance.
        node: Words after the number of workers, such as ``" of this node"``.
    """
    for is_behind in (_is_late, _is_connecting, lambda sign: True):
        if behind := {rank: sign for rank, sign in signs.items() if is_behind(sign)}:
            return _sentence(behind, len(signs), lambda sign: _phase(sign, script, connecting), node)
    return ""


def _is_late(sign: StartupStatus) -> bool:
    return sign.is_late or sign.is_stopped


def _is_connecting(sign: StartupStatus) -> bool:
    return sign.phase == CONNECTING


def _sentence(
    behind: Mapping[int, StartupStatus], total: int, phase_of: Callable[[StartupStatus], str], node: str
) -> str:
    phases = Counter(phase_of(behind[rank]) for rank in sorted(behind))
    which = "the worker" if total == 1 else f"{len(behind)} of {total} workers{node}"
    if len(phases) == 1:
        return f"waiting for {which}: {next(iter(phases))}"
    return f"waiting for {which}: {', '.join(f'{phase} ({count})' for phase, count in phases.most_common())}"


def _phase(sign: StartupStatus, script: str, connecting: str) -> str:
    """Return what a worker does before its first step, in a few words."""
    if sign.is_stopped:
        return "stopped by a signal"
    if sign.doing:
        return sign.doing
    match sign.phase:
        case "":
            return "starting"
        case "launch":
            return f"running {script}"
        case "connect":
            return connecting
        case "start":
            return "preparing the first step"
        case "checkpoint":
            return "saving a checkpoint"
        case "gate" | "exit":
            return "ending"
        case _:
            return "the first step"
