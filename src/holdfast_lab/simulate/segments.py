"""Segments of undisturbed training, whose steps have equal duration, so one division gives the position at any time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ticks = npt.NDArray[np.int64]
FAR = np.int64(1 << 61)
"""Later than the end of any simulation, but small enough to add to."""


class TrainingPosition(NamedTuple):
    """The position of training; all arrays have the shape ``(histories,)``.

    Args:
        step: The step in progress.
        into: Elapsed time of the step, nanoseconds; 0 while training is held for a checkpoint.
        hold_left: How long training is still held for a checkpoint, 0 if it is not.
        saves: Checkpoints of the segment that no longer hold training.
        ran: Work since the segment began, nanoseconds.
    """

    step: Ticks
    into: Ticks
    hold_left: Ticks
    saves: Ticks
    ran: Ticks


class Segments:
    """The current segment of each history: consecutive steps, with checkpoints in between.

    Segments are restarted repeatedly.

    The time from the end of one checkpoint to the end of the next is a cycle.

    Args:
        number: Number of histories.
        every: Steps between two checkpoints, 0 for none.
        buckets: All-reduces of a step besides the commit vote.
    """

    def __init__(self, number: int, every: int, buckets: int) -> None:
        self._every, self._buckets = every, buckets
        self.start, self.first, self.step, self.compute, self.weight = (np.zeros(number, np.int64) for _ in range(5))
        self._into, self._hold, self._lag = (np.zeros(number, np.int64) for _ in range(3))
        self._before, self._works, self._cycle, self.waits, self.waited = (np.zeros(number, np.int64) for _ in range(5))

    def begin(self, i: Ticks, *, start: Ticks, first: Ticks, into: Ticks, compute: Ticks, sums: Ticks, waits: Ticks,
              exposed: Ticks, hold: int, behind: int, weight: Ticks) -> None:  # fmt: skip
        """Begin the segments of the histories ``i``.

        Args:
            i: Indices of the histories.
            start: Start time.
            first: The step in progress at the start.
            into: Elapsed time of that step.
            compute: Duration of a step before its first all-reduce.
            sums: Duration of all its all-reduces.
            waits: Time in a step from which all wait for the optimizer.
            exposed: Duration of that wait.
            hold: How long a checkpoint holds training.
            behind: How long it is then written; the next checkpoint waits for that.
            weight: What a step counts.
        """
        step, every = compute + sums + exposed, self._every
        self.waits[i], self.waited[i] = waits, waits + exposed
        self.start[i], self.first[i], self._into[i], self.weight[i] = start, first, into, weight
        self.step[i], self.compute[i] = step, compute
        if every:
            between, before = product(every, step), first % every
            holds = hold + np.maximum(behind - between, 0)
            self._hold[i], self._before[i], self._cycle[i] = holds, before, between + holds
            self._lag[i] = np.maximum(behind, compute - -sums // (self._buckets + 1))
            self._works[i] = product(every - before, step) - into

    def at(self, i: Ticks, now: Ticks) -> TrainingPosition:
        """Return the position of the histories ``i`` at ``now``."""
        every, elapsed, step, first = self._every, now - self.start[i], self.step[i], self.first[i]
        done = self._into[i] + elapsed
        number = done // step
        into = done - number * step
        none = np.zeros(len(i), dtype=np.int64)
        if not every:
            return TrainingPosition(first + number, into, none, none, elapsed)
        after = elapsed - self._works[i]  # the begin of the first checkpoint
        late = np.flatnonzero(after >= 0)
        if not late.size:
            return TrainingPosition(first + number, into, none, none, elapsed)
        j, after, step = i[late], after[late], step[late]
        hold, cycle = self._hold[j], self._cycle[j]
        after -= hold  # the end of the first checkpoint, possibly in the future
        cycles = after // cycle  # -1 before that end
        rest = after - cycles * cycle
        steps = np.minimum(rest // step, every)
        inside = rest - steps * step
        holds = (steps == every) | (cycles < 0)
        held = np.where(cycles < 0, -after, hold - inside)
        saves, hold_left = none.copy(), none
        saves[late] = cycles + 1
        hold_left[late] = np.where(holds, held, 0)
        into[late] = np.where(holds, 0, inside)
        number[late] = (cycles + 1) * every + np.where(cycles < 0, every, steps) - self._before[j]
        ran = elapsed.copy()
        ran[late] -= (cycles + 1) * hold + np.where(holds, hold - hold_left[late], 0)
        return TrainingPosition(first + number, into, hold_left, saves, ran)

    def waiting(self, i: Ticks, position: TrainingPosition) -> Ticks:
        """Return how long the histories at ``position`` still wait for the optimizer, 0 where they do not."""
        waits = (self.waits[i] <= position.into) & (position.into < self.waited[i])
        return np.where(waits, self.waited[i] - position.into, 0)

    def missed(self, i: Ticks, position: TrainingPosition) -> tuple[Ticks, TrainingPosition]:
        """Return the time from ``position`` to the first all-reduce of the step, and the position then.

        It is 0 where training is already in an all-reduce.
        """
        compute = self.compute[i]
        computes = position.into < compute
        rest = np.where(computes, compute - position.into, 0)
        saves = position.saves + (computes & (position.hold_left > 0))
        there = TrainingPosition(
            position.step, position.into + rest, np.where(computes, 0, position.hold_left), saves, position.ran + rest
        )
        return rest + np.where(computes, position.hold_left, 0), there

    def until_step(self, i: Ticks, left: Ticks) -> Ticks:
        """Return when ``left`` more steps are done; no checkpoint follows the last."""
        saves = (self._before[i] + left - 1) // self._every if self._every else 0
        far = product(left, self.step[i]) + saves * self._hold[i]
        later: Ticks = np.minimum(self.start[i] - self._into[i] + far, FAR)
        return later

    def boundary(self, i: Ticks, now: Ticks) -> Ticks:
        """Return when the next step begins, which may be now; if training is held for a checkpoint, after that."""
        position = self.at(i, now)
        left = np.where(position.into > 0, self.step[i] - position.into, 0)
        if self._every:
            left += np.where((position.into > 0) & ((position.step + 1) % self._every == 0), self._hold[i], 0)
        return now + np.where(position.hold_left > 0, position.hold_left, left)

    def complete_at(self, i: Ticks, number: Ticks) -> Ticks:
        """Return when checkpoint ``number`` of the segment is complete; 1 is the first."""
        return self.start[i] + self._works[i] + self._hold[i] + (number - 1) * self._cycle[i] + self._lag[i]

    def ran_at_save(self, i: Ticks, number: Ticks) -> Ticks:
        """Return the work from the begin of the segment to that checkpoint."""
        return self._works[i] + (number - 1) * (self._cycle[i] - self._hold[i])

    def step_at_save(self, i: Ticks, number: Ticks) -> Ticks:
        """Return the step of that checkpoint."""
        return self.first[i] - self._before[i] + number * self._every


def product(a: Ticks | int, b: Ticks) -> Ticks:
    """Return ``a * b``, at most :data:`FAR`."""
    return np.where(np.asarray(a, dtype=np.float64) * b < 2e18, a * b, FAR)
