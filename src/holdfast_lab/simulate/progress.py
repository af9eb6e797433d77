"""Completed, saved and lost work of many histories at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.segments import FAR, Segments, TrainingPosition

Ticks = npt.NDArray[np.int64]
_STEP, _WEIGHT, _RAN = range(3)
"""Rows of a checkpoint's content: its step, the weight of the steps before it, and the work in them."""


class SimulatedProgress:
    """The progress of many jobs; every attribute has one entry per history.

    Args:
        number: Number of histories.
        target: Total weight of the steps of a job; None if it has no end.
        segments: The segments that it counts.
    """

    def __init__(self, number: int, target: int | None, segments: Segments) -> None:
        self._target, self._segments = target, segments
        self.step, self.weight, self.ran, self._attempt, self.lost, self.held = (
            np.zeros(number, np.int64) for _ in range(6)
        )
        # The newest complete checkpoint, and the one that is being written.
        self._safe, self._pending = np.zeros((3, number), np.int64), np.zeros((3, number), np.int64)
        self._pending_at = np.full(number, FAR)

    def is_done(self, i: Ticks) -> npt.NDArray[np.bool_]:
        """Return whether nothing is left to do."""
        done: npt.NDArray[np.bool_] = self.weight[i] == (-1 if self._target is None else self._target)
        return done

    def left(self, i: Ticks) -> Ticks | None:
        """Return how many steps are left; None if there is no end."""
        return None if self._target is None else -((self.weight[i] - self._target) // self._segments.weight[i])

    def add(self, i: Ticks, now: Ticks, position: TrainingPosition) -> None:
        """Count the segments of the histories ``i``, which end now at ``position``."""
        segments = self._segments
        steps = position.step - segments.first[i]
        self.held[i] += now - segments.start[i] - position.ran
        self._attempt[i] = np.where(steps > 0, position.into, self._attempt[i] + position.ran)
        self.ran[i] += position.ran
        self.weight[i] += steps * segments.weight[i]
        if self._target is not None:
            self.weight[i] = np.minimum(self.weight[i], self._target)
        self.step[i] = position.step

    def settle(self, i: Ticks, now: Ticks, saves: Ticks) -> None:
        """Determine which of the segments' ``saves`` checkpoints are complete by now.

        Call it before counting the segments.
        """
        self.settle_pending(i, now)
        if not (saved := saves > 0).any():
            return
        i, now, saves = i[saved], now[saved], saves[saved]
        at = self._segments.complete_at(i, saves)
        complete = at <= now
        newest = self._saved(i, saves)
        if not complete.all():
            some = ~complete
            late, before = i[some], saves[some] - 1
            pending = np.where(self._pending_at[late] < FAR, self._pending[:, late], self._safe[:, late])
            self._safe[:, late] = np.where(before > 0, self._saved(late, before), pending)
            self._pending[:, late] = newest[:, some]
        self._safe[:, i[complete]] = newest[:, complete]
        self._pending_at[i] = np.where(complete, FAR, at)

    def settle_pending(self, i: Ticks, now: Ticks) -> None:
        """Determine whether the checkpoint of an earlier segment is complete by now."""
        done = i[self._pending_at[i] <= now]
        self._safe[:, done], self._pending_at[done] = self._pending[:, done], FAR

    def spoil(self, i: Ticks) -> None:
        """Discard the checkpoint that is being written: a worker that held a part of it failed."""
        self._pending_at[i] = FAR

    def discard(self, i: Ticks) -> None:
        """Lose the step in progress."""
        self._waste(i, self._attempt[i])

    def go_back(self, i: Ticks) -> None:
        """Lose the work since the newest checkpoint."""
        self._waste(i, self.ran[i] - self._safe[_RAN, i])
        self.step[i], self.weight[i] = self._safe[_STEP, i], self._safe[_WEIGHT, i]

    def secure(self, i: Ticks) -> None:
        """Save all completed work."""
        self._safe[_STEP, i], self._safe[_WEIGHT, i], self._safe[_RAN, i] = self.step[i], self.weight[i], self.ran[i]

    def _waste(self, i: Ticks, ran: Ticks) -> None:
        self.ran[i] -= ran
        self.lost[i] += ran
        self._attempt[i] = 0

    def _saved(self, i: Ticks, number: Ticks) -> Ticks:
        """Return the content of a checkpoint; shape ``(3, histories)``."""
        segments = self._segments
        step = segments.step_at_save(i, number)
        weight = self.weight[i] + (step - segments.first[i]) * segments.weight[i]
        found = np.empty((3, len(i)), dtype=np.int64)
        found[_STEP], found[_WEIGHT], found[_RAN] = step, weight, self.ran[i] + segments.ran_at_save(i, number)
        return found
