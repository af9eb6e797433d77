"""Reading checkpoints: every byte is verified, and damage is located.

This module selects the checkpoint and provides the memory. ``values.py`` reads and verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from holdfast.checkpoint.files.registry import format_names, is_format
from holdfast.checkpoint.format import DTYPES, flatten, unflatten
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorEntry, parse
from holdfast.checkpoint.parts import Wanted, select
from holdfast.checkpoint.storage import Storage, Where, as_storage, step_folder, step_of
from holdfast.checkpoint.values import DamagedBytes, box_of, open_file, read_files
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

_Result = TypeVar("_Result")

OnDamaged = Callable[[int, CheckpointCorrupt], None]
"""Called with a damaged checkpoint's step and the error."""

_NAMED = 8
"""Up to this many steps are listed in messages; otherwise only half as many of the first and of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint in memory."""

    step: int  # Number of steps that the state contains
    state: Any  # As saved; tensors are on the CPU and own their memory
    info: dict[str, Any]  # As saved
    generation: int  # Generation of the communicator at completion


def steps(storage: Where, known: Container[int] = ()) -> list[int]:
    """Return the steps that have a complete checkpoint, in order, without checking that they are intact.

    Steps in ``known`` count as complete if their folder exists.

    Raises:
        CheckpointError: if the storage exists and cannot be listed.
    """
    storage = as_storage(storage)
    candidates = (step for name in storage.names("") if (step := step_of(name)) is not None)
    return sorted(step for step in candidates if step in known or MANIFEST_NAME in storage.names(step_folder(step)))


def newest_intact(storage: Where, on_damaged: OnDamaged | None = None) -> int | None:
    """Return the newest step whose checkpoint is complete and undamaged, or None; reads every byte of it.

    ``on_damaged`` is called with each damaged checkpoint that is skipped, newest first.

    Raises:
        CheckpointError: if this user lacks permission to read a checkpoint, which is no damage.
    """
    step: int | None = _newest(storage, on_damaged, lambda step: verify(storage, step).step)
    return step


def load_newest(storage: Where, on_damaged: OnDamaged | None = None, into: Any = None) -> LoadedCheckpoint | None:
    """Load the newest complete and undamaged checkpoint, reading each byte once; see :func:`load`."""
    loaded: LoadedCheckpoint | None = _newest(storage, on_damaged, lambda step: load(storage, step, into))
    return loaded


def _newest(storage: Where, on_damaged: OnDamaged | None, read: Callable[[int], Any]) -> Any:
    storage = as_storage(storage)
    passed: set[int] = set()
    # Listed again each time: a step may have been removed meanwhile, because a newer one was completed. Twice where there
    # is none: a listing of a directory that changes meanwhile may miss both the one that goes and the one that comes.
    while left := _left(storage, passed) or _left(storage, passed):
        step = left[-1]
        passed.add(step)
        try:
            return read(step)
        except CheckpointMissing:
            continue
        except CheckpointCorrupt as error:
            if on_damaged is not None:
                on_damaged(step, error)
    return None


def _left(storage: Storage, passed: Container[int]) -> list[int]:
    return [step for step in steps(storage) if step not in passed]


def verify(storage: Where, step: int) -> Manifest:
    """Read every byte of a checkpoint, holding a few blocks at a time; return its manifest.

    Raises:
        CheckpointCorrupt: if it differs from what was saved; the message names the tensor and its byte range.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    return _read(storage, step, lambda manifest: read_files(storage, manifest, lambda _: {}))[0]


def find_damage(storage: Where, step: int) -> tuple[Manifest, list[DamagedBytes]]:
    """Read every byte of a checkpoint; return its manifest and all damage in its files.

    Raises:
        CheckpointCorrupt: if its manifest is damaged.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    manifest, _, damage = _settled(storage, step, lambda manifest: (None, _all_damage(storage, manifest)))
    return manifest, damage


