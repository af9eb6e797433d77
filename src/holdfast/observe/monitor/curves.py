"""The curves of a run: the metrics that its script logs, and its pace."""

from __future__ import annotations

from typing import Any

from holdfast.observe.monitor.series import Series
from holdfast.records.types import RunStarted, StepCommitted

RATE = "rate"
"""Name of the curve of steps per second."""
_RATE_S = 1.0
"""The curve of the pace has a point this often."""
_MOST_CURVES = 16


class Curves:
    """The curves over committed steps, each step once."""

    def __init__(self) -> None:
        self._marked: tuple[float, int] | None = None  # time and step of the last point of the curve of the pace
        self._series: dict[str, Series] = {}

    def begin(self, record: RunStarted) -> None:
        """Take the start of the run."""
        self._marked = (record.t_s, max(0, record.step))

    def add(self, record: StepCommitted) -> None:
        """Add a committed step."""
        for name, value in record.metrics.items():
            self._curve(f"{name} (metric)" if name == RATE else name).add(record.step, record.t_s, value)
        step = record.step + 1
        if self._marked is None or self._marked[1] > step:
            self._marked = (record.t_s, step)
        elif record.t_s - self._marked[0] >= _RATE_S:
            since_s, since = self._marked
            self._curve(RATE).add(record.step, record.t_s, (step - since) / (record.t_s - since_s))
            self._marked = (record.t_s, step)

    def _curve(self, name: str) -> Series:
        if name not in self._series and len(self._series) >= _MOST_CURVES:
            return Series()  # dropped
        return self._series.setdefault(name, Series())

    def as_rows(self) -> list[dict[str, Any]]:
        """Return all curves."""
        return [{"id": name, "points": series.points()} for name, series in self._series.items()]
