"""How far a run is, how fast, and how long the rest takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean, median

from holdfast.records.types import JobRestarted, Record, Recovered, RunStarted, StepCommitted

_WINDOW = 50
"""Newest steps that count for the pace."""
_LONGEST = 10.0
"""A step counts at most this multiple of the median step: a recovery is in one step, and says nothing about the rest,
but the checkpoints and evaluations in between do."""


class RunProgress:
    """Takes the records of a run as they arrive; a step that several workers record, or that is committed again, counts once."""

    def __init__(self) -> None:
        self.first: RunStarted | None = None
        """The first start of a worker."""
        self.start: RunStarted | None = None
        """The last one."""
        self.step = 0
        """Committed steps, as far as no rollback discarded them."""
        self.commit: StepCommitted | None = None
        """The newest committed step."""
        self.num_steps = self.num_samples = 0
        """Committed steps, and their samples."""
        self.restarts = 0
        """Restarts of the whole job."""
        self.recoveries: set[tuple[int, int]] = set()
        """Recoveries from lost workers, each by the restart before it and its generation."""
        self.highest = -1
        """The highest step that was committed."""
        self.is_training = False
        """Whether a step was committed in this start of the job."""
        self._resumes = False  # the job was restarted, and it is not known yet where it resumes
        self._last: tuple[float, int] | None = None  # when the newest step was committed, and its number
        self._took_s: deque[float] = deque(maxlen=_WINDOW)

    def apply(self, record: Record) -> bool:
        """Take a record; return whether it commits a step that was not known."""
        match record:
            case StepCommitted():
                return self._commit(record)
            case RunStarted():
                if self.first is None:
                    self.first, self.step = record, max(self.step, record.step)
                elif self._resumes:
                    self.step, self._resumes = max(0, record.step), False
                self.start = record
            case JobRestarted() if record.restart > self.restarts:
                self.restarts = record.restart
                self.is_training, self._resumes, self._last = False, True, None
            case Recovered():
                if record.lost:
                    self.recoveries.add((self.restarts, record.generation))
                if 0 <= record.step < self.step and record.redone_steps > 1:
                    self.step = record.step
        return False

    def _commit(self, record: StepCommitted) -> bool:
        self.is_training = True
        if self.commit is None or record.t_s > self.commit.t_s:
            self.commit = record
        last = self._last
        if record.step + 1 == self.step or (last is not None and (record.t_s, record.step) <= last):
            return False
        if record.step > self.highest:
            self.highest, self.num_steps = record.step, self.num_steps + 1
            self.num_samples += record.samples
        self.step, self._resumes = record.step + 1, False
        if last is not None and record.step > last[1]:
            self._took_s.append((record.t_s - last[0]) / (record.step - last[1]))
        if last is None or record.step != last[1]:  # the same step again: what it took to recover counts, too
            self._last = (record.t_s, record.step)
        return True

    @property
    def planned(self) -> int:
        """Steps of the plan; 0 if that is not known."""
        return 0 if self.start is None else self.start.steps_planned

    @property
    def workers(self) -> int:
        """Workers that took part in the newest step, or that began since."""
        start, commit = self.start, self.commit
        if commit is not None and (start is None or commit.t_s >= start.t_s):
            return commit.workers
        return 0 if start is None else start.workers

    @property
    def is_distributed(self) -> bool:
        """Whether the script uses ``torch.distributed``, as far as is known."""
        return self.start is not None and self.start.is_distributed

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the script logged in the newest step."""
        return {} if self.commit is None else self.commit.metrics

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

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step of the plan; None if that is not known."""
        step_s = self.step_s
        return None if step_s is None or not self.planned else max(0, self.planned - self.step) * step_s
