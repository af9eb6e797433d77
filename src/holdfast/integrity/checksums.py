"""Message checksums in a training loop: detecting altered payloads, and the reaction.

The worker that reduces other workers' contributions verifies their checksums (:mod:`holdfast.comm.allreduce.checksums`). An altered
payload has been added by then, but no step commits before the vote has reported it. So no worker's state is wrong, and it is enough
that all workers discard the step in progress and redo it.
"""

from __future__ import annotations

from holdfast.comm.allreduce.checksums import NO_WORKER
from holdfast.errors import MessageAltered
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog

_MOST_TIMES_REDONE = 3
"""Altered messages in the same step more often than this are not a soft error."""


class MessageChecks:
    """Puts the findings of this worker into the commit vote, and decides on the outcome."""

    def __init__(self, job: JobContext, log: RunLog) -> None:
        self._job = job
        self._log = log
        self._policy = job.settings.guard
        self._is_on = job.settings.guard_sums
        self.altered = False
        """Whether the step in progress must be discarded."""
        self._found_at = -1
        self._times_redone = 0

    def found(self) -> bool | None:
        """Return whether this worker received an altered message in the step in progress; None if checksums are off."""
        return bool(self._job.altered) if self._is_on else None

    def read(self, step: int, *, altered: bool) -> bool:
        """Read the vote's result for ``step``; return whether the step is not committed and all workers redo it.

        Raises:
            MessageAltered: if the job stops because of it.
        """
        self._write_down()
        if not altered or self._policy == "warn":
            return False
        if self._policy == "stop":
            raise MessageAltered(f"a message between workers was altered on its way in step {step}")
        self._times_redone = self._times_redone + 1 if step == self._found_at else 1
        if self._times_redone > _MOST_TIMES_REDONE:
            raise MessageAltered(
                f"messages between workers were altered in step {step} in each of {self._times_redone} attempts: this is not a soft error; "
                "check the memory and the network of the workers that the run's records name"
            )
        self._found_at, self.altered = step, True
        return True

    def discarded(self) -> None:
        """Clear the findings of the step in progress, which is discarded for any reason."""
        self._write_down()
        self.altered = False

    def applied(self) -> None:
        """Record the healing of a corruption once its step has been applied to the weights."""
        if 0 <= self._found_at < self._job.step:
            if self._job.is_lead:
                self._log.corruption_healed((), self._found_at, self._found_at, "step", is_training=False)
            self._found_at = -1

    def _write_down(self) -> None:
        owners = self._job.altered
        if owners:
            self._log.corruption_found("message", list(owners), sorted({*owners.values()} - {NO_WORKER}))
            owners.clear()
