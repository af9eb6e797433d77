"""All checkpoints of a run: the interface for sessions, commands and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint import loading, save
from holdfast.checkpoint.reuse import BlockReuse
from holdfast.checkpoint.save import PendingCheckpoint
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

    newest_intact = loading.newest_intact
    load_newest = loading.load_newest
    load = loading.load
    steps = loading.steps
    discard = save.discard

    def __init__(self, url: str | Path, format: str = "safetensors", base: str = "") -> None:
        self.storage = open_storage(url, base)
        self.url = self.storage.url
        """The directory or URL, for messages."""
        self._format = format
        self.clean: set[int] = set()
        """Steps that are known to be complete; see :class:`~holdfast.checkpoint.save.PendingCheckpoint`."""

    def write(
        self, step: int, content: WritePlan, info: dict[str, Any], token: str = "", reuse: BlockReuse | None = None
    ) -> PendingCheckpoint:
        """See :func:`holdfast.checkpoint.save.write`."""
        return save.write(self, step, content, info, format=self._format, token=token, clean=self.clean, reuse=reuse)

    def write_tensors(self, step: int, state: Any, info: dict[str, Any]) -> PendingCheckpoint:
        """See :func:`holdfast.checkpoint.save.write_tensors`."""
        return self.write(step, take(state), info)

    def info(self, step: int) -> dict[str, Any]:
        """Return the metadata saved with the state, without reading the state; see :func:`~holdfast.checkpoint.loading.read_manifest`."""
        return loading.read_manifest(self, step).info

    def remove(self, step: int) -> None:
        """Remove a step: its manifest first, so that a half-removed checkpoint is never found."""
        self.clean.discard(step)
        save.remove(self, step)
