"""Range checks in a training loop: which values are checked in a step, and the reaction to a finding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from holdfast.integrity.fingerprint import LONGEST_ROTATION, WINDOW_BYTES, RotatingDigest
from holdfast.integrity.guarded import GuardedModel
from holdfast.integrity.ranges import RangeFinding, Ranges
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog

_NOTHING = 0
_IS_TRAINING = 1
_FIRST = 2
"""Values in the vote: nothing found; the finding recurred; ``_FIRST`` + rank of a worker with a finding. The largest wins."""

_MOST_TIMES_BACK = 3
"""Maximum number of rollbacks in a rotation for findings of this worker."""


class RangeCheck:
    """Checks in each step the loss, a window of the weights and of the optimizer state, and a window of the gradients.

    Reduced gradients are the same on all workers, so each worker checks another window of them.
    """

    def __init__(self, job: JobContext, part: GuardedModel, digest: RotatingDigest, log: RunLog) -> None:
        self._job = job
        self._part = part
        self._digest = digest
        self._log = log
        self._ranges = Ranges()
        self._finding: RangeFinding | None = None
        self._times_back = 0
        self._rolled_back_for: tuple[int, RangeFinding | None] = (-1, None)
        self.is_training = False
        """Whether the finding that caused a rollback recurred with the same bits."""
        total = sum(layout.gradients_end * layout.dtype.itemsize for layout in part.buckets.layouts)
        room = max(WINDOW_BYTES, -(-total // LONGEST_ROTATION))
        self._windows = [
            (bucket, start, min(start + room // layout.dtype.itemsize, layout.gradients_end))
            for bucket, layout in enumerate(part.buckets.layouts)
            for start in range(0, layout.gradients_end, room // layout.dtype.itemsize)
        ]

    def check(self, step: int) -> int:
        """Return this worker's vote on a step.

        A finding that recurs with the same bits when its step is redone does not count, nor does any finding after
        the maximum number of rollbacks: a diverging training run produces findings everywhere.
        """
        self._part.wait_updated()
        self._finding = next((finding for finding in self._findings(step) if finding is not None), None)
        if self._finding is None:
            return _NOTHING
        if self._rolled_back_for == (step, self._finding) or self._times_back >= _MOST_TIMES_BACK:
            return _IS_TRAINING
        return _FIRST + self._job.comm.local_ranks[0]

    def read(self, vote: int) -> bool:
        """Read the largest vote; return whether it is a finding."""
        self.is_training = vote == _IS_TRAINING
        if vote == _IS_TRAINING:
            self._ranges.accept()
        if vote < _FIRST:
            return False
        if vote - _FIRST in self._job.comm.local_ranks and self._finding is not None:
            self._log.corruption_found("range", (self._finding.where,), ())
        if self._job.settings.guard == "warn":
            self._ranges.accept()  # warn once
        return True

    def rolled_back(self, found_at: int) -> None:
        """Record that all workers rolled back because of a finding in step ``found_at``."""
        self._times_back += self._finding is not None
        self._rolled_back_for = (found_at, self._finding)
        self._finding, self.is_training = None, False

    def passed(self) -> None:
        """Record that a whole rotation has passed without a finding."""
        self._times_back = 0

    def _findings(self, step: int) -> Iterator[RangeFinding | None]:
        kinds = {"loss", "gradients"}
        loss = self._part.gradients.metrics(()).get("loss")
        if loss is not None:
            yield self._ranges.look("loss", "loss", (loss,))
        for piece, tensor in self._digest.values(step):
            if tensor.dim() and tensor.numel() > 1:
                kinds.add(piece.key or "weights")
                yield self._ranges.look_at(piece.key or "weights", piece.path, tensor)
        if self._windows and not self._part.scales_loss:  # a gradient scaler provokes overflows and skips such steps
            yield self._check_gradients(step)
        self._ranges.count_step(kinds)

    def _check_gradients(self, step: int) -> RangeFinding | None:
        comm = self._job.comm
        turn = step * len(comm.members) + comm.members.index(comm.local_ranks[0])
        bucket, start, stop = self._windows[turn % len(self._windows)]
        finding = self._ranges.look_at("gradients", f"bucket {bucket}", self._part.gradients.sums[bucket][start:stop])
        return finding and dataclasses.replace(
            finding, where=f"gradients of {self._part.buckets.name_at(bucket, start)}"
        )
