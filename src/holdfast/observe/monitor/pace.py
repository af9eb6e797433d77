"""Progress and pace of a run: steps, samples, the curves of its metrics, the time that is left."""

from __future__ import annotations

from typing import Any

from holdfast.observe.monitor.series import Series
from holdfast.records.types import FailureSeen, JobRestarted, Record, Recovered, RunStarted, SamplesLost, StepCommitted
from holdfast.summary.step_times import StepTimes

RATE = "rate"
"""Name of the curve of steps per second."""
_RATE_S = 1.0
"""The curve of the pace has a point this often."""
_MOST_CURVES = 16


class RunPace:
    """Counts steps and samples, and keeps the curves."""

    def __init__(self) -> None:
        self.step = 0
        """Committed steps, as far as no rollback discarded them."""
        self.planned = 0
        self._highest = -1
        self._resumes = False  # the job was restarted, and it is not known yet where it resumes
        self._samples = 0
        self._samples_lost: set[tuple[int, int]] = set()
        self._times = StepTimes()
        self._last: tuple[float, int] | None = None  # when the newest step was committed, and the steps since the start
        self._marked: tuple[float, int] | None = None  # the last point of the curve of the pace
        self._series: dict[str, Series] = {}

    def begin(self, record: RunStarted) -> None:
        """Take the start of the run."""
        self.planned = record.steps_planned
        self.step = max(self.step, record.step, 0)
        self._marked = self._last = (record.t_s, self.step)

    def commit(self, record: StepCommitted) -> bool:
        """Take a committed step; return whether it is new: a new lead repeats the last one."""
        if self._last is not None and (record.t_s, record.step + 1) <= self._last:
            return False
        if record.step + 1 == self.step:
            return False
        if record.step > self._highest:
            self._highest = record.step
            self._samples += record.samples
        self.step, self._resumes = record.step + 1, False
        self._last = (record.t_s, self.step)
        self._times.add(record.step, record.t_s)
        for name, value in record.metrics.items():
            self._curve(f"{name} (metric)" if name == RATE else name).add(record.step, record.t_s, value)
        self._mark(record)
        return True

    def _curve(self, name: str) -> Series:
        if name not in self._series and len(self._series) >= _MOST_CURVES:
            return Series()  # dropped
        return self._series.setdefault(name, Series())

    def _mark(self, record: StepCommitted) -> None:
        """Add a point to the curve of the pace, if it is time to."""
        if self._marked is None or self._marked[1] > self.step:
            self._marked = (record.t_s, self.step)
            return
        since_s, since = self._marked
        if record.t_s - since_s >= _RATE_S:
            self._curve(RATE).add(record.step, record.t_s, (self.step - since) / (record.t_s - since_s))
            self._marked = (record.t_s, self.step)

    def interrupt(self, record: JobRestarted | Recovered | FailureSeen) -> None:
        """Take an interruption, which is no part of the pace."""
        if isinstance(record, Recovered) and 0 <= record.step < self.step and record.redone_steps > 1:
            self.step = record.step
        self._resumes |= isinstance(record, JobRestarted)
        if isinstance(record, JobRestarted):
            self._times.begin()
        if isinstance(record, JobRestarted) or (self._last is not None and self._last[1] > self.step):
            self._last = None

    def note(self, record: Record) -> None:
        """Take another record."""
        if isinstance(record, SamplesLost):
            self._samples_lost |= {(record.epoch, number) for number in record.ids}
        elif isinstance(record, RunStarted) and self._resumes:
            self.step, self._resumes = max(0, record.step), False

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second, None if it is not known."""
        return self._times.steps_per_s

    def progress(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        rate, left_s = self.steps_per_s, self._times.left_s(self.planned - self.step)
        return {
            "step": self.step,
            "planned": self.planned,
            "steps_per_s": None if rate is None else round(rate, 3),
            "eta_s": round(left_s, 1) if left_s is not None and self.planned else None,
            "samples": self._samples,
            "samples_lost": len(self._samples_lost),
        }

    def series_rows(self) -> list[dict[str, Any]]:
        """Return all curves."""
        return [{"id": name, "points": series.points()} for name, series in self._series.items()]
