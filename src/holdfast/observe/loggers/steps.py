"""Committed steps in order, each once, from records that arrive in any order and more than once.

A step is recorded more than once if a new lead repeats the last one, or if a rollback, or a restart from a checkpoint,
made workers compute it again. The first record stands. Records of two leads may arrive in the wrong order, because each
worker, and each node, has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from holdfast.records.types import HistogramLogged

MOST_WAITING = 10_000
"""Steps that are kept while they cannot be logged; later ones have to be read from the record files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedImage:
    """An image of a step: a PNG file, with its width, its height and its number of channels."""

    path: Path
    width: int
    height: int
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What a logger writes of one step.

    Args:
        step: Its number.
        time_s: When it was committed, as Unix time.
        metrics: What the script logged, by name.
        images: Images, by name.
        histograms: Histograms, by name.
        is_final: Whether the metrics are those that the script logged after training.
    """

    step: int
    time_s: float
    metrics: Mapping[str, float]
    images: Mapping[str, LoggedImage] = field(default_factory=dict)
    histograms: Mapping[str, HistogramLogged] = field(default_factory=dict)
    is_final: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything in it."""
        return (*self.metrics, *self.images, *self.histograms)

    def without(self, logged: Mapping[str, int]) -> Self:
        """Return the step without what a log has of it: by name the last step, "" for all names."""
        last = logged.get("", -1)
        names_in_log = {name for name in self.names if max(last, logged.get(name, -1)) >= self.step}
        if not names_in_log:
            return self
        metrics = {name: value for name, value in self.metrics.items() if name not in names_in_log}
        images = {name: image for name, image in self.images.items() if name not in names_in_log}
        histograms = {name: each for name, each in self.histograms.items() if name not in names_in_log}
        return replace(self, metrics=metrics, images=images, histograms=histograms)


class StepOrder:
    """Takes committed steps, and returns each once, in ascending order."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._waiting: dict[int, LoggedStep] = {}
        self.has_left_out = False
        """Whether steps were left out because too many were waiting, since the last :meth:`add_all`."""

    @property
    def has_begun(self) -> bool:
        """Whether the first step is known."""
        return self._next is not None

    @property
    def num_waiting(self) -> int:
        """Number of steps that were not returned yet."""
        return len(self._waiting)

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that were not returned yet."""
        return list(self._waiting)

    @property
    def missing(self) -> range:
        """The steps that have not arrived, although a later one has."""
        if self._next is None or not self._waiting or self._next in self._waiting:
            return range(0)
        return range(self._next, min(self._waiting))

    def begin(self, step: int) -> None:
        """Make ``step`` the first one."""
        self._next = step
        self._waiting = {number: each for number, each in self._waiting.items() if number >= step}

    def add(self, step: LoggedStep) -> None:
        """Take a step, unless it is known already, or too many are waiting."""
        if self._next is not None and step.step < self._next:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.has_left_out = True
            return
        self._waiting.setdefault(step.step, step)

    def add_all(self, steps: Iterable[LoggedStep], *, are_first: bool = False) -> None:
        """Take steps that were read from record files, however many are waiting.

        Args:
            steps: The steps. Of each number the first one stands.
            are_first: They were committed before all that are known.
        """
        by_number: dict[int, LoggedStep] = {}
        for step in steps:
            if self._next is None or step.step >= self._next:
                by_number.setdefault(step.step, step)
        self._waiting = self._waiting | by_number if are_first else by_number | self._waiting
        self.has_left_out = False

    @property
    def has_next(self) -> bool:
        """Whether the next step has arrived."""
        return self._next is not None and self._next in self._waiting

    def take(self, most: int) -> list[LoggedStep]:
        """Return the next steps, up to the first one that is missing, and at most so many."""
        steps: list[LoggedStep] = []
        while self._next is not None and self._next in self._waiting and len(steps) < most:
            steps.append(self._waiting.pop(self._next))
            self._next += 1
        return steps

    def skip_missing(self) -> None:
        """Give up the :attr:`missing` steps."""
        if missing := self.missing:
            self._next = missing.stop
