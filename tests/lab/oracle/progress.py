"""What is done, what of it is safe, and what was lost."""

from __future__ import annotations

from typing import NamedTuple

from oracle.segment import Position, Segment


class Saved(NamedTuple):
    """What a checkpoint holds.

    Args:
        step: Steps before it.
        weight: What these count.
        ran: The work in them, nanoseconds.
        at: When it is complete.
    """

    step: int
    weight: int
    ran: int
    at: int


class Progress:
    """How far a job is.

    Args:
        target: What all its steps count; None if it goes on for ever.
    """

    def __init__(self, target: int | None) -> None:
        self._target = target
        self.step = 0
        """The step in progress."""
        self.weight = 0
        """What those before it count."""
        self.ran = 0
        """Work in what is there, nanoseconds; ``_attempt`` of it in the step in progress."""
        self._attempt = 0
        self._pace = (0, 1)  # duration and weight of a step, when training was last counted
        self.lost = 0
        """Work that was thrown away."""
        self.held = 0
        """How long training was held for checkpoints."""
        self._safe = Saved(0, 0, 0, 0)
        self._pending: Saved | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.weight == self._target

    def left(self, weight: int) -> int | None:
        """Return how many steps are left, if each counts ``weight``; None if there is no end."""
        return None if self._target is None else -((self.weight - self._target) // weight)

    def add(self, segment: Segment, now: int) -> Position:
        """Count a segment that ends now; return where it ends."""
        place = segment.at(now)
        self.settle(segment, now)
        self._pace = (segment.step, segment.weight)
        self.held += now - segment.start - place.ran
        self._attempt = place.into if place.step > segment.first else self._attempt + place.ran
        self.ran += place.ran
        self.weight += (place.step - segment.first) * segment.weight
        if self._target is not None:
            self.weight = min(self.weight, self._target)  # the last mini-batch is as small as what is left
        self.step = place.step
        return place

    def add_broken_off(self, segment: Segment, death: int, missed: int) -> Position:
        """Count a segment in which somebody died, and the others missed it later; what was to be complete then is not."""
        self.settle(segment, death)
        safe = self._safe
        place = self.add(segment, missed)
        self._safe = safe
        return place

    def settle(self, segment: Segment | None, now: int) -> None:
        """See which checkpoints are complete by now."""
        if self._pending is not None and self._pending.at <= now:
            self._safe, self._pending = self._pending, None
        if segment is None or not (saves := segment.at(now).saves):
            return
        newest = self._saved(segment, saves)
        if newest.at <= now:
            self._safe, self._pending = newest, None
        else:  # it did not begin before the one before it was complete
            before = self._saved(segment, saves - 1) if saves > 1 else self._pending
            self._safe, self._pending = before or self._safe, newest

    def spoil(self) -> None:
        """Give up the checkpoint that is being written: somebody died who held a part of it."""
        self._pending = None

    def discard(self) -> None:
        """Lose the step in progress."""
        self._waste(self._attempt)

    def go_back(self) -> None:
        """Lose what was done since the newest checkpoint."""
        self._waste(self.ran - self._safe.ran)
        self.step, self.weight = self._safe.step, self._safe.weight

    def fall_behind(self, weight: int) -> None:
        """Lose steps that count ``weight``: a part of the state is as it was before them."""
        weight = min(weight, self.weight)
        takes, each = self._pace
        ran = min(weight * takes // each, self.ran - self._attempt)
        self.weight -= weight
        self.ran -= ran
        self.lost += ran

    def secure(self, now: int) -> None:
        """Have all saved that is done."""
        self._safe = Saved(self.step, self.weight, self.ran, now)

    def _waste(self, ran: int) -> None:
        self.ran -= ran
        self.lost += ran
        self._attempt = 0

    def _saved(self, segment: Segment, number: int) -> Saved:
        step = segment.step_at_save(number)
        weight = self.weight + (step - segment.first) * segment.weight
        return Saved(step, weight, self.ran + segment.ran_at_save(number), segment.complete_at(number))
