"""The results of a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import NS, check_choice

Numbers = npt.NDArray[np.float64]
Ticks = npt.NDArray[np.int64]

PARTS = ("useful", "lost", "save", "detect", "regroup", "load", "restart", "rejoin", "wait")
"""The parts of the time. Every nanosecond belongs to one of them:

``useful``   work on steps that count in the end, at the pace of the workers that did it
``lost``     work on steps that were discarded, and redone if there was time
``save``     training is held for a checkpoint
``detect``   a worker has failed, and not all survivors know
``regroup``  survivors regroup and decide
``load``     a checkpoint is loaded, or a part is restored
``restart``  processes are started, or applications rebuilt
``rejoin``   training is held for newcomers
``wait``     too few workers are available
"""

MEASURES = ("goodput", "lost_share", "total_s", "ideal_s", "worker_hours", *(f"{part}_s" for part in PARTS))
"""Measures of an outcome: shares (``lost_share`` is a share of all work), seconds, and total hours of members."""
COUNTS = ("steps", "failures", "lost_workers", "joins", "starts", "lost_slices")
"""Counts of an outcome; see :class:`Outcome`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one history.

    Args:
        parts_ns: Duration of each of :data:`PARTS`, whole nanoseconds; their total is ``total_ns``.
        total_ns: Simulated time: until the job was done, or the horizon.
        ideal_ns: How long the samples that contribute to the weights take with all workers, without failures or
            checkpoints.
        finished: Whether the job was done.
        steps: Committed steps that count.
        failures: How often members were lost; simultaneous losses count once.
        lost_workers: Number of members lost.
        joins: How often members were held for newcomers.
        starts: How often the launcher restarted the job.
        lost_slices: Contributions of computing workers that steps committed by ``forward`` lack.
        member_ns: Members, integrated over time; a float, because it may exceed 64 bits.
    """

    parts_ns: Mapping[str, int]
    total_ns: int
    ideal_ns: int
    finished: bool
    steps: int
    failures: int
    lost_workers: int
    joins: int
    starts: int
    lost_slices: int
    member_ns: float

    @property
    def goodput(self) -> float:
        """Undisturbed time of the work with all workers, as a share of the total time: ``ideal / total``."""
        return self.ideal_ns / self.total_ns

    def value(self, name: str) -> float:
        """Return a measure, one of :data:`MEASURES` and :data:`COUNTS`.

        Raises:
            ConfigError: if the name is unknown.
        """
        return float(_measure(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Many histories of one scenario. All arrays have the shape ``(repetitions,)``.

    See :class:`Outcome` for their meaning.
    """

    parts_ns: Mapping[str, Ticks]
    total_ns: Ticks
    ideal_ns: Ticks
    finished: npt.NDArray[np.bool_]
    steps: Ticks
    failures: Ticks
    lost_workers: Ticks
    joins: Ticks
    starts: Ticks
    lost_slices: Ticks
    member_ns: Numbers

    def history(self, repetition: int) -> Outcome:
        """Return one of the histories."""
        return Outcome(
            parts_ns={part: int(spent[repetition]) for part, spent in self.parts_ns.items()},
            total_ns=int(self.total_ns[repetition]),
            ideal_ns=int(self.ideal_ns[repetition]),
            finished=bool(self.finished[repetition]),
            member_ns=float(self.member_ns[repetition]),
            **{name: int(getattr(self, name)[repetition]) for name in COUNTS},
        )

    def values(self, name: str) -> Numbers:
        """Return a measure of every history, by name as in :meth:`Outcome.value`.

        Raises:
            ConfigError: if the name is unknown.
        """
        return np.asarray(_measure(self, name), dtype=np.float64)

    def estimate(self, name: str) -> Estimate:
        """Return the mean of a measure and its 95 % interval."""
        return Estimate.of(self.values(name))


def _measure(of: Outcome | Sweep, name: str) -> float | Numbers:
    check_choice("measure", name, (*MEASURES, *COUNTS))
    if name in COUNTS:
        counted: float | Numbers = getattr(of, name)
        return counted
    match name:
        case "goodput":
            return of.ideal_ns / of.total_ns
        case "lost_share":
            return of.parts_ns["lost"] / np.maximum(of.parts_ns["lost"] + of.parts_ns["useful"], 1)
        case "total_s":
            return of.total_ns / NS
        case "ideal_s":
            return of.ideal_ns / NS
        case "worker_hours":
            return of.member_ns / NS / 3600
        case _:
            return of.parts_ns[name.removesuffix("_s")] / NS


class Estimate(NamedTuple):
    """A mean and its 95 % confidence interval.

    Args:
        mean: Mean over all repetitions.
        low: Lower end of the interval (Student's t).
        high: Upper end.
        number: Number of repetitions.
    """

    mean: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, values: Numbers) -> Estimate:
        """Return the estimate from independent values.

        Raises:
            ConfigError: if there are fewer than two, which give no interval.
        """
        number = len(values)
        if number < 2:
            raise ConfigError(f"an interval needs at least 2 repetitions, got {number}")
        mean = float(values.mean())
        half = _student(number - 1) * float(values.std(ddof=1)) / math.sqrt(number)
        return cls(mean, mean - half, mean + half, number)


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by the Cornish-Fisher expansion.

    It is exact for 1 and 2 degrees of freedom.
    """
    if freedom <= 2:
        return (12.706204736, 4.302652730)[freedom - 1]
    z = 1.959963985
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
