"""A segment of training that nothing disturbs: every step of it costs the same, so nobody has to go through them one by one."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = 1 << 62
"""Steps between two checkpoints where there are none."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where training is.

    Args:
        step: The step in progress.
        into: How far it is, nanoseconds; 0 while training is held for a checkpoint.
        hold_left: How long it is still held for a checkpoint, 0 if it is not.
        saves: Checkpoints of the segment for which training is held no longer.
        ran: Work since the segment began, nanoseconds.
    """

    step: int
    into: int
    hold_left: int
    saves: int
    ran: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps one after another, with checkpoints in between. All times in whole nanoseconds.

    The time from the end of one checkpoint to the end of the next is a cycle. ``offset`` says where in its cycle it begins.

    Args:
        start: When it begins.
        first: The step that is in progress then.
        into: How much of that is done.
        step: What a step takes.
        compute: Before its first sum.
        waits: From so far into a step on, all wait for the optimizer,
        waited: and until so far.
        every: Steps of a cycle.
        hold: How long training is held for a checkpoint.
        lag: From the end of the hold until the checkpoint is complete.
        weight: What a step counts.
    """

    start: int
    first: int
    into: int
    step: int
    compute: int
    waits: int
    waited: int
    every: int
    hold: int
    lag: int
    weight: int

    @property
    def offset(self) -> int:
        """How much of the first cycle lies before the segment."""
        return self.first % self.every * self.step + self.into

    @property
    def cycle(self) -> int:
        """What a cycle takes."""
        return self.every * self.step + self.hold

    def at(self, now: int) -> Position:
        """Return where training is at ``now``, not before ``start``."""
        offset = self.offset
        saves, rest = divmod(offset + now - self.start, self.cycle)
        steps = min(rest // self.step, self.every)
        into = rest - steps * self.step
        hold_left = 0
        if steps == self.every:
            hold_left, into = self.hold - into, 0
        number = saves * self.every + steps
        return Position(
            self.first - self.first % self.every + number,
            into,
            hold_left,
            saves,
            number * self.step + into - offset,
        )

    def missed(self, now: int, *, computing: bool) -> int:
        """Return when somebody is missed who dies at ``now``: who waits for the optimizer, or computes, comes to a sum first.

        Args:
            now: When; not before ``start``.
            computing: They miss somebody also while they compute.
        """
        place = self.at(now)
        if self.waits <= place.into < self.waited:
            now += self.waited - place.into
            place = self.at(now)
        if computing or place.into >= self.compute:
            return now
        return now + place.hold_left + self.compute - place.into

    def until_step(self, step: int) -> int:
        """Return when ``step`` steps are done; no checkpoint follows the last."""
        number = self.first % self.every + step - self.first
        return self.start - self.offset + number * self.step + (number - 1) // self.every * self.hold

    def boundary(self, now: int) -> int:
        """Return when the next step begins: ``now`` if one does so just then. Held for a checkpoint, after that."""
        place = self.at(now)
        if place.hold_left:
            return now + place.hold_left
        if place.into == 0:
            return now
        ends = (place.step + 1) % self.every == 0
        return now + self.step - place.into + (self.hold if ends else 0)

    def complete_at(self, number: int) -> int:
        """Return when checkpoint ``number`` of the segment is complete, 1 is the first."""
        return self.start - self.offset + number * self.cycle + self.lag

    def ran_at_save(self, number: int) -> int:
        """Return the work from the begin of the segment to that checkpoint."""
        return number * self.every * self.step - self.offset

    def step_at_save(self, number: int) -> int:
        """Return the step that a checkpoint is of."""
        return self.first - self.first % self.every + number * self.every
