"""Delta standbys on disk, for the case that all holders of a part and all its standbys have failed.

The first surviving standby of a part writes its copy as an ordinary checkpoint into
``<checkpoint-dir>/copies/part-<n>/``, whenever it has received the bytes of a complete copy, or as often as the disk
permits. The loop is paused while the copy is copied once more, and never waits for the disk. A written copy becomes
valid when the step in which it was begun is committed, so no rollback goes to before it. Copies of another job, or of
an earlier start of this one, are never restored, and are removed when there is a newer one. Disk errors are warnings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import CheckpointStore, LoadedCheckpoint, take
from holdfast.checkpoint.retention import LEAST, to_remove
from holdfast.checkpoint.writer import CheckpointWriter, WriteResult
from holdfast.comm import VirtualCommunicator
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from holdfast.state.context import JobContext

_LAST_WRITE_S = 5.0
"""Maximum wait for the disk when training has ended, seconds: the copy being written is no longer needed."""


@dataclass(slots=True)
class _Place:
    """The location of the copies of a part."""

    writer: CheckpointWriter
    due: int = 0  # step from which the next copy is to be written
    has_failed: bool = False  # writing the last copy failed


class StandbyFiles:
    """Writes the copies of this worker's standbys, and reads those of others; does neither without a checkpoint-dir."""

    def __init__(self, job: JobContext, warn: Callable[[str], None]) -> None:
        self._job = job
        self._warn = warn
        self._slots: dict[int, _Place] = {}

    @property
    def _mark(self) -> dict[str, Any]:
        """Identifies the copies of this loop of this start of the job; stored with them."""
        return {"token": f"{self._job.checkpoints.token:x}", "loop": self._job.loop}

    # -- writing

    def expect(self, parts: Collection[int]) -> None:
        """From now on write copies of these parts, each as soon as possible, and of no others."""
        for part in self._slots.keys() - set(parts):
            self._slots.pop(part).writer.close()
        for part in parts if self._job.settings.checkpoint_dir else ():
            if part in self._slots:
                self._slots[part].due = 0
            else:
                self._slots[part] = self._begin(self._checkpoints(part))

    def _begin(self, checkpoints: CheckpointStore) -> _Place:
        background = not isinstance(self._job.comm, VirtualCommunicator)
        return _Place(
            CheckpointWriter(checkpoints, background=background, after_commit=lambda step: self._prune(checkpoints))
        )

    def write(self, part: int, step: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """Start to write a copy of an expected part, if one is due and the last is finished; otherwise it stays due.

        ``state`` returns the copy as of before ``step``. It may change after this returns.
        """
        place = self._slots.get(part)
        if place is None or step < place.due or place.writer.step is not None:
            return
        every = self._job.settings.mirror_every
        place.due = (step // every + 1) * every
        token = f"{self._job.checkpoints.token:x}-{self._job.comm.generation}"
        try:
            place.writer.begin(step, take(state()), {"part": part, **self._mark}, token)
        except CheckpointError as error:  # out of memory
            self._failed(part, place, step, error)

    def publish(self, step: int) -> None:
        """Commit copies that were begun before ``step`` once they are written, and report failures."""
        for part, place in self._slots.items():
            begun = place.writer.step
            if begun is not None and begun < step:
                place.writer.commit(self._job.comm.generation)
            for outcome in place.writer.poll():
                self._on_outcome(part, place, outcome)

    def close(self) -> None:
        """Stop writing: training has ended."""
        ends_s = time.monotonic() + _LAST_WRITE_S
        for place in self._slots.values():
            place.writer.close(max(0.0, ends_s - time.monotonic()))
        self._slots = {}

    def _on_outcome(self, part: int, place: _Place, outcome: WriteResult) -> None:
        if outcome.error is not None:
            self._failed(part, place, outcome.step, outcome.error)
        elif outcome.saved is not None:
            place.has_failed = False

    def _failed(self, part: int, place: _Place, step: int, error: Exception) -> None:
        """Warn of the first of several failures in a row: there may be one every few steps until the disk is fixed."""
        if not place.has_failed:
            self._warn(
                f"cannot write the copy of part {part} before step {step}: {error}. Training continues, and tries again"
            )
        place.has_failed = True

    def _prune(self, checkpoints: CheckpointStore) -> None:
        """Keep as many copies of this job as needed if one is damaged, and none of others; called in the background."""
        ours: list[int] = []
        for step in checkpoints.steps():
            try:
                is_ours = self._is_ours(checkpoints, step)
            except (CheckpointCorrupt, CheckpointMissing):
                continue  # its job is unknown, and a user may want to inspect it
            if is_ours:
                ours.append(step)
            else:
                checkpoints.remove(step)
        for step in to_remove(ours, LEAST):
            checkpoints.remove(step)

    # -- reading

    def newest(self, part: int) -> LoadedCheckpoint | None:
        """Return the newest intact copy of a part that this start of the job wrote; None if there is none."""
        if not self._job.settings.checkpoint_dir:
            return None
        try:
            return self._newest(part, self._checkpoints(part))
        except CheckpointError as error:
            self._warn(f"cannot read the copies of part {part} on disk: {error}")
            return None

    def _newest(self, part: int, checkpoints: CheckpointStore) -> LoadedCheckpoint | None:
        for step in reversed(checkpoints.steps()):
            try:
                if self._is_ours(checkpoints, step):
                    return checkpoints.load(step)
            except CheckpointMissing:  # it was removed for a newer one meanwhile
                continue
            except CheckpointCorrupt as damage:
                self._warn(f"skipped the damaged copy of part {part} before step {step}: {damage}")
        return None

    def _checkpoints(self, part: int) -> CheckpointStore:
        settings = self._job.settings
        url = f"{settings.checkpoint_dir.rstrip('/')}/copies/part-{part}"
        return CheckpointStore(url, settings.checkpoint_format, settings.launch_dir)

    def _is_ours(self, checkpoints: CheckpointStore, step: int) -> bool:
        info = checkpoints.info(step)
        return {name: info.get(name) for name in self._mark} == self._mark
