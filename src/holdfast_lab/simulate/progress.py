"""What is done, what of it is safe, and what was lost."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_lab.simulate.stretch import Place, Stretch


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

    def add(self, stretch: Stretch, now: int) -> Place:
        """Count a stretch that ends now; return where it ends."""
        place = stretch.at(now)
        self.settle(stretch, now)
        self.held += now - stretch.start - place.ran
        self._attempt = place.into if place.step > stretch.first else self._attempt + place.ran
        self.ran += place.ran
        self.weight += (place.step - stretch.first) * stretch.weight
        if self._target is not None:
            self.weight = min(self.weight, self._target)  # the last mini-batch is as small as what is left
        self.step = place.step
        return place

    def add_broken_off(self, stretch: Stretch, death: int, missed: int) -> Place:
        """Count a stretch in which somebody died, and the others missed it later; what was to be complete then is not."""
        self.settle(stretch, death)
        safe = self._safe
        place = self.add(stretch, missed)
        self._safe = safe
        return place

    def settle(self, stretch: Stretch | None, now: int) -> None:
        """See which checkpoints are complete by now."""
        if self._pending is not None and self._pending.at <= now:
            self._safe, self._pending = self._pending, None
        if stretch is None or not (saves := stretch.at(now).saves):
            return
        newest = self._saved(stretch, saves)
        if newest.at <= now:
            self._safe, self._pending = newest, None
        else:  # it did not begin before the one before it was complete
            before = self._saved(stretch, saves - 1) if saves > 1 else self._pending
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

    def secure(self, now: int) -> None:
        """Have all saved that is done."""
        self._safe = Saved(self.step, self.weight, self.ran, now)

    def _waste(self, ran: int) -> None:
        self.ran -= ran
        self.lost += ran
        self._attempt = 0

    def _saved(self, stretch: Stretch, number: int) -> Saved:
        step = stretch.step_at_save(number)
        weight = self.weight + (step - stretch.first) * stretch.weight
        return Saved(step, weight, self.ran + stretch.ran_at_save(number), stretch.complete_at(number))
