"""Out-of-range values: not finite, or far above every magnitude seen so far.

Limits are multiples of a *record*, the largest magnitude of its kind in the run so far, never of a standard deviation:
losses and gradients are heavy-tailed, so limits that assume a normal distribution give false alarms. If magnitudes fall off like
``P(X > x) ~ x**-a``, the probability that a step exceeds the record of the n steps before it by a factor F is ``F**-a / (n + 1)``.
N steps after a warm-up of w then give ``F**-a * ln(N / w)`` false alarms. With the factors below, for 100,000 steps and a
warm-up of 64:

====================  ======  =========================================  ==============
kind                  F       assumption                                 false alarms
====================  ======  =========================================  ==============
loss                  2**10   a >= 2, a finite variance                  7e-6
gradients             2**20   a >= 1, not even a finite mean             7e-6
weights               2**10   as for the loss                            7e-6
optimizer's state     2**40   a >= 1/2: squares of such gradients        7e-6
====================  ======  =========================================  ==============

A lasting jump, as from a learning rate that is too high, is found too. It recurs with the same bits when its step is
redone, which shows that it comes from the training itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch

WARM_UP = 64
"""Number of initial steps that only set records; in these, only values that are not finite are found."""

_FACTORS = {"loss": 2.0**10, "gradients": 2.0**20, "weights": 2.0**10}
_STATE_FACTOR = 2.0**40


@dataclass(frozen=True, slots=True)
class RangeFinding:
    """A value that is out of range."""

    kind: str  # `"loss"`, `"gradients"`, `"weights"` or a name in the optimizer's state
    where: str  # names, or `"loss"`
    bits: bytes  # of the value, to recognise a recurrence


class Ranges:
    """Keeps the records of one worker, and finds values far above them."""

    def __init__(self) -> None:
        self._record: dict[str, float] = {}
        self._times: dict[str, int] = {}
        self._looks = True

    def look_at(self, kind: str, where: str, tensor: torch.Tensor) -> RangeFinding | None:
        """Check the values of a tensor; return the finding, or None."""
        if not self._looks or not tensor.is_floating_point() or not tensor.numel():
            return None
        low, high = torch.aminmax(tensor)
        return self.look(kind, where, (float(low), float(high)))

    def look(self, kind: str, where: str, values: Iterable[float]) -> RangeFinding | None:
        """Check some values and update the record; return the finding, or None."""
        if not self._looks:
            return None
        for value in values:
            if not math.isfinite(value) or self._is_far(kind, abs(value)):
                return RangeFinding(kind, where, struct.pack("<d", value))
            self._record[kind] = max(self._record.get(kind, 0.0), abs(value))
        return None

    def count_step(self, kinds: Iterable[str]) -> None:
        """Count a checked step for each of these kinds."""
        for kind in kinds:
            self._times[kind] = self._times.get(kind, 0) + 1

    def accept(self) -> None:
        """Accept a finding as part of the training and stop checking: the other kinds would follow one after the other."""
        self._looks = False

    def _is_far(self, kind: str, magnitude: float) -> bool:
        if self._times.get(kind, 0) < WARM_UP:
            return False
        return magnitude > _FACTORS.get(kind, _STATE_FACTOR) * self._record.get(kind, math.inf)
