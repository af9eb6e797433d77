"""Lists a directory of checkpoints: steps and incomplete attempts; and applies the retention policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint.loading import OnDamaged, find_damage, newest_intact, read_manifest, steps
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest
from holdfast.checkpoint.retention import to_remove
from holdfast.checkpoint.save import remove
from holdfast.checkpoint.storage import Storage, step_folder, step_of
from holdfast.checkpoint.values import DamagedBytes
from holdfast.errors import CheckpointCorrupt, CheckpointMissing
from holdfast.tools.checkpoints.source import written_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """The result of examining a complete checkpoint."""

    step: int  # Its step
    manifest: Manifest | None  # Its content; None if the manifest cannot be read
    damage: tuple[DamagedBytes, ...]  # All damage found
    was_read: bool  # Whether every byte was read; otherwise only the manifest was
    written_s: float | None  # Time of completion, seconds since 1970; None if the storage does not record it


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteCheckpoint:
    """Files that belong to no complete checkpoint: its writer was killed, or is still writing."""

    step: int  # Its step
    folder: str  # Path below the root
    size_bytes: int  # Total size of its files, but not of those that a checkpoint shares


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """The checkpoints and attempts that were removed, or would be in a dry run."""

    steps: tuple[int, ...]  # Removed checkpoints
    attempts: tuple[IncompleteCheckpoint, ...]  # Removed incomplete attempts, all older than the newest complete step
    kept: tuple[int, ...]  # Remaining checkpoints
    damaged: tuple[int, ...]  # Those of them that were found damaged; only the newest are read
    freed_bytes: int  # Total size of everything removed, but not of files that several checkpoints share


def bytes_of(storage: Storage, step: int | None = None) -> int:
    """Return the size of a checkpoint, or of all, as far as manifests can be read."""
    total = 0
    for each in steps(storage) if step is None else [step]:
        with contextlib.suppress(CheckpointCorrupt, CheckpointMissing):
            total += read_manifest(storage, each).size_bytes
    return total


def examine(storage: Storage, step: int, *, read_all: bool = True) -> CheckpointStatus:
    """Examine a checkpoint: every byte of it, or only its manifest.

    Raises:
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    manifest: Manifest | None = None
    damage: list[DamagedBytes] = []
    try:
        if read_all:
            manifest, damage = find_damage(storage, step)
        else:
            manifest = read_manifest(storage, step)
    except CheckpointCorrupt as error:
        damage = [DamagedBytes(tensor="", file=MANIFEST_NAME, start=0, end=0, what=str(error.__cause__ or error))]
    return CheckpointStatus(
        step=step, manifest=manifest, damage=tuple(damage), was_read=read_all, written_s=written_s(storage, step)
    )


def examine_all(storage: Storage, now: Callable[[int], None], *, read_all: bool = True) -> list[CheckpointStatus]:
    """Examine all checkpoints in order, calling ``now`` with each step; steps that a running job removes meanwhile are omitted."""
    statuses = []
    for step in steps(storage):
        now(step)
        try:
            statuses.append(examine(storage, step, read_all=read_all))
        except CheckpointMissing:
            continue
    return statuses


def attempts(storage: Storage) -> list[IncompleteCheckpoint]:
    """Return all incomplete attempts, oldest step first."""
    folders: list[tuple[int, str]] = []
    for name in storage.names(""):
        step = step_of(name)
        if step is None:
            continue
        inside = storage.names(name)
        if MANIFEST_NAME not in inside:
            folders.append((step, name))
            continue
        try:
            own_folder = read_manifest(storage, step).folder
        except (CheckpointCorrupt, CheckpointMissing):
            continue  # which of its folders is the checkpoint's own is unknown
        folders += [(step, f"{name}/{other}") for other in inside if other.startswith("data-") and other != own_folder]
    return [
        IncompleteCheckpoint(step=step, folder=folder, size_bytes=folder_bytes(storage, folder))
        for step, folder in sorted(folders)
    ]


def folder_bytes(storage: Storage, folder: str) -> int:
    """Return the total size of the files of a step, or of one of its folders, but not of those that other folders share."""
    total = 0
    for name in storage.names(folder):
        path = f"{folder}/{name}"
        if name.startswith("data-"):
            total += folder_bytes(storage, path)
            continue
        try:
            with storage.reader(path) as file:
                total += file.size_bytes if file.num_names == 1 else 0
        except CheckpointCorrupt:
            continue  # removed since it was listed, or not a plain file
    return total


def prune(
    storage: Storage,
    keep_last: int,
    keep_every: int = 0,
    *,
    dry_run: bool = False,
    on_damaged: OnDamaged = lambda step, error: None,
) -> PruneResult:
    """Remove checkpoints that need not be kept, and attempts that will never be completed.

    The newest intact checkpoint always stays: before anything is removed, steps are read from the newest on until
    one is intact.

    Args:
        storage: The storage of the checkpoints.
        keep_last: Number of newest checkpoints that stay, ``>= 2``.
        keep_every: Steps divisible by this number stay, too; 0: none.
        dry_run: Remove nothing, only report what would be removed.
        on_damaged: Called with each damaged checkpoint.

    Raises:
        CheckpointCorrupt: if something would be removed and no checkpoint is intact.
        ConfigError: if a number is not allowed.
    """
    there = steps(storage)
    going = to_remove(there, keep_last, keep_every)
    damaged: list[int] = []

    def note(step: int, error: CheckpointCorrupt) -> None:
        damaged.append(step)
        on_damaged(step, error)

    if going:
        intact = newest_intact(storage, note)
        if intact is None:
            raise CheckpointCorrupt(
                f"none of the {len(there)} checkpoints in {storage.url} is intact; none was removed"
            )
        going = to_remove(there, keep_last, keep_every, intact)
    rubbish = [attempt for attempt in attempts(storage) if there and attempt.step < there[-1]]
    # An attempt inside a removed step is not counted twice.
    rubbish = [attempt for attempt in rubbish if attempt.step not in going]
    freed_bytes = sum(folder_bytes(storage, step_folder(step)) for step in going)
    if not dry_run:
        for step in going:
            remove(storage, step)
        for attempt in rubbish:
            storage.remove(attempt.folder)
    return PruneResult(
        steps=tuple(going),
        attempts=tuple(rubbish),
        kept=tuple(step for step in there if step not in going),
        damaged=tuple(sorted(damaged)),
        freed_bytes=freed_bytes + sum(attempt.size_bytes for attempt in rubbish),
    )
