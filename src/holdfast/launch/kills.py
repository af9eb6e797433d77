"""Killing random workers, to see that training goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from holdfast.faults.plan import mtbf_schedule
from holdfast.launch.attempt import Attempt
from holdfast.launch.record_bus import News
from holdfast.launch.run import Run
from holdfast.records.beacon import UNCONNECTED
from holdfast.records.types import FaultFired


class Kills:
    """When to kill whom, counted from ``begin_s``."""

    def __init__(self, schedule: Iterator[tuple[float, int]], begin_s: float) -> None:
        self._schedule = schedule
        self._begin_s = begin_s
        self._next = next(schedule, None)

    def due(self, now_s: float) -> int | None:
        """Return whose time has come, None if nobody's has; each victim is named once."""
        if self._next is None or now_s - self._begin_s < self._next[0]:
            return None
        _, victim = self._next
        self._next = next(self._schedule, None)
        return victim


class Killer:
    """Kills random workers from the first committed step on, if the job asks for it; numbered after the planned faults."""

    def __init__(self, run: Run, news: News, planned: int) -> None:
        self._run = run
        self._news = news
        self._planned = planned
        self._kills: Kills | None = None

    def kill(self, attempt: Attempt) -> bool:
        """Kill the worker whose time has come; return whether there was one."""
        run, now_s = self._run, self._run.clock.now_s()
        if self._kills is None and run.job.mtbf_s and self._news.has_committed:
            schedule = mtbf_schedule(run.job.mtbf_s, run.job.settings.seed, range(run.job.workers))
            self._kills = Kills(schedule, now_s)
        victim = None if self._kills is None else self._kills.due(now_s)
        if victim is None or victim not in run.judge.living():
            return False
        position = attempt.position(victim)
        pair = attempt.pair(victim)
        if position is None or position.phase in UNCONNECTED or pair is None or not pair.worker.is_alive():
            return False
        number = self._planned + sum(fault >= self._planned for fault in run.judge.fired)
        step, phase = position.step, position.phase
        self._news.note(FaultFired(t_s=now_s, rank=victim, step=step, fault=number, kind="kill", phase=phase))
        pair.worker.send(signal.SIGKILL)
        return True
