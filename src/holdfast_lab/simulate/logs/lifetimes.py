"""Lifetimes: how long machines were up, and which of these times ended in a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class UpTime(NamedTuple):
    """One time that a machine was up.

    Args:
        unit: Number of the machine, from 0.
        start_s: Begin, seconds from the begin of the log.
        end_s: End.
        ended: It ended in a failure; otherwise it was still up, or left by plan.
        running: The machine was up at the begin of the log already, for an unknown time.
    """

    unit: int
    start_s: float
    end_s: float
    ended: bool
    running: bool = False


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Observed lifetimes. All arrays have the shape ``(lifetimes,)``.

    Args:
        seconds: Length, ``> 0``. Of a running machine, its length from the begin of the log.
        ended: Whether it ended in a failure; otherwise it is right-censored.
        running: Whether the machine was up before the log began, for an unknown time.
        has_shape: Whether each length is that of one machine. If not, as with sizes over time, where it is not known
            which machine left, only their sum and the number of failures say something: the mean.
        rounded: Number of lifetimes that were 0 in the log and became half of the shortest other one.
    """

    seconds: Seconds
    ended: Flags
    running: Flags
    has_shape: bool = True
    rounded: int = 0

    @classmethod
    def of(
        cls,
        seconds: Sequence[float],
        ended: Sequence[bool],
        running: Sequence[bool] | None = None,
        *,
        has_shape: bool = True,
    ) -> Lifetimes:
        """Return lifetimes from lengths ``>= 0``; those of 0 that did not end in a failure are left out."""
        length, died = np.asarray(seconds, dtype=np.float64), np.asarray(ended, dtype=np.bool_)
        before = np.zeros(len(length), np.bool_) if running is None else np.asarray(running, dtype=np.bool_)
        kept = (length > 0) | (died & ~before)
        length, died, before = length[kept], died[kept], before[kept]
        zero = length == 0
        if zero.any():
            above = length[~zero]
            length[zero] = above.min() / 2 if len(above) else 1.0
        return cls(length, died, before, has_shape, int(zero.sum()))

    @classmethod
    def of_up_times(cls, up: Sequence[UpTime], *, has_shape: bool = True) -> Lifetimes:
        """Return the lifetimes in a log with a time axis."""
        return cls.of(
            [one.end_s - one.start_s for one in up],
            [one.ended for one in up],
            [one.running for one in up],
            has_shape=has_shape,
        )

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def failures(self) -> int:
        """Number of lifetimes that ended in a failure."""
        return int(self.ended.sum())

    @property
    def total_s(self) -> float:
        """Time that all machines together were up, seconds."""
        return float(self.seconds.sum())
