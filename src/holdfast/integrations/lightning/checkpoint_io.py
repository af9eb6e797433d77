"""Checkpoints with a digest, for every Lightning user, also without the rest of Holdfast.

A checkpoint is the file that Lightning would write, and beside it a file with its size and sha256. Both are written under
other names first. Nothing is unpickled before its digest has been verified.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from holdfast.errors import CheckpointCorrupt, CheckpointMissing

SIDECAR = ".digest.json"
"""Ending of the name of the file with the digest."""
_TEMPORARY = ".holdfast-tmp"


class HoldfastCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically with a sha256; a damaged one is replaced by the newest intact one beside it.

    ::

        trainer = Trainer(plugins=[HoldfastCheckpointIO()])

    Works with any strategy that saves one file. Checkpoints are in a local or mounted directory.

    Args:
        fallback: Load the newest intact checkpoint of the same directory if the requested one is damaged, or was not
            completely saved.
        require_digest: Refuse checkpoints without a digest, such as those that plain Lightning has saved.
    """

    def __init__(self, *, fallback: bool = True, require_digest: bool = True) -> None:
        self._fallback = fallback
        self._require_digest = require_digest

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint and its digest; until both are complete, a checkpoint of this name stays as it was.

        Args:
            checkpoint: What Lightning saves.
            path: The file.
            storage_options: Must be None.

        Raises:
            TypeError: if ``storage_options`` are given.
        """
        if storage_options is not None:
            raise TypeError("HoldfastCheckpointIO has no storage_options: leave them out")
        target = _local(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getbuffer()
        new = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for other in target.parent.glob(f"{target.name}*{_TEMPORARY}"):
            other.unlink(missing_ok=True)  # of a process that was killed while it saved
        before = _records(target)
        written = _write(target, data)
        if before:  # wherever a kill strikes from here on, the file has one of the digests
            _describe(target, [new, *before])
        written.replace(target)
        _describe(target, [new])
        _sync_directory(target.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint once its digest is verified; if it is damaged, the newest intact one beside it.

        Args:
            path: The file.
            map_location: As of ``torch.load``; None: tensors stay where they were saved.
            weights_only: As of ``torch.load``.

        Raises:
            CheckpointCorrupt: if neither it nor a checkpoint beside it is intact.
            FileNotFoundError: if it does not exist and no checkpoint beside it is intact.
        """
        target = _local(path)
        try:
            data = verified(target, require_digest=self._require_digest)
        except (CheckpointCorrupt, CheckpointMissing) as damage:
            target, data = self._intact_sibling(target, damage)
        where = (lambda storage, _: storage) if map_location is None else map_location
        loaded: dict[str, Any] = torch.load(io.BytesIO(data), map_location=where, weights_only=weights_only)
        return loaded

    def _intact_sibling(self, target: Path, damage: CheckpointCorrupt | CheckpointMissing) -> tuple[Path, bytes]:
        # A name that was never saved is a mistake, and no reason to load another checkpoint.
        was_saving = any(target.parent.glob(f"{target.name}*{_TEMPORARY}"))
        may_fall_back = self._fallback and (isinstance(damage, CheckpointCorrupt) or was_saving)
        for other in _siblings(target) if may_fall_back else ():
            try:
                data = verified(other)
            except (CheckpointCorrupt, CheckpointMissing) as also:
                sys.stderr.write(f"holdfast: skipped {other}: {also}\n")
                continue
            sys.stderr.write(f"holdfast: {damage}; loading {other} instead, the newest intact checkpoint beside it\n")
            return other, data
        if isinstance(damage, CheckpointMissing):
            raise FileNotFoundError(f"Checkpoint file not found: {target}") from damage
        raise damage

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its digest; does nothing if it does not exist."""
        target = _local(path)
        target.unlink(missing_ok=True)
        _sidecar(target).unlink(missing_ok=True)


def verified(path: Path, *, require_digest: bool = True) -> bytes:
    """Return the content of a checkpoint.

    Args:
        path: The file.
        require_digest: Without it, a file that has no digest is returned as it is.

    Raises:
        CheckpointMissing: if there is no such file.
        CheckpointCorrupt: if it has no digest, or another content than the one that was saved.
    """
    path = path.resolve()  # ModelCheckpoint(save_last="link") makes a link, beside which there is no digest
    if not path.is_file():
        raise CheckpointMissing(f"{path} does not exist")
    records, data = _records(path), path.read_bytes()
    if not records and not require_digest and not _sidecar(path).exists():
        return data
    if not records:
        raise CheckpointCorrupt(
            f"{path} has no digest in {_sidecar(path).name}; HoldfastCheckpointIO(require_digest=False) loads a checkpoint"
            " that was saved without one"
        )
    if {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} not in records:
        raise CheckpointCorrupt(f"{path} is damaged: its content is not what was saved")
    return data


def _records(path: Path) -> list[Any]:
    """Return the digests that a checkpoint may have; none if they are missing or damaged."""
    try:
        records = json.loads(_sidecar(path).read_text())
    except (FileNotFoundError, ValueError):
        return []
    return records if isinstance(records, list) else []


def _describe(path: Path, records: list[Any]) -> None:
    sidecar = _sidecar(path)
    _write(sidecar, json.dumps(records).encode()).replace(sidecar)


def is_intact(path: str | Path) -> bool:
    """Return whether a checkpoint exists and has the content that was saved."""
    try:
        verified(_local(path))
    except (CheckpointCorrupt, CheckpointMissing):
        return False
    return True


def _siblings(target: Path) -> list[Path]:
    """Return the other checkpoints of the directory that have a digest, the newest first."""
    if not target.parent.is_dir():
        return []
    described = [path.with_name(path.name.removesuffix(SIDECAR)) for path in target.parent.glob(f"*{SIDECAR}")]
    siblings = [path for path in described if path != target and path.is_file()]
    return sorted(siblings, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR)


def _local(path: str | Path) -> Path:
    text = str(path)
    if re.match(r"^(?!file:)\w[\w+.-]*://", text):
        raise ValueError(f"HoldfastCheckpointIO writes to local or mounted directories, got {text}")
    return Path(text.removeprefix("file://"))


def _write(target: Path, data: bytes | memoryview) -> Path:
    """Write ``data`` to a temporary file beside ``target``, down to the disk, and return its path."""
    path = target.with_name(f"{target.name}.{os.getpid()}{_TEMPORARY}")
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def _sync_directory(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
