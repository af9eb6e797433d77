"""The copies that backups keep, on the disk: for when all who held a part are dead, and all who had a copy of it.

The first living backup of a part writes the copy that it keeps as a checkpoint like any other, into
``<checkpoint-dir>/copies/part-<n>/``: as often as a whole copy's bytes are sent to it, or as often as the disk can take it.
The loop is held while the copy is copied once more, and never waits for the disk. What was written counts when the step in
which it was begun is closed: nobody goes back before it.
What another job wrote there, or an earlier beginning of this one, is never restored from, and removed when there is
something newer. No error of a disk is more than a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import Checkpoints, Loaded, take
from holdfast.checkpoint.retention import LEAST, to_remove
from holdfast.checkpoint.writer import Outcome, Writer
from holdfast.comm import VirtualCommunicator
from holdfast.engine.context import World
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

_LAST_WRITE_S = 5.0
"""When training is over, how long a process waits for its disk: what is being written is needed no more."""


@dataclass(slots=True)
class _Place:
    """Where the copies of a part are written."""

    writer: Writer
    due: int = 0  # from which step on the next one is to be written
    has_failed: bool = False  # the last one could not be


class Copies:
    """Writes the copies of this worker's backups, and reads those that others wrote; without a checkpoint-dir it does neither."""

    def __init__(self, world: World, warn: Callable[[str], None]) -> None:
        self._world = world
        self._warn = warn
        self._places: dict[int, _Place] = {}

    @property
    def _mark(self) -> dict[str, Any]:
        """What tells the copies of this loop of this beginning of the job from others; it is written down beside them."""
        return {"token": f"{self._world.keeper.token:x}", "loop": self._world.loop}

    # -- writing

    def expect(self, parts: Collection[int]) -> None:
        """Write copies of these parts from now on, of each one as soon as may be, and of no others."""
        for part in self._places.keys() - set(parts):
            self._places.pop(part).writer.close()
        for part in parts if self._world.settings.checkpoint_dir else ():
            if part in self._places:
                self._places[part].due = 0
            else:
                self._places[part] = self._begin(self._checkpoints(part))

    def _begin(self, checkpoints: Checkpoints) -> _Place:
        background = not isinstance(self._world.comm, VirtualCommunicator)
        return _Place(Writer(checkpoints, background=background, after_commit=lambda: self._prune(checkpoints)))

    def write(self, part: int, step: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """Begin to write a copy of a part that is expected, if one is due and the last one is written; else it is due the next time.

        ``state`` returns the copy, as it is kept before ``step``. It may change when this returns.
        """
        place = self._places.get(part)
        if place is None or step < place.due or place.writer.step is not None:
            return
        every = self._world.settings.mirror_every
        place.due = (step // every + 1) * every
        token = f"{self._world.keeper.token:x}-{self._world.comm.generation}"
        try:
            place.writer.begin(step, take(state()), {"part": part, **self._mark}, token)
        except CheckpointError as error:  # there is no memory
            self._failed(part, place, step, error)

    def publish(self, step: int) -> None:
        """Let what was begun before ``step`` count as soon as it is written, and tell of what could not be."""
        for part, place in self._places.items():
            begun = place.writer.step
            if begun is not None and begun < step:
                place.writer.commit(self._world.comm.generation)
            for outcome in place.writer.poll():
                self._heard(part, place, outcome)

    def close(self) -> None:
        """Write no more: training is over."""
        ends_s = time.monotonic() + _LAST_WRITE_S
        for place in self._places.values():
            place.writer.close(max(0.0, ends_s - time.monotonic()))
        self._places = {}

    def _heard(self, part: int, place: _Place, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._failed(part, place, outcome.step, outcome.error)
        elif outcome.saved is not None:
            place.has_failed = False

    def _failed(self, part: int, place: _Place, step: int, error: Exception) -> None:
        """Tell of the first of several failures: there may be one every few steps until somebody mends the disk."""
        if not place.has_failed:
            self._warn(
                f"the copy of part {part} before step {step} could not be written: {error}. Training goes on, and it is tried again"
            )
        place.has_failed = True

    def _prune(self, checkpoints: Checkpoints) -> None:
        """Keep as many of ours as it takes where one is damaged, and none of others'; called beside the loop."""
        ours: list[int] = []
        for step in checkpoints.steps():
            try:
                is_ours = self._is_ours(checkpoints, step)
            except (CheckpointCorrupt, CheckpointMissing):
                continue  # nobody knows whose it is, and somebody may want to look at it
            if is_ours:
                ours.append(step)
            else:
                checkpoints.remove(step)
        for step in to_remove(ours, LEAST):
            checkpoints.remove(step)

    # -- reading

    def newest(self, part: int) -> Loaded | None:
        """Return the newest intact copy of a part of which this beginning of the job wrote one; None if there is none."""
        if not self._world.settings.checkpoint_dir:
            return None
        try:
            return self._newest(part, self._checkpoints(part))
        except CheckpointError as error:
            self._warn(f"the copies of part {part} on the disk cannot be read: {error}")
            return None

    def _newest(self, part: int, checkpoints: Checkpoints) -> Loaded | None:
        for step in reversed(checkpoints.steps()):
            try:
                if self._is_ours(checkpoints, step):
                    return checkpoints.load(step)
            except CheckpointMissing:  # it has made room for a newer one meanwhile
                continue
            except CheckpointCorrupt as damage:
                self._warn(f"passed over the copy of part {part} before step {step}: {damage}")
        return None

    def _checkpoints(self, part: int) -> Checkpoints:
        settings = self._world.settings
        return Checkpoints(f"{settings.checkpoint_dir.rstrip('/')}/copies/part-{part}", settings.checkpoint_format)

    def _is_ours(self, checkpoints: Checkpoints, step: int) -> bool:
        info = checkpoints.info(step)
        return {name: info.get(name) for name in self._mark} == self._mark
