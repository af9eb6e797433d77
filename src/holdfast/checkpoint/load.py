"""Reading checkpoints: every byte is checked, and what is damaged is named."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import storage
from holdfast.checkpoint.format import unflatten
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest, parse
from holdfast.checkpoint.tensors import FORMATS
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory.

    Args:
        step: Steps that the state has behind it.
        state: As it was saved; tensors are on the CPU and have memory of their own.
        info: As it was saved.
        generation: How many communicators there had been when it was completed.
    """

    step: int
    state: Any
    info: dict[str, Any]
    generation: int


def steps(root: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, in order. Whether they are intact, it does not look.

    Raises:
        CheckpointError: if ``root`` is there and cannot be listed.
    """
    try:
        named = (step for entry in root.iterdir() if (step := storage.step_of(entry.name)) is not None)
        return sorted(step for step in named if (storage.step_dir(root, step) / MANIFEST_NAME).exists())
    except FileNotFoundError:
        return []
    except OSError as error:
        msg = f"cannot list the checkpoints in {root}: {error.strerror}; give a directory that this user may read"
        raise CheckpointError(msg) from error


def newest_intact(root: Path, on_damaged: Callable[[int, CheckpointCorrupt], None] | None = None) -> int | None:
    """Return the newest step whose checkpoint is complete and undamaged; reads every byte of it.

    Args:
        root: The directory of all checkpoints.
        on_damaged: Is told of each damaged checkpoint that is passed over, newest first.

    Returns:
        The step, or None if there is none.

    Raises:
        CheckpointError: if a checkpoint may not be read by this user: that is no damage.
    """
    for step in reversed(steps(root)):
        try:
            verify(root, step)
        except CheckpointCorrupt as error:
            if on_damaged is not None:
                on_damaged(step, error)
        except CheckpointMissing:
            continue  # somebody removed it since it was listed
        else:
            return step
    return None


def verify(root: Path, step: int) -> Manifest:
    """Read every byte of a checkpoint, holding one tensor at a time; return its manifest.

    Raises:
        CheckpointCorrupt: if it is not what was saved; the message names the tensor and its byte range.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    manifest, _ = _read(root, step, keep=False)
    return manifest


def load(root: Path, step: int) -> Loaded:
    """Read a checkpoint.

    Raises:
        CheckpointCorrupt: if it is not what was saved; the message names the tensor and its byte range.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    manifest, tensors = _read(root, step, keep=True)
    state = unflatten(tensors, manifest.skeleton)
    return Loaded(step=step, state=state, info=manifest.info, generation=manifest.generation)


def read_manifest(root: Path, step: int) -> Manifest:
    """Return what a checkpoint holds, without looking at its tensors.

    Raises:
        CheckpointCorrupt: if the manifest is not what was written.
        CheckpointMissing: if there is none.
    """
    with _placed(root, step):
        return _parse(step, _manifest_bytes(root, step))


def _read(root: Path, step: int, *, keep: bool) -> tuple[Manifest, dict[str, torch.Tensor]]:
    with _placed(root, step):
        data = _manifest_bytes(root, step)
        while True:
            try:
                return _read_all(root, step, data, keep=keep)
            except CheckpointCorrupt:
                again = _manifest_bytes(root, step)
                if again == data:
                    raise
                # Saved anew while we read: the old tensors are gone, and nothing is damaged.
                data = again


def _read_all(root: Path, step: int, data: bytes, *, keep: bool) -> tuple[Manifest, dict[str, torch.Tensor]]:
    manifest = _parse(step, data)
    with storage.opened(storage.step_dir(root, step) / manifest.file) as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest.file_bytes:
            msg = f"{manifest.file} has {size} bytes, the manifest says {manifest.file_bytes}"
            raise CheckpointCorrupt(msg)
        read = FORMATS[manifest.format].read(file, manifest)
        if keep:
            return manifest, dict(read)
        deque(read, maxlen=0)
    return manifest, {}


def _parse(step: int, data: bytes) -> Manifest:
    manifest = parse(data)
    if manifest.step != step:
        msg = f"manifest, step: says {manifest.step}, but its directory is that of step {step}"
        raise CheckpointCorrupt(msg)
    if manifest.format not in FORMATS:
        msg = f"manifest, format: must be one of {', '.join(FORMATS)}, is {manifest.format!r}"
        raise CheckpointCorrupt(msg)
    # Tried with one stand-in for all tensors, so that what verifies can also be put together.
    unflatten(dict.fromkeys(manifest.tensors, torch.empty(0)), manifest.skeleton)
    return manifest


def _manifest_bytes(root: Path, step: int) -> bytes:
    path = storage.step_dir(root, step) / MANIFEST_NAME
    if not os.path.lexists(path):
        msg = (
            f"there is no complete checkpoint of step {step} in {root}, there are {steps(root) or 'none'}; "
            "ask for one of these"
        )
        raise CheckpointMissing(msg)
    with storage.opened(path) as file:
        return file.read()


@contextmanager
def _placed(root: Path, step: int) -> Iterator[None]:
    try:
        yield
    except CheckpointCorrupt as error:
        msg = (
            f"the checkpoint of step {step} in {root} is damaged: {error}. "
            "Load an older step, and remove this one when you have looked at it"
        )
        raise CheckpointCorrupt(msg) from error
