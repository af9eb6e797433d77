"""Making planned faults happen, at the exact step and phase."""

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

from holdfast.errors import ConfigError
from holdfast.faults.flip import TARGETS
from holdfast.faults.plan import Fault, FaultPlan

if TYPE_CHECKING:  # who only strikes processes does not need it
    import torch

_FOR_EVER_S = 1e6
_ANSWER_S = 60.0
"""A launcher that has not struck its node by then will not."""
_POLL_S = 0.005

Due = tuple[int, Fault]
"""A fault that is due, and its number in the plan."""


class Injector:
    """Is told where each worker is, and strikes where the plan says so; this one never does."""

    def reach(self, phase: str, step: int, rank: int, bucket: int | None = None) -> None:
        """Strike if the plan says so, because ``rank`` is at ``phase`` of ``step``.

        Args:
            phase: Where.
            step: The step in progress.
            rank: Who.
            bucket: In a sum: the bucket summed before it. In ``handover``: the slice that comes next.
        """

    def waits_for(self, phase: str, step: int, rank: int) -> bool:
        """Return whether a fault is due there, so that costly preparations are made only then."""
        return False

    def flips(self, target: str, step: int, rank: int, bucket: int | None = None) -> Sequence[Due]:
        """Return the flips of a target that are due there; see :data:`~holdfast.faults.flip.TARGETS`.

        Args:
            target: What would be altered.
            step: The step in progress.
            rank: Whose it is.
            bucket: Of a message: the bucket that is summed.
        """
        return ()

    def carry_out(self, due: Due, named: Mapping[str, torch.Tensor]) -> None:
        """Let a flip strike, unless it has: alter tensors where they lie.

        Raises:
            ConfigError: if it names none of them, or cannot be done to them.
        """


class NoFaults(Injector):
    """Never strikes."""


Tell = Callable[[int, Fault, Sequence[Mapping[str, Any]], int], None]
"""Is told what a flip did: its number, it, what became of some values, how many were altered."""


class PlannedFaults(Injector):
    """Strikes as planned, each fault once.

    Args:
        plan: What is due when.
        strike: Makes a fault happen to the worker that it names: for real (:func:`strike`), or in the virtual world.
        announce: Called just before a fault strikes, with its number in the plan.
        tell: Called after a flip.
    """

    def __init__(
        self,
        plan: FaultPlan,
        strike: Callable[[Fault], None],
        announce: Callable[[int, Fault], None],
        tell: Tell = lambda *told: None,
    ) -> None:
        self._plan = plan
        self._strike = strike
        self._announce = announce
        self._tell = tell

    def reach(self, phase: str, step: int, rank: int, bucket: int | None = None) -> None:
        """Strike if the plan says so."""
        due = self._plan.due(rank, step, phase, bucket)
        if due is None:
            return
        number, fault = due
        self._plan = self._plan.without([number])
        self._announce(number, fault)
        self._strike(fault)

    def waits_for(self, phase: str, step: int, rank: int) -> bool:
        """Return whether a fault is due there."""
        return self._plan.due(rank, step, phase) is not None

    def flips(self, target: str, step: int, rank: int, bucket: int | None = None) -> Sequence[Due]:
        """Return the flips that are due there."""
        found, plan = [], self._plan
        while (due := plan.due(rank, step, TARGETS[target], bucket, target)) is not None:
            found.append(due)
            plan = plan.without([due[0]])
        return found

    def carry_out(self, due: Due, named: Mapping[str, torch.Tensor]) -> None:
        """Let a flip strike."""
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
    """Have the launcher strike this node in a step, by the file ``request``, and wait until it has removed that."""
    draft = request.with_suffix(".draft")
    draft.write_text(str(step))
    draft.replace(request)
    ends_s = time.monotonic() + _ANSWER_S
    while request.exists() and time.monotonic() < ends_s:
        time.sleep(_POLL_S)


def strike(fault: Fault) -> None:
    """Make a fault happen to this process; see :class:`~holdfast.faults.plan.Fault`. Nodes are struck by their launchers."""
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
        case "leave":
            os.kill(os.getpid(), signal.SIGTERM)


def _hang(seconds: float | None) -> None:
    """Stop this process; somebody else must wake it."""
    if seconds is not None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _keep_lock(seconds: float) -> None:
    """Keep Python's lock: a function of ``PyDLL`` is called without letting go of it."""
    nap = ctypes.PyDLL(None).usleep
    nap.argtypes = [ctypes.c_uint]
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_FOR_EVER_S)  # between two calls, too
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        nap(min(int(1e6 * seconds), 900_000))
    sys.setswitchinterval(switch_s)
