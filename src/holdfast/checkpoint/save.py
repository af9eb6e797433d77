"""Writing a checkpoint in two acts: tensors first, the manifest when the step is known to be stable.

Between the acts, and after a death at any moment, a reader sees what it saw before. The same is true
when a step that is complete already is saved again: its new tensors come to lie beside the old ones, and
one rename of the manifest turns the old checkpoint into the new one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from holdfast import points
from holdfast.checkpoint import storage
from holdfast.checkpoint.format import flatten
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest, check_info, dump, versions
from holdfast.checkpoint.tensors import FORMATS, TensorFile
from holdfast.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint.

    Args:
        path: Its directory.
        step: Steps that the state has behind it.
        size_bytes: Of its files together.
    """

    path: Path
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """Tensors that are safely on disk and do not count yet: nobody loads them.

    Args:
        root: The directory of all checkpoints.
        attempt: Where the tensors are until then.
        manifest: What the manifest will say; its generation is not known yet.
    """

    root: Path
    attempt: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Steps that the state has behind it."""
        return self.manifest.step

    def commit(self, generation: int) -> SavedCheckpoint:
        """Make the checkpoint complete. Call it when the step is stable, once.

        Args:
            generation: How many communicators there have been; it is written into the manifest.

        Raises:
            CheckpointError: if it cannot be written, or its files are gone because it was abandoned,
                committed before, or overtaken by another worker.
        """
        if generation < 0:
            msg = f"generation must be at least 0, got {generation}"
            raise ConfigError(msg)
        final = storage.step_dir(self.root, self.step)
        data = dump(dataclasses.replace(self.manifest, generation=generation))
        with storage.explained(f"complete the checkpoint of step {self.step} in", final):
            self._move_tensors(final)
            _replace_manifest(final, data)
        points.reach("checkpoint.committed")
        self._tidy(final)
        return SavedCheckpoint(path=final, step=self.step, size_bytes=self.manifest.file_bytes + len(data))

    def abandon(self) -> None:
        """Remove what was written. Does nothing after :meth:`commit`, or the second time.

        Raises:
            CheckpointError: if it cannot be removed.
        """
        with storage.explained("remove", self.attempt):
            (self.attempt / self.manifest.file).unlink(missing_ok=True)
            # A later attempt at the same step may have taken the directory over.
            if self.attempt.is_dir() and not any(self.attempt.iterdir()):
                self.attempt.rmdir()

    def _move_tensors(self, final: Path) -> None:
        source = self.attempt / self.manifest.file
        if not source.is_file():
            msg = (
                f"cannot complete the checkpoint of step {self.step}: its tensors are not in {source.parent} any more. "
                "A pending checkpoint can be committed once, and not after abandon() or after another worker "
                "completed the step; write the tensors again"
            )
            raise CheckpointError(msg)
        storage.make_dir(final)
        source.replace(final / self.manifest.file)
        storage.sync_dir(final)

    def _tidy(self, final: Path) -> None:
        # The checkpoint is complete: rubbish that stays is worth a warning, not a failed run.
        try:
            storage.remove_tree(self.attempt)
            for entry in final.iterdir():
                if storage.is_ours(entry.name) and entry.name not in (MANIFEST_NAME, self.manifest.file):
                    entry.unlink(missing_ok=True)
            for attempt in storage.others_attempts(self.root, self.step):
                storage.remove_tree(attempt)
        except OSError as error:
            text = (
                f"the checkpoint of step {self.step} is complete, but leftovers beside it could not be removed: {error}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def write_tensors(root: Path, step: int, state: Any, info: dict[str, Any]) -> PendingCheckpoint:
    """Write the tensors of a checkpoint and wait until they are on the disk.

    Everything is taken from ``state`` and ``info`` before the call returns; they may change afterwards.

    Args:
        root: The directory of all checkpoints; made if it is not there. One process at a time writes to it.
        step: Steps that the state has behind it, at least 0.
        state: See :func:`~holdfast.checkpoint.format.flatten`.
        info: Anything else worth knowing, plain JSON.

    Returns:
        The checkpoint, still to be completed.

    Raises:
        CheckpointError: if the state holds something that is not data, or the disk does not take it. What
            was complete before still is.
    """
    if step < 0:
        msg = f"step must be at least 0, got {step}"
        raise ConfigError(msg)
    points.reach("checkpoint.begin")
    check_info(info)
    tensors, skeleton = flatten(state)
    attempt = storage.attempt_dir(root, step)
    try:
        with storage.explained(f"write the checkpoint of step {step} to", attempt):
            name, written = _write_attempt(root, attempt, tensors)
    except BaseException:
        _discard(attempt)
        raise
    points.reach("checkpoint.tensors")
    manifest = Manifest(
        step=step,
        generation=0,
        format="safetensors",
        file=name,
        file_bytes=written.file_bytes,
        header_bytes=written.header_bytes,
        header_xxh3=written.header_xxh3,
        tensors=written.tensors,
        skeleton=skeleton,
        info=json.loads(json.dumps(info)),
        versions=versions(),
    )
    return PendingCheckpoint(root=root, attempt=attempt, manifest=manifest)


def _write_attempt(root: Path, attempt: Path, tensors: dict[str, Any]) -> tuple[str, TensorFile]:
    engine = FORMATS["safetensors"]
    storage.make_dir(root)
    storage.make_fresh_dir(attempt)
    part = attempt / "part"
    written = engine.write(part, tensors)
    storage.sync_file(part)
    name = f"tensors-{_content_digest(written)}{engine.suffix}"
    part.replace(attempt / name)
    storage.sync_dir(attempt)
    return name, written


def _content_digest(written: TensorFile) -> str:
    # The file is named after what is in it, so that two attempts at one step never share a name unless
    # they share all bytes.
    digests = [written.header_xxh3, *(entry.xxh3 for entry in written.tensors.values())]
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _replace_manifest(final: Path, data: bytes) -> None:
    temporary = final / f"{MANIFEST_NAME}.tmp"
    storage.write_file(temporary, data)
    points.reach("checkpoint.manifest")
    os.replace(temporary, final / MANIFEST_NAME)
    storage.sync_dir(final)


def _discard(attempt: Path) -> None:
    if not attempt.is_dir():
        return
    try:
        storage.remove_tree(attempt)
    except OSError as error:
        warnings.warn(f"the failed attempt {attempt} could not be removed: {error}", RuntimeWarning, stacklevel=3)
