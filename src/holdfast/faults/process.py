"""Carries out planned faults, at the exact step and phase."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.base.temporary import write_private
from holdfast.errors import ConfigError
from holdfast.faults.flip import TARGETS
from holdfast.faults.plan import Fault, FaultPlan

if TYPE_CHECKING:  # not needed to strike processes
    import torch

_FOR_EVER_S = 1e6
_ANSWER_S = 60.0
"""How long to wait for a launcher to strike its node, in seconds."""
_POLL_S = 0.005

Due = tuple[int, Fault]
"""A fault that is due, after its number in the plan."""


Tell = Callable[[int, Fault, Sequence[Mapping[str, Any]], int], None]
"""Receives the result of a flip: its number, the fault, some of the altered values, and how many were altered."""


class Injector:
    """Receives the phases of each worker, and strikes when the plan says so, by each fault once; without a plan never.

    Args:
        plan: Which fault is due when.
        strike: Makes a fault happen to its worker: for real (:func:`strike`), or in the virtual world.
        announce: Called just before a fault strikes, with its number in the plan.
        tell: Called after a flip.
    """

    def __init__(
        self,
        plan: FaultPlan | None = None,
        strike: Callable[[Fault], None] = lambda fault: None,
        announce: Callable[[int, Fault], None] = lambda number, fault: None,
        tell: Tell = lambda *told: None,
    ) -> None:
        self._plan = plan or FaultPlan()
        self._strike = strike
        self._announce = announce
        self._tell = tell

    def reach(self, phase: str, step: int, rank: int, bucket: int | None = None) -> None:
        """Strike if a fault is due for ``rank`` at ``phase`` of ``step``.

        Args:
            phase: The phase of the step.
            step: The step in progress.
            rank: The worker in that phase.
            bucket: In an all-reduce: the bucket reduced before it. In ``handover``: the next slice.
        """
        due = self._plan.due(rank, step, phase, bucket)
        if due is None:
            return
        number, fault = due
        self._plan = self._plan.without([number])
        self._announce(number, fault)
        self._strike(fault)

    def waits_for(self, phase: str, step: int, rank: int) -> bool:
        """Return whether a fault is due there, so that expensive preparations are made only then."""
        return self._plan.due(rank, step, phase) is not None

    def flips(self, target: str, step: int, rank: int, bucket: int | None = None) -> Sequence[Due]:
        """Return the flips of a target that are due there; see :data:`~holdfast.faults.flip.TARGETS`.

        Args:
            target: The target that can be altered here.
            step: The step in progress.
            rank: The worker that owns it.
            bucket: Of a message: the bucket that is reduced.
        """
        flips, plan = [], self._plan
        while (due := plan.due(rank, step, TARGETS[target], bucket, target)) is not None:
            flips.append(due)
            plan = plan.without([due[0]])
        return flips

    def alters(self, target: str) -> bool:
        """Return whether the plan alters a target in any step, on any worker, even if it has; the same on every worker."""
        return any(fault.flip is not None and fault.flip.target == target for fault in self._plan.faults)

    def carry_out(self, due: Due, named: Mapping[str, torch.Tensor]) -> None:
        """Carry a flip out, unless it already was: alter tensors in place.

        Raises:
            ConfigError: if it names none of the tensors, or cannot be applied to them.
        """
        from holdfast.faults.tensors import alter

        number, fault = due
        if number in self._plan.fired or fault.flip is None:
            return
        self._plan = self._plan.without([number])
        self._announce(number, fault)
        try:
            listed, count = alter(named, fault.flip)
        except ConfigError as error:
            raise ConfigError(f"--inject {fault.to_spec()}: {error}") from error
        self._tell(number, fault, listed, count)


def ask_launcher(request: Path, step: int) -> None:
    """Ask the launcher by the file ``request`` to strike this node, and wait until it has removed the file."""
    write_private(request, str(step))
    ends_s = time.monotonic() + _ANSWER_S
    while request.exists() and time.monotonic() < ends_s:
        time.sleep(_POLL_S)


def strike(fault: Fault) -> None:
    """Apply a fault to this process; see :class:`~holdfast.faults.plan.Fault`. Nodes are struck by their launchers."""
    sys.stdout.flush()
    sys.stderr.flush()
    limit_s = fault.seconds or _FOR_EVER_S
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "oom":
            subprocess.run(["kill", "-KILL", str(os.getpid())], check=False)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            _hang(fault.seconds)
        case "gil":
            _keep_lock(limit_s)
        case "spin":
            ends_s = time.monotonic() + limit_s
            while time.monotonic() < ends_s:
                pass
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=limit_s)
        case "slow":
            time.sleep(limit_s)
        case "gpu-error" | "gpu-oom" | "gpu-hang":
            from holdfast.faults.devices import strike_device

            strike_device(fault.kind, limit_s)
        case "leave":
            os.kill(os.getpid(), signal.SIGTERM)


def _hang(seconds: float | None) -> None:
    """Stop this process; another process must wake it."""
    if seconds is not None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _keep_lock(seconds: float) -> None:
    """Hold the GIL: a function of ``PyDLL`` is called without releasing it."""
    nap = ctypes.PyDLL(None).usleep
    nap.argtypes = [ctypes.c_uint]
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_FOR_EVER_S)  # between two calls, too
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        nap(min(int(1e6 * seconds), 900_000))
    sys.setswitchinterval(switch_s)