def _all_damage(storage: Storage, manifest: Manifest) -> list[DamagedBytes]:
    gone = {name: why for name in manifest.files if (why := _why_gone(storage, manifest, name))}
    damage = [
        DamagedBytes(tensor="", file=name, start=0, end=manifest.files[name].size_bytes, what=why)
        for name, why in gone.items()
    ]
    tensors = {}
    for path, entry in manifest.tensors.items():
        tensors[path] = replace(entry, pieces=tuple(piece for piece in entry.pieces if piece.file not in gone))
        for piece in (piece for piece in entry.pieces if piece.file in gone):
            end = piece.offset + piece.size_bytes
            what = f"tensor {path!r} ({entry.dtype}, shape {list(entry.shape)}), bytes {piece.offset} to {end} of {piece.file}: {gone[piece.file]}"
            damage.append(DamagedBytes(tensor=path, file=piece.file, start=piece.offset, end=end, what=what))
    files = {name: file for name, file in manifest.files.items() if name not in gone}
    return damage + read_files(storage, replace(manifest, files=files, tensors=tensors), lambda _: {})[1]


def _why_gone(storage: Storage, manifest: Manifest, name: str) -> str:
    """Return why a file cannot be opened, or ""."""
    try:
        with open_file(storage, manifest, name):
            return ""
    except CheckpointCorrupt as error:
        return str(error)


def load(storage: Where, step: int, into: Any = None, only: Wanted | None = None) -> LoadedCheckpoint:
    """Read a checkpoint, or a part of it.

    Args:
        storage: The storage of the checkpoints.
        step: The step to load.
        into: A state whose tensors are overwritten if path, dtype and shape match a saved one, which saves
            memory and a copy. If loading fails, their content is undefined: load another checkpoint before using them.
        only: Selects the part of the state to load, as :func:`~holdfast.checkpoint.parts.all_but` does. Other
            values are not read or verified, and files without selected values are not opened.

    Raises:
        CheckpointCorrupt: if it differs from what was saved; the message names the tensor and its byte range.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    targets = {} if into is None else _apart(flatten(into)[0])

    def place(manifest: Manifest) -> dict[str, torch.Tensor]:
        return {path: _room(path, entry, targets.get(path)) for path, entry in manifest.tensors.items()}

    def read(whole: Manifest) -> tuple[tuple[Manifest, dict[str, torch.Tensor]], list[DamagedBytes]]:
        manifest = whole if only is None else select(whole, only)
        tensors, damage = read_files(storage, manifest, place, values_only=only is not None)
        return (manifest, tensors), damage

    _, (manifest, tensors) = _read(storage, step, read)
    state = unflatten(tensors, manifest.skeleton)
    return LoadedCheckpoint(step=step, state=state, info=manifest.info, generation=manifest.generation)


def load_box(storage: Where, step: int, path: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Read a part of one tensor, in whichever pieces it was saved, and verify the blocks read.

    Args:
        storage: The storage of the checkpoints.
        step: The step to read.
        path: Path of the tensor.
        start: First index in each dimension.
        shape: Shape of the part.

    Raises:
        CheckpointCorrupt: if the part is damaged.
        CheckpointError: if there is no such tensor, or the part lies outside it.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    return _read(storage, step, lambda manifest: _read_box(storage, manifest, path, start, shape))[1]


def read_box(
    storage: Storage, manifest: Manifest, path: str, start: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Read a part of one tensor of a checkpoint whose manifest has been read; see :func:`load_box`."""
    result, damage = _read_box(storage, manifest, path, start, shape)
    if damage:
        raise CheckpointCorrupt(_damaged(storage, manifest.step, damage[0].what))
    return result


