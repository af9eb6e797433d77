"""Processor time and memory of processes, as ``/proc`` gives them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.supervise.processes import Process

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process uses.

    Args:
        cpu: Processors that it keeps busy: 1.0 is one of them, all the time.
        memory_bytes: Its memory in RAM, shared pages included.
    """

    cpu: float
    memory_bytes: int


class UsageMeter:
    """Measures processes again and again; the processor time of the first measurement is the average since the start."""

    def __init__(self) -> None:
        self._before: dict[Process, tuple[float, float]] = {}

    def measure(self, process: Process) -> ProcessUsage | None:
        """Return what a process has used since the last call; None if it has ended."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # as the start time in /proc
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return None
        fields = stat[stat.rindex(")") + 2 :].split()
        if int(fields[19]) != process.started:
            return None
        used_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        before_s, used_before_s = self._before.get(process, (process.started / _TICKS_PER_S, 0.0))
        self._before[process] = now_s, used_s
        passed_s = now_s - before_s
        return ProcessUsage(max(0.0, (used_s - used_before_s) / passed_s) if passed_s > 0 else 0.0, pages * _PAGE_BYTES)
