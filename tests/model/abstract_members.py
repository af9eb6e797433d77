"""Who wants to come, to leave, or to change the job, for the abstract engine; and whose bits flip.

A wish is heard in the closing sum: it is made at any time before that sum is known anywhere, or not at all. What is
simpler here than in life, and why nothing is missed:

- *All that is wished when the first worker learns the result of a closing sum is in it.* Who wished before has been
  seen by somebody who had yet to enter; a wish that came too late for the sum comes before the next one here.
- *A worker may be told to leave after the closing sum too,* when a newcomer has made all meet: it leaves with the rest.
- *A newcomer that dies while it waits is not admitted.* If the others did not know of it, it is as if it died once it was.
- *A bit that flips is heard of like a wish:* when it is found is left to chance, because each sum compares another part.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from holdfast.recovery.messages import Note

NEW_SETTINGS = -1
FLIP = -2


class Lapse(enum.Flag):
    """Something that the engine, or who carries out orders, does wrong."""

    ADMITS_EARLY = enum.auto()
    """A shrink admits newcomers although not all who are in it have heard of them."""
    ALL_LEAVE = enum.auto()
    """A shrink lets go who wants to leave, even if nobody stays."""
    KEEPS_ASK = enum.auto()
    """Who has heard of new settings does not say so in recovery to those who have not."""
    TAKES_AT_ONCE = enum.auto()
    """New settings count as soon as a worker has them."""
    SETTLES_AT_ONCE = enum.auto()
    """New homes count as soon as a worker has its parts."""
    MIRRORS_LATE = enum.auto()
    """Mirrors get the gradient of their part only when the step is applied."""
    SUMS_LATE = enum.auto()
    """Everybody gets the gradient of its parts only when the step is applied."""
    EACH_RESTORES = enum.auto()
    """Everybody who is to hold a lost part restores it for itself."""
    NOBODY_SAYS_LOST = enum.auto()
    """Nobody says that a part of the model is lost."""
    ONE_SAYS_LOST = enum.auto()
    """Only the last of those who know that a part is lost says so."""
    HEALS_ALONE = enum.auto()
    """Who has heard that somebody's state is corrupt goes back by itself, without a sum."""
    NOBODY_SAYS_CORRUPT = enum.auto()
    """Who has heard that somebody's state is corrupt does not say so in recovery to those who have not."""
    KEEPS_SNAPSHOTS = enum.auto()
    """Snapshots are kept when newcomers come, who have none, and each goes back to what it has."""
    FORGETS_TO_COUNT = enum.auto()
    """Who finds that a sum that was begun early has failed does not count those before it."""
    REVOKES_HALF = enum.auto()
    """A revoke does not reach who waits in an exchange, only who waits in a sum of the world."""


NO_LAPSE = Lapse(0)
"""Everything is right."""


class Wish(NamedTuple):
    """``rank`` waits to join, if it is a newcomer, or is told to leave, if it is not; or NEW_SETTINGS are there; or a FLIP."""

    rank: int


class Wishes(NamedTuple):
    """What is wished.

    Args:
        unborn: Newcomers that may come.
        waiting: Newcomers that wait to be admitted.
        told: Workers that were told to leave, and have not.
        asked: How often the settings were changed.
        flips: How many bits flipped.
        hidden: One of these has not been found yet.
    """

    unborn: int = 0
    waiting: int = 0
    told: int = 0
    asked: int = 0
    flips: int = 0
    hidden: bool = False

    def after(self, wish: Wish) -> Wishes:
        """Return what is wished after ``wish``."""
        bit = 0 if wish.rank < 0 else 1 << wish.rank
        if wish.rank == FLIP:
            return self._replace(flips=self.flips + 1, hidden=True)
        if not bit:
            return self._replace(asked=self.asked + 1)
        if self.unborn & bit:
            return self._replace(unborn=self.unborn & ~bit, waiting=self.waiting | bit)
        return self._replace(told=self.told | bit)

    def without(self, ranks: int) -> Wishes:
        """Return what is wished when ``ranks`` are there no more, or wait no more."""
        return self._replace(waiting=self.waiting & ~ranks, told=self.told & ~ranks)

    def heard(self, members: int, taken: int) -> Note:
        """Return what a closing sum says to ``members`` who have taken ``taken`` changes: of a flip, and then nothing else."""
        if self.hidden:
            return Note.CORRUPT
        told = self.told & members
        change = Note.LEAVE if told == members else Note.CHANGE.when(told | self.waiting)
        return change | Note.ASK.when(self.asked > taken)

    def shrink(self, living: int, heard: int, lapses: Lapse) -> tuple[int, int]:
        """Return who leaves in a shrink of the ``living``, of whom ``heard`` have heard CHANGE, and who is admitted."""
        leaving = self.told & heard
        if leaving == living and Lapse.ALL_LEAVE not in lapses:
            leaving = 0
        all_heard = heard == living or (bool(heard) and Lapse.ADMITS_EARLY in lapses)
        return leaving, self.waiting if all_heard else 0
