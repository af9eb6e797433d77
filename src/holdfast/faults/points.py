"""Named crash points: points at which a process may be killed on purpose, to prove that this is harmless.

A point costs one check of a module variable. A fault plan arms it through :func:`arm`; a test that
starts its own process may name one in ``HOLDFAST_CRASH_AT``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = ("checkpoint.begin", "checkpoint.tensors", "checkpoint.manifest", "checkpoint.rename", "checkpoint.committed")
"""Every point, in the order in which a run passes them; a test iterates over this tuple."""


def _from_environment() -> Callable[[str], None] | None:
    wanted = os.environ.get("HOLDFAST_CRASH_AT")

    def kill_at(name: str) -> None:
        if name == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    return None if wanted is None else kill_at


_armed: Callable[[str], None] | None = _from_environment()


def arm(hook: Callable[[str], None] | None) -> None:
    """Call ``hook(name)`` at every point from now on; ``None`` disarms all points."""
    global _armed
    _armed = hook


def reach(name: str) -> None:
    """Declare that the process is at the point ``name``."""
    if _armed is not None:
        _armed(name)
