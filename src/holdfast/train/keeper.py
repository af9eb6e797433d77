"""When a checkpoint is taken, and when it may count: only once its step is stable."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint import Checkpoints, Loaded, LocalCheckpoints, Pending, SavedCheckpoint
from holdfast.errors import CheckpointCorrupt, ConfigError

DEFAULT_DIR = "holdfast-checkpoint"
"""Where a state is saved that must be saved although no place was named."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that counts from now on."""

    saved: SavedCheckpoint
    seconds: float


class Keeper:
    """Writes tensors at once and the manifest when it is told that the step is stable.

    Args:
        directory: Where checkpoints are, or "" for none.
        every: Steps between two, or 0 for none.
    """

    def __init__(self, directory: str, every: int) -> None:
        self._named = bool(directory)
        self._root = Path(directory or DEFAULT_DIR)
        self._every = every if directory else 0
        self._checkpoints: Checkpoints = LocalCheckpoints(self._root)
        self._pending: Pending | None = None
        self._seconds = 0.0

    @property
    def named(self) -> bool:
        """Whether the user named a directory."""
        return self._named

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def check_empty(self, *, ours: bool) -> None:
        """Make sure that a new run does not mix its checkpoints with those of an older one.

        Args:
            ours: What is there was written by this run.

        Raises:
            ConfigError: if the directory holds complete checkpoints.
        """
        old = self._checkpoints.steps() if self._named and not ours else []
        if old:
            msg = (
                f"checkpoint_dir {self._root} already holds a run up to step {max(old)}: "
                "go on with it (--resume), or name an empty directory"
            )
            raise ConfigError(msg)

    def is_due(self, step: int) -> bool:
        """Return whether the state before ``step`` is to be saved."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def begin(self, step: int, state: dict[str, Any], info: dict[str, Any]) -> None:
        """Write the tensors of the state before ``step``; it does not count yet."""
        if self._pending is not None and self._pending.step == step:
            return
        self.drop()
        start_s = time.monotonic()
        if not self._named and self._checkpoints.steps():
            self._root = Path(f"{DEFAULT_DIR}-{time.time_ns() // 1_000_000_000}")
            self._checkpoints = LocalCheckpoints(self._root)
        self._pending = self._checkpoints.write_tensors(step, state, info)
        self._seconds = time.monotonic() - start_s

    def publish(self, stable_step: int, generation: int) -> Kept | None:
        """Write the manifest, if the step before the pending one is stable."""
        pending = self._pending
        if pending is None or pending.step > stable_step + 1:
            return None
        start_s = time.monotonic()
        saved = pending.commit(generation)
        self._pending = None
        return Kept(saved, self._seconds + time.monotonic() - start_s)

    def drop(self) -> None:
        """Forget what does not count yet."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def newest(self, on_damaged: Callable[[int, CheckpointCorrupt], None]) -> int:
        """Return the newest step whose every byte is intact, or -1."""
        step = self._checkpoints.newest_intact(on_damaged) if self._named else None
        return -1 if step is None else step

    def load(self, step: int) -> Loaded:
        """Return the state before ``step``."""
        return self._checkpoints.load(step)