def _read_box(
    storage: Storage, manifest: Manifest, path: str, start: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[torch.Tensor, list[DamagedBytes]]:
    step, entry = manifest.step, manifest.tensors.get(path)
    if entry is None:
        raise CheckpointError(
            f"there is no tensor {path!r} in the checkpoint of step {step}; there are {list(manifest.tensors)!r:.500}"
        )
    if not len(start) == len(shape) == len(entry.shape) or any(
        a < 0 or n < 0 or a + n > size for a, n, size in zip(start, shape, entry.shape, strict=True)
    ):
        raise CheckpointError(
            f"the part of shape {list(shape)} from {list(start)} lies outside {path!r}, which has shape {list(entry.shape)}"
        )
    return box_of(storage, manifest, path, start, shape)


def read_manifest(storage: Where, step: int) -> Manifest:
    """Return a checkpoint's manifest, without reading its tensors.

    Raises:
        CheckpointCorrupt: if the manifest differs from what was written.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    try:
        return _parse(step, _manifest_bytes(storage, step))
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(_damaged(storage, step, str(error))) from error


# ---------------------------------------------------------------------------------------------
# Manifests


def _read(
    storage: Storage, step: int, read: Callable[[Manifest], tuple[_Result, list[DamagedBytes]]]
) -> tuple[Manifest, _Result]:
    """Return the manifest of a step and the result of ``read``, if that finds no damage."""
    manifest, result, damage = _settled(storage, step, read)
    if damage:
        why = damage[0].what + (f"; {len(damage)} places are damaged in all" if len(damage) > 1 else "")
        raise CheckpointCorrupt(_damaged(storage, step, why))
    return manifest, result


def _settled(
    storage: Storage, step: int, look: Callable[[Manifest], tuple[_Result, list[DamagedBytes]]]
) -> tuple[Manifest, _Result, list[DamagedBytes]]:
    """Return the manifest of a step, and result and damage from ``look``; retry if a writer replaced the checkpoint meanwhile.

    Raises:
        CheckpointCorrupt: if the manifest is damaged, or ``look`` raises it.
        CheckpointMissing: if there is no complete checkpoint of this step, or it was removed.
    """
    data = _manifest_bytes(storage, step)
    while True:
        wrong: CheckpointCorrupt | None = None
        try:
            manifest = _parse(step, data)
            result, damage = look(manifest)
            if not damage:
                return manifest, result, []
        except CheckpointCorrupt as error:
            wrong = error
        again = _manifest_bytes(storage, step)
        if again == data:
            if wrong is not None:
                raise CheckpointCorrupt(_damaged(storage, step, str(wrong))) from wrong
            return manifest, result, damage
        # The step was saved again during the read: the old tensors are gone, and nothing is damaged.
        data = again


def _parse(step: int, data: bytes) -> Manifest:
    manifest = parse(data)
    if manifest.step != step:
        raise CheckpointCorrupt(f"manifest, step: says {manifest.step}, but its directory is that of step {step}")
    if not is_format(manifest.format):
        raise CheckpointCorrupt(
            f"manifest, format: must be one of {', '.join(format_names())}, is {manifest.format!r:.80}"
        )
    return manifest


def _manifest_bytes(storage: Storage, step: int) -> bytes:
    data = storage.read(f"{step_folder(step)}/{MANIFEST_NAME}")
    if data is None:
        raise CheckpointMissing(
            f"there is no complete checkpoint of step {step} in {storage.url}, {_others(steps(storage))}"
        )
    return data


def _others(there: Sequence[int]) -> str:
    """Return a text that lists the existing steps, or the first and last of many."""
    if not there:
        return "nor of any other step; choose a directory that has one"
    named = [str(step) for step in there]
    if len(named) > _NAMED:
        named[_NAMED // 2 : -(_NAMED // 2)] = ["..."]
    return f"there {'is step' if len(there) == 1 else 'are steps'} {', '.join(named)}; choose one that exists"


def _damaged(storage: Storage, step: int, why: str) -> str:
    return (
        f"the checkpoint of step {step} in {storage.url} is damaged: {why}. "
        "Load an older step, and remove this one after inspecting it"
    )


# ---------------------------------------------------------------------------------------------
# Memory


def _room(path: str, entry: TensorEntry, given: Any) -> torch.Tensor:
    """Return the memory to read a tensor into."""
    dtype = DTYPES[entry.dtype]
    if isinstance(given, torch.Tensor) and given.dtype == dtype and tuple(given.shape) == entry.shape:
        plain = given.detach()
        if plain.device.type == "cpu" and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            return plain
    try:
        return torch.empty(entry.shape, dtype=dtype)
    except RuntimeError as error:
        raise CheckpointError(
            f"tensor {path!r} of shape {list(entry.shape)} does not fit into memory: {error}"
        ) from error


def _apart(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that share no memory with others: two values cannot be read into the same bytes."""
    alone: dict[str, torch.Tensor] = {}
    end = 0
    tensors = {path: t for path, t in given.items() if isinstance(t, torch.Tensor) and t.is_contiguous()}
    for path, tensor in sorted(tensors.items(), key=lambda item: (item[1].data_ptr(), item[0])):
        if tensor.data_ptr() >= end:
            alone[path] = tensor
            end = tensor.data_ptr() + tensor.nbytes
    return alone
