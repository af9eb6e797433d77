"""How busy the machine was with other work: from ``/proc/stat``, before a row and during it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.05
"""Above this share of all processors' time used by others, a row says so instead of giving an interval."""
STEAL_SHARE = 0.02
"""The same for time that the host of a virtual machine gave to others."""
BEFORE_S = 2.0
"""How long the machine is watched before a row, in seconds."""
TICKS = os.sysconf("SC_CLK_TCK")
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True)
class Ticks:
    """The processors' time since the machine started, in ticks, all processors together.

    Args:
        used: Spent on processes, on the kernel and on interrupts.
        steal: Wanted by this machine, and given to another one by the host.
        total: All, idle time too.
    """

    used: int
    steal: int
    total: int

    @classmethod
    def read(cls, text: str) -> Ticks:
        """Return what the text of ``/proc/stat`` says.

        Raises:
            ValueError: if its first line is not that of all processors.
        """
        name, *numbers = (text.splitlines() or [""])[0].split()[:9] or [""]
        if name != "cpu" or len(numbers) < len(_FIELDS):
            raise ValueError(f"/proc/stat begins with {text[:40]!r}, expected 'cpu' and at least 8 numbers")
        # The time of guests is contained in `user` and `nice`, so the fields behind `steal` are left out.
        ticks = dict(zip(_FIELDS, map(int, numbers), strict=True))
        used = sum(ticks[name] for name in ("user", "nice", "system", "irq", "softirq"))
        return cls(used, ticks["steal"], sum(ticks.values()))


@dataclass(frozen=True, slots=True)
class Watched:
    """The shares of all processors' time that others had.

    Args:
        before: Used by other processes just before the row.
        during: Used by other processes during the row.
        steal: Given to other machines by the host, the larger of both.
    """

    before: float
    during: float
    steal: float

    def busy(self) -> str:
        """Return what made the machine busy, "" if nothing did."""
        reasons = []
        if self.before > BUSY_SHARE:
            reasons.append(f"{self.before:.0%} used by others before it")
        if self.during > BUSY_SHARE:
            reasons.append(f"{self.during:.0%} used by others during it")
        if self.steal > STEAL_SHARE:
            reasons.append(f"{self.steal:.0%} stolen by the host")
        return ", ".join(reasons)


def judge(before: tuple[Ticks, Ticks], during: tuple[Ticks, Ticks], own_s: float, kernel_s: float = 0.0) -> Watched:
    """Return how busy others were.

    Args:
        before: Around the time before the row.
        during: Around the row.
        own_s: Processor time of the row's own processes, in seconds.
        kernel_s: That of the kernel's threads, which write this row's pages to the disk; it counts as ours.
    """

    def share(ends: tuple[Ticks, Ticks], ours_s: float) -> float:
        total = max(1, ends[1].total - ends[0].total)
        return max(0.0, ends[1].used - ends[0].used - ours_s * TICKS) / total

    steal = max((b.steal - a.steal) / max(1, b.total - a.total) for a, b in (before, during))
    return Watched(share(before, 0.0), share(during, own_s + kernel_s), steal)


def ticks_now() -> Ticks:
    """Return the processors' time until now."""
    return Ticks.read(Path("/proc/stat").read_text())


def watch_before(seconds: float = BEFORE_S) -> tuple[Ticks, Ticks]:
    """Watch the machine for a while in which this process does nothing."""
    first = ticks_now()
    time.sleep(seconds)
    return first, ticks_now()


def kernel_threads_s() -> float:
    """Return the processor time of the kernel's threads so far, in seconds."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if fields[1] == "2":  # children of kthreadd
                total += int(fields[11]) + int(fields[12])
    return total / TICKS
