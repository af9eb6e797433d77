"""What becomes of a collective of the ``torch.distributed`` backend after a failure: decided from the shared progress.

A script's collectives are no steps: there is no vote that could take one back, and only the script knows what to compute
again. So the answer is one of the five below, the same on all survivors, for the same reason as a strategy's
(:mod:`holdfast.recovery.strategy`): all decide on the same progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Retry(Enum):
    """What a survivor does with the collective in progress."""

    KEEP = auto()
    """Some survivor has completed it, so all have entered its last barrier, and each has its own result."""
    AGAIN = auto()
    """Run it again over the survivors, from its inputs, which are intact."""
    LOST = auto()
    """It needs what only a failed rank had."""
    UNUSABLE = auto()
    """It timed out, or failed on another rank: nothing further can run in the group."""
    NO_FAILURE = auto()
    """It has failed again and again although no rank failed, which has another cause."""


ATTEMPTS = 4
"""A collective that fails this often although no rank failed is not retried any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProgress:
    """One collective, after the survivors have shared their progress.

    Args:
        completed: The largest number of collectives of its group that any survivor has completed.
        number: How many were before it in its group.
        is_broken: Its group was given up by some survivor.
        has_lost: It needs what only a failed rank had.
        failures: How often it has failed although no rank failed.
    """

    completed: int
    number: int
    is_broken: bool
    has_lost: bool
    failures: int

    def decide(self) -> Retry:
        """Return what becomes of the collective."""
        if self.is_broken:
            return Retry.UNUSABLE
        if self.completed > self.number:
            return Retry.KEEP
        if self.failures >= ATTEMPTS:
            return Retry.NO_FAILURE
        return Retry.LOST if self.has_lost else Retry.AGAIN
