"""The log of the recovery in progress, which becomes a record when training resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from holdfast.state.context import JobContext, RecoveryContext
from holdfast.state.run_log import RunLog


class RecoveryLog:
    """Opens a recovery when a failure is detected or the membership changes, and closes it when training resumes.

    Args:
        job: The job context. If the application is being rebuilt, the recovery that the previous one began continues.
        log: Writes the record.
    """

    def __init__(self, job: JobContext, log: RunLog) -> None:
        self._job = job
        self._log = log
        self.now: RecoveryContext | None = None
        """The recovery in progress."""
        if (before := job.rebuilds.current) is not None:
            self.now = dataclasses.replace(before.recovery, decision="reinit", redone_steps=0, held_since_s=0.0)

    @property
    def is_planned(self) -> bool:
        """Whether this regrouping is planned: the membership changes and no worker has detected a failure."""
        return self.now is not None and self.now.decision == "grow"

    def begin_planned(self) -> None:
        """Note a planned regrouping: the membership changes and nothing failed."""
        if self.now is None:
            self.now = RecoveryContext(self._job.comm.members, "grow", held_since_s=self._job.clock.now_s())
            self._log.mark("recovery")

    def expect(self, newcomers: Sequence[int]) -> None:
        """Note the newcomers. A newcomer does so too, as the other workers may die before they write it."""
        if self.now is None or self._job.comm.local_ranks[0] in newcomers:
            self.now = RecoveryContext(tuple(rank for rank in self._job.comm.members if rank not in newcomers))
        self.now.decision = "grow"

    def see_corruption(self, *, redone_steps: int) -> None:
        """Note that the guard found corruption: all workers regroup and recompute ``redone_steps`` steps, if known."""
        if self.now is None:
            self.now = RecoveryContext(self._job.comm.members, "heal", redone_steps)
            self._log.mark("recovery")

    def see_failure(self) -> None:
        """Note that a worker died."""
        if self.now is None:
            self.now = RecoveryContext(before=self._job.comm.members)
            self._log.failure_seen()
            self._log.mark("recovery")
        elif self.is_planned:
            self.now.decision = "continue"
            self._log.failure_seen()

    def decide(self, decision: str, redone_steps: int | None = None) -> None:
        """Note the decision of this recovery, and ``redone_steps`` if the decision determines it."""
        if self.now is not None:
            self.now.decision = decision
            if redone_steps is not None:
                self.now.redone_steps = redone_steps

    def discard_step(self, *, was_computing: bool) -> None:
        """Note that the step in progress is recomputed, unless another decision was made."""
        if self.now is not None and self.now.decision == "continue":
            self.decide("redo", int(was_computing))

    def end(self) -> None:
        """Write the record of the recovery: training resumes."""
        job, recovery, self.now = self._job, self.now, None
        if recovery is not None:
            lost = any(rank not in job.comm.members for rank in recovery.before)
            if recovery.decision not in ("grow", "heal") or (recovery.decision == "heal" and lost):
                job.checkpoints.note_failure()
            held_s = job.clock.now_s() - recovery.held_since_s if recovery.held_since_s else 0.0
            self._log.recovered(recovery, held_s)
        if job.rebuilds.current is not None:
            self._log.reinitialised(job.rebuilds.current)
            job.rebuilds.current = None
