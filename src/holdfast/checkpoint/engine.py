"""What a training session needs from whatever keeps its checkpoints, and the one that keeps them in a local directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.checkpoint.load import Loaded, load, newest_intact, steps
from holdfast.checkpoint.save import SavedCheckpoint, write_tensors
from holdfast.errors import CheckpointCorrupt


class Pending(Protocol):
    """Tensors that are safely stored and do not count yet."""

    @property
    def step(self) -> int:
        """Steps that the state has behind it."""
        ...

    def commit(self, generation: int) -> SavedCheckpoint:
        """Make the checkpoint complete; call it when the step is stable, once."""
        ...

    def abandon(self) -> None:
        """Remove what was stored; does nothing after :meth:`commit`."""
        ...


class Checkpoints(Protocol):
    """Keeps checkpoints. One process at a time writes; anybody may read at any moment.

    A checkpoint is complete when ``commit`` has begun to return, and at no moment is a step that was
    complete incomplete. Nothing that is read is ever executed.
    """

    def write_tensors(self, step: int, state: Any, info: dict[str, Any]) -> Pending:
        """Store a copy of ``state``; it may change as soon as this returns."""
        ...

    def newest_intact(self, on_damaged: Callable[[int, CheckpointCorrupt], None] | None = None) -> int | None:
        """Return the newest step that is complete and undamaged."""
        ...

    def load(self, step: int) -> Loaded:
        """Read a checkpoint and check every byte of it."""
        ...

    def steps(self) -> list[int]:
        """Return the complete steps, in order."""
        ...


@dataclass(frozen=True, slots=True)
class LocalCheckpoints:
    """Checkpoints in a local directory; see :class:`Checkpoints` for what each method promises.

    Args:
        root: The directory; made by the first save.
    """

    root: Path

    def write_tensors(self, step: int, state: Any, info: dict[str, Any]) -> Pending:
        """See :func:`holdfast.checkpoint.save.write_tensors`."""
        return write_tensors(self.root, step, state, info)

    def newest_intact(self, on_damaged: Callable[[int, CheckpointCorrupt], None] | None = None) -> int | None:
        """See :func:`holdfast.checkpoint.load.newest_intact`."""
        return newest_intact(self.root, on_damaged)

    def load(self, step: int) -> Loaded:
        """See :func:`holdfast.checkpoint.load.load`."""
        return load(self.root, step)

    def steps(self) -> list[int]:
        """See :func:`holdfast.checkpoint.load.steps`."""
        return steps(self.root)
