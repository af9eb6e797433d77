"""How fast a run trains, and how long the rest takes, from its newest steps."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

_WINDOW = 50
"""Newest steps that count."""
_LONGEST = 10.0
"""A step counts at most this multiple of the median step: a recovery is in one step, and says nothing about the rest,
but the checkpoints and evaluations in between do."""


class StepTimes:
    """Step duration of a run. Pure: times come from the records."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=_WINDOW)
        self._last: tuple[int, float] | None = None

    def begin(self) -> None:
        """Note that the job starts, or starts again: the time until its next step is no step."""
        self._last = None

    def add(self, step: int, t_s: float) -> None:
        """Note that ``step`` was committed at ``t_s``; the same step again, of another worker, changes nothing."""
        if self._last is not None:
            last, last_s = self._last
            if step == last:
                return
            if step > last and t_s >= last_s:
                self._took_s.append((t_s - last_s) / (step - last))
        self._last = step, t_s

    @property
    def step_s(self) -> float | None:
        """Seconds that a step takes, on average; None before two steps are known."""
        if not self._took_s:
            return None
        most_s = _LONGEST * median(self._took_s)
        return fmean(min(took_s, most_s) for took_s in self._took_s)

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second; None before two steps are known."""
        return 1 / step_s if (step_s := self.step_s) else None

    def left_s(self, steps: int) -> float | None:
        """Return the seconds that so many more steps take; None if that is not known."""
        return None if (step_s := self.step_s) is None else max(0, steps) * step_s
