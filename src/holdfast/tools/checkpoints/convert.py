"""Converts a state into another format or location, and verifies that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from holdfast.checkpoint.files.registry import check_format
from holdfast.checkpoint.loading import steps, verify
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.save import SavedCheckpoint, remove, write
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.write_plan import WritePlan, take
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError
from holdfast.tools.checkpoints.source import tensor_digest
from holdfast.tools.formats.base import TensorSource


def convert(
    source: TensorSource, storage: Storage, format: str, tell: Callable[[int], None] = lambda size: None
) -> SavedCheckpoint:
    """Write the content of a source as a checkpoint in another format; read it back, and compare the digests.

    Args:
        source: A checkpoint, or a file of another program.
        storage: The destination; must not contain this step. A file without a step becomes step 0.
        format: One of :func:`~holdfast.checkpoint.files.registry.format_names`.
        tell: Called with the bytes of each block that is written, from any thread.

    Raises:
        ConfigError: if the step exists already, or the format is unknown.
        CheckpointCorrupt: if the source is damaged, or the data read back differ; the new checkpoint is removed.
        CheckpointError: if the format cannot hold a tensor, or the storage rejects it.
    """
    check_format(format, "the format")
    step = source.step or 0
    if step in steps(storage):
        raise ConfigError(
            f"a checkpoint of step {step} already exists in {storage.url}; choose another directory, or remove it first"
        )
    content = take(source.load())
    wanted = _digests(source, content)
    old = source.manifest
    info = {"converted_from": PurePath(source.name).name} if old is None else old.info
    pending = write(storage, step, content, info, format=format, tell=tell)
    try:
        _check(pending.manifest, wanted)
    except CheckpointError:
        pending.abandon()
        raise
    saved = pending.commit(0 if old is None else old.generation)
    try:
        _check(verify(storage, step), wanted)
    except CheckpointError:
        remove(storage, step)
        raise
    return saved


def _digests(source: TensorSource, content: WritePlan) -> dict[str, str]:
    """Return the expected digest of each tensor: from the old manifest, if it has the tensor in one piece."""
    old = {} if source.manifest is None else source.manifest.tensors
    return {
        box.path: old[box.path].xxh3
        if box.path in old and len(old[box.path].pieces) == 1
        else tensor_digest(box.tensor)
        for box in content.boxes
    }


def _check(manifest: Manifest, wanted: dict[str, str]) -> None:
    digests = {path: entry.xxh3 for path, entry in manifest.tensors.items()}
    if digests != wanted:
        wrong = next(path for path in {**wanted, **digests} if wanted.get(path) != digests.get(path))
        raise CheckpointCorrupt(
            f"the tensor {wrong!r:.80} has the digest {digests.get(wrong)} after converting, it had {wanted.get(wrong)}; "
            "the new checkpoint was removed; check this machine's memory"
        )
