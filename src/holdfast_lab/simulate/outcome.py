"""What came of it."""

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
"""What time goes into. Every nanosecond belongs to one of them:

``useful``   work on steps that count in the end, in the pace of those who did it
``lost``     work on steps that was thrown away, and done again if there was time
``save``     training is held for a checkpoint
``detect``   somebody is dead and not all know it
``regroup``  survivors meet and decide
``load``     a checkpoint is loaded, a part is restored
``restart``  processes are started, or applications built again
``rejoin``   training is held for newcomers
``wait``     too few workers are there
"""

MEASURES = ("goodput", "lost_share", "total_s", "ideal_s", "worker_hours", *(f"{part}_s" for part in PARTS))
"""What can be asked of an outcome: shares (``lost_share`` is that of all work), seconds, and hours of members, summed."""
COUNTS = ("steps", "failures", "lost_workers", "joins", "starts", "lost_slices")
"""What was counted; see :class:`Outcome`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One history.

    Args:
        parts_ns: How long each of :data:`PARTS` took, whole nanoseconds; their sum is ``total_ns``.
        total_ns: How long it was looked at: until the job was done, or to the horizon.
        ideal_ns: How long the samples that are in the weights take with all workers and no failures, no checkpoints.
        finished: The job was done.
        steps: Committed steps that count.
        failures: How often members were lost, several at once counted as one.
        lost_workers: How many members were lost.
        joins: How often members were held for newcomers.
        starts: How often the launcher started the job again.
        lost_slices: Contributions to steps that ``forward`` went on without, of workers that computed.
        member_ns: Members, summed over time; more than 64 bits hold, so it is a float.
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
        """Share of the time that the work would have taken undisturbed with all workers, ``ideal / total``."""
        return self.ideal_ns / self.total_ns

    def value(self, name: str) -> float:
        """Return a measure, one of :data:`MEASURES` and :data:`COUNTS`.

        Raises:
            ConfigError: if there is no such measure.
        """
        return float(_measure(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Many histories of one scenario. All arrays have the shape ``(repetitions,)`` and mean what :class:`Outcome` says."""

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
        """Return a measure, by name as in :meth:`Outcome.value`, of every history.

        Raises:
            ConfigError: if there is no such measure.
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
    """A mean, and where it lies with a confidence of 95 %.

    Args:
        mean: Of all repetitions.
        low: Lower end of the interval (Student's t).
        high: Upper end.
        number: Of repetitions.
    """

    mean: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, values: Numbers) -> Estimate:
        """Return the estimate from independent values.

        Raises:
            ConfigError: if there are fewer than two: one says nothing of how far it is off.
        """
        number = len(values)
        if number < 2:
            raise ConfigError(f"an interval needs at least 2 repetitions, got {number}")
        mean = float(values.mean())
        half = _student(number - 1) * float(values.std(ddof=1)) / math.sqrt(number)
        return cls(mean, mean - half, mean + half, number)


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by the expansion of Cornish and Fisher; exact for 1 and 2 degrees."""
    if freedom <= 2:
        return (12.706204736, 4.302652730)[freedom - 1]
    z = 1.959963985
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
