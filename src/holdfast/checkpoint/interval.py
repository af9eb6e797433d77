"""How often a checkpoint pays: Daly (2006) in closed form, and from what was seen so far. No torch."""

from __future__ import annotations

import math

from holdfast.errors import ConfigError


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the higher-order optimum of the time between the end of one checkpoint and the begin of the next, seconds.

    ``sqrt(2 C M) [1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)] - C`` where ``C < 2M``, else ``M``.

    Args:
        cost_s: What one checkpoint costs, ``> 0``.
        mtbf_s: Mean time between failures of the whole job, ``> 0``.

    Raises:
        ConfigError: if one is not positive.

    Source:
        Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, eq. 37.
    """
    check_times(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class Adaptive:
    """Says when the next checkpoint is due, from what checkpoints were found to cost and how often failures came.

    ``mtbf_s`` is what is believed of the mean time between failures before any was seen. It counts as one failure.
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
        """Hear of a failure."""
        self._failures += 1

    def cost(self, cost_s: float) -> None:
        """Hear what a checkpoint cost the loop, seconds."""
        self._costs = [*self._costs, max(cost_s, 1e-4)][-5:]

    def began(self, now_s: float) -> None:
        """Hear that a checkpoint was begun."""
        self._last_s = now_s

    def mtbf_s(self, now_s: float) -> float:
        """Return the mean time between failures, as believed now."""
        run_s = 0.0 if self._started_s is None else now_s - self._started_s
        return (self._believed_s + run_s) / (1 + self._failures)

    def interval_s(self, now_s: float) -> float:
        """Return how long after a checkpoint the next is due; 0 as long as none has shown what it costs."""
        if not self._costs:
            return 0.0
        return daly(sorted(self._costs)[len(self._costs) // 2], self.mtbf_s(now_s))

    def is_due(self, now_s: float) -> bool:
        """Return whether a checkpoint is due."""
        if self._started_s is None:
            self._started_s = self._last_s = now_s
        return now_s - self._last_s >= self.interval_s(now_s)


def check_times(cost_s: float, mtbf_s: float) -> None:
    """Refuse a cost or a mean time between failures that is not positive."""
    if not cost_s > 0 or not mtbf_s > 0:
        raise ConfigError(f"cost and MTBF must be positive, got {cost_s:g} s and {mtbf_s:g} s")
