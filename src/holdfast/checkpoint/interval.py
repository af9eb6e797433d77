"""When the next checkpoint is due, from what was seen so far. No torch."""

from __future__ import annotations

from holdfast.errors import ConfigError
from holdfast.interval import daly, young

__all__ = ["Adaptive", "daly", "young"]


class Adaptive:
    """Says when the next checkpoint is due, from what checkpoints were found to cost and how often failures came.

    Args:
        mtbf_s: What is believed of the mean time between failures before any was seen. It counts as one failure.
    """

    def __init__(self, mtbf_s: float) -> None:
        if not mtbf_s > 0:
            msg = f"the mean time between failures must be positive, got {mtbf_s:g} s"
            raise ConfigError(msg)
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
