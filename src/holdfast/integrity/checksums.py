"""What workers give each other, in a training loop: what was altered on its way, and what comes of it.

Whoever adds what others gave compares it with checksums (:mod:`holdfast.comm.allreduce.checksums`). What was altered has been added by
then, but no step is closed before all have heard of it. So nobody's state is wrong, and it is enough that all take the
step in progress back and do it again.
"""

from __future__ import annotations

from holdfast.comm.allreduce.checksums import NO_WORKER
from holdfast.engine.context import World
from holdfast.engine.run_log import RunLog
from holdfast.errors import MessageAltered

_MOST_TIMES_REDONE = 3
"""A step that is done again more often because messages of it are altered is no soft error."""


class Checking:
    """Carries what was found here into the closing sum, and says what comes of it."""

    def __init__(self, world: World, log: RunLog) -> None:
        self._world = world
        self._log = log
        self._policy = world.settings.guard
        self._is_on = world.settings.guard_sums
        self.altered = False
        """Whether the step in progress is to be taken back."""
        self._found_at = -1
        self._times_redone = 0

    def found(self) -> bool | None:
        """Return whether something was altered in the step in progress, as far as this worker knows; None where it does not look."""
        return bool(self._world.altered) if self._is_on else None

    def read(self, step: int, *, altered: bool) -> bool:
        """Hear whether something was altered anywhere; return whether the step is not closed, and all do it again.

        Raises:
            MessageAltered: if training ends for it.
        """
        self._write_down()
        if not altered or self._policy == "warn":
            return False
        if self._policy == "stop":
            raise MessageAltered(f"a message between workers was altered on its way in step {step}")
        self._times_redone = self._times_redone + 1 if step == self._found_at else 1
        if self._times_redone > _MOST_TIMES_REDONE:
            raise MessageAltered(
                f"messages between workers were altered in step {step} whenever it was done, {self._times_redone} times: that is no soft "
                "error; look at the memory and the network of those who are named"
            )
        self._found_at, self.altered = step, True
        return True

    def taken_back(self) -> None:
        """Hear that the step in progress is taken back, for whatever reason: what was found goes with it."""
        self._write_down()
        self.altered = False

    def applied(self) -> None:
        """Hear that a step is in the weights."""
        if 0 <= self._found_at < self._world.step:
            if self._world.is_lead:
                self._log.corruption_healed((), self._found_at, self._found_at, "step", is_training=False)
            self._found_at = -1

    def _write_down(self) -> None:
        found = self._world.altered
        if found:
            self._log.corruption_found("message", list(found), sorted({*found.values()} - {NO_WORKER}))
            found.clear()
