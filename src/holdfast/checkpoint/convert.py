"""The same state in another format, or in another place: nothing about it may change, and that is checked."""

from __future__ import annotations

from pathlib import PurePath

from holdfast.checkpoint.files.base import Source
from holdfast.checkpoint.files.kinds import FORMATS
from holdfast.checkpoint.loading import steps, verify
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.save import SavedCheckpoint, remove, write
from holdfast.checkpoint.source import tensor_digest
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.write_plan import Content, take
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError


def convert(source: Source, storage: Storage, format: str) -> SavedCheckpoint:
    """Write what a source holds as a checkpoint of another format; read it again, and compare the digests.

    Args:
        source: A checkpoint, or another program's file.
        storage: Where to; must not hold this step. A file that names no step becomes step 0.
        format: One of :data:`~holdfast.checkpoint.files.kinds.FORMATS`.

    Raises:
        ConfigError: if the step is there already, or there is no such format.
        CheckpointCorrupt: if the source is damaged, or what was written is not what was read; it is removed again.
        CheckpointError: if the format cannot hold a tensor, or the storage does not take it.
    """
    check_format(format)
    step = source.step or 0
    if step in steps(storage):
        raise ConfigError(
            f"there is a checkpoint of step {step} in {storage.url} already; name another place, or remove it first"
        )
    content = take(source.load())
    wanted = _digests(source, content)
    old = source.manifest
    info = {"converted_from": PurePath(source.name).name} if old is None else old.info
    pending = write(storage, step, content, info, format=format)
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


def check_format(format: str) -> None:
    """Refuse a format that there is not."""
    if format not in FORMATS:
        raise ConfigError(f"the format must be one of {', '.join(FORMATS)}, got {format!r}")


def _digests(source: Source, content: Content) -> dict[str, str]:
    """Return what each tensor's digest must be: what the old manifest says, where it has the tensor in one piece."""
    old = {} if source.manifest is None else source.manifest.tensors
    return {
        box.path: old[box.path].xxh3
        if box.path in old and len(old[box.path].pieces) == 1
        else tensor_digest(box.tensor)
        for box in content.boxes
    }


def _check(manifest: Manifest, wanted: dict[str, str]) -> None:
    found = {path: entry.xxh3 for path, entry in manifest.tensors.items()}
    if found != wanted:
        wrong = next(path for path in {**wanted, **found} if wanted.get(path) != found.get(path))
        raise CheckpointCorrupt(
            f"the tensor {wrong!r:.80} has the digest {found.get(wrong)} after converting, it had {wanted.get(wrong)}; "
            "the new checkpoint was removed. Is the memory of this machine sound?"
        )
