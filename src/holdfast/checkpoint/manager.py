"""All checkpoints of a run: the interface for sessions, commands and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint import loading
from holdfast.checkpoint.loading import LoadedCheckpoint, OnDamaged
from holdfast.checkpoint.parts import Wanted
from holdfast.checkpoint.reuse import BlockReuse
from holdfast.checkpoint.save import PendingCheckpoint, discard, remove, write
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.write_plan import WritePlan, take


class CheckpointStore:
    """All checkpoints of a run. One step at a time is written; reading is possible at any moment.

    A checkpoint is complete once ``commit`` has begun to return. A complete step never becomes
    incomplete in between. Nothing that is read is ever executed.

    Args:
        url: A directory, or a URL such as ``s3://bucket/run``.
        format: Format to write; any format can be read.
        base: Directory to which a relative ``url`` refers; "": the working directory.

    Raises:
        ConfigError: if the URL cannot be used.
    """

    def __init__(self, url: str | Path, format: str = "safetensors", base: str = "") -> None:
        self.storage = open_storage(url, base)
        self._format = format
        self._clean: set[int] = set()
        """See :class:`~holdfast.checkpoint.save.PendingCheckpoint`."""

    @property
    def url(self) -> str:
        """The directory or URL, for messages."""
        return self.storage.url

    def write(
        self, step: int, content: WritePlan, info: dict[str, Any], token: str = "", reuse: BlockReuse | None = None
    ) -> PendingCheckpoint:
        """See :func:`holdfast.checkpoint.save.write`."""
        return write(
            self.storage, step, content, info, format=self._format, token=token, clean=self._clean, reuse=reuse
        )

    def write_tensors(self, step: int, state: Any, info: dict[str, Any]) -> PendingCheckpoint:
        """See :func:`holdfast.checkpoint.save.write_tensors`."""
        return self.write(step, take(state), info)

    def newest_intact(self, on_damaged: OnDamaged | None = None) -> int | None:
        """See :func:`holdfast.checkpoint.loading.newest_intact`."""
        return loading.newest_intact(self.storage, on_damaged)

    def load_newest(self, on_damaged: OnDamaged | None = None, into: Any = None) -> LoadedCheckpoint | None:
        """See :func:`holdfast.checkpoint.loading.load_newest`."""
        return loading.load_newest(self.storage, on_damaged, into)

    def load(self, step: int, into: Any = None, only: Wanted | None = None) -> LoadedCheckpoint:
        """See :func:`holdfast.checkpoint.loading.load`."""
        return loading.load(self.storage, step, into, only)

    def info(self, step: int) -> dict[str, Any]:
        """Return the metadata saved with the state, without reading the state; see :func:`~holdfast.checkpoint.loading.read_manifest`."""
        return loading.read_manifest(self.storage, step).info

    def steps(self) -> list[int]:
        """See :func:`holdfast.checkpoint.loading.steps`."""
        return loading.steps(self.storage)

    def steps_to_prune(self) -> list[int]:
        """Return the complete steps after completing one here, without listing every folder again.

        There may be thousands: a step that was complete at the previous call and still exists counts as complete.
        """
        return loading.steps(self.storage, known=self._clean)

    def discard(self, step: int, token: str) -> None:
        """See :func:`holdfast.checkpoint.save.discard`."""
        discard(self.storage, step, token)

    def remove(self, step: int) -> None:
        """Remove a step: its manifest first, so that a half-removed checkpoint is never found."""
        self._clean.discard(step)
        remove(self.storage, step)
