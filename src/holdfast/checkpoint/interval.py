"""The checkpoint interval: Daly's (2006) closed form, and its estimate from measurements. No torch."""

from __future__ import annotations

import math

from holdfast.errors import ConfigError


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the higher-order optimum of the time between the end of one checkpoint and the start of the next, in seconds.

    ``sqrt(2 C M) [1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)] - C`` where ``C < 2M``, else ``M``.

    Args:
        cost_s: Cost of one checkpoint, seconds, ``> 0``.
        mtbf_s: Mean time between failures of the whole job, seconds, ``> 0``.

    Raises:
        ConfigError: if one of them is not positive.

    Source:
        Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, eq. 37.
    """
    check_times(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class AdaptiveInterval:
    """Schedules checkpoints by their measured cost and the observed rate of failures.

    ``mtbf_s`` is the prior mean time between failures. It counts as one observed failure.
    """

    def __init__(self, mtbf_s: float) -> None:
        if not mtbf_s > 0:
            raise ConfigError(f"the mean time between failures must be positive, got {mtbf_s:g} s")
        self._believed_s = mtbf_s
        self._failures = 0
        self._costs: list[float] = []
        self._started_s: float | None = None
        self._last_s = 0.0

    def failed(self) -> None:
        """Record a failure."""
        self._failures += 1

    def cost(self, cost_s: float) -> None:
        """Record the seconds that a checkpoint cost the loop."""
        self._costs = [*self._costs, max(cost_s, 1e-4)][-5:]

    def began(self, now_s: float) -> None:
        """Record that a checkpoint was begun."""
        self._last_s = now_s

    def mtbf_s(self, now_s: float) -> float:
        """Return the current estimate of the mean time between failures, seconds."""
        run_s = 0.0 if self._started_s is None else now_s - self._started_s
        return (self._believed_s + run_s) / (1 + self._failures)

    def interval_s(self, now_s: float) -> float:
        """Return the seconds from one checkpoint to the next; 0 until a cost has been measured."""
        if not self._costs:
            return 0.0
        return daly(sorted(self._costs)[len(self._costs) // 2], self.mtbf_s(now_s))

    def is_due(self, now_s: float) -> bool:
        """Return whether a checkpoint is due."""
        if self._started_s is None:
            self._started_s = self._last_s = now_s
        return now_s - self._last_s >= self.interval_s(now_s)


def check_times(cost_s: float, mtbf_s: float) -> None:
    """Reject a cost or a mean time between failures that is not positive."""
    if not cost_s > 0 or not mtbf_s > 0:
        raise ConfigError(f"cost and MTBF must be positive, got {cost_s:g} s and {mtbf_s:g} s")
