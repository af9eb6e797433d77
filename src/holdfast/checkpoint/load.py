"""Reading checkpoints: every byte is checked, and what is damaged is named.

Values are read where the manifest says they are, several blocks at a time, straight into the tensors they belong to, and
the digest is taken of that memory: nothing that happens to a file later can change a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import xxhash

from holdfast.checkpoint.block_writer import gaps
from holdfast.checkpoint.blocks import BLOCK_BYTES, block_ranges, digest_of, parts_of, run
from holdfast.checkpoint.format import DTYPES, flatten, tensor_bytes, unflatten
from holdfast.checkpoint.formats import FORMATS
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest, Piece, TensorEntry, parse
from holdfast.checkpoint.parts import Wanted, select
from holdfast.checkpoint.storage import Reader, Storage, Where, as_storage, step_folder, step_of
from holdfast.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

_Result = TypeVar("_Result")

_NAMED = 8
"""So many steps are named one by one; of more, half as many of the first and of the last."""

_scratch = threading.local()
"""Memory of each thread for blocks that are only checked."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that are not what was saved.

    Args:
        tensor: Whose values they are, "" if they are none.
        file: In which file.
        start: First of them.
        end: First one behind them.
        what: In words.
    """

    tensor: str
    file: str
    start: int
    end: int
    what: str


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of values, and where it goes."""

    path: str
    piece: Piece
    start: int
    end: int
    into: torch.Tensor | None
    wanted: str


def steps(storage: Where, known: Container[int] = ()) -> list[int]:
    """Return the steps that have a complete checkpoint, in order. Whether they are intact, it does not look.

    Args:
        storage: Where checkpoints are.
        known: Steps that are complete if they are there at all.

    Raises:
        CheckpointError: if the storage is there and cannot be listed.
    """
    storage = as_storage(storage)
    found = (step for name in storage.names("") if (step := step_of(name)) is not None)
    return sorted(step for step in found if step in known or MANIFEST_NAME in storage.names(step_folder(step)))


def newest_intact(storage: Where, on_damaged: Callable[[int, CheckpointCorrupt], None] | None = None) -> int | None:
    """Return the newest step whose checkpoint is complete and undamaged; reads every byte of it.

    Args:
        storage: Where checkpoints are.
        on_damaged: Is told of each damaged checkpoint that is passed over, newest first.

    Returns:
        The step, or None if there is none.

    Raises:
        CheckpointError: if a checkpoint may not be read by this user: that is no damage.
    """
    step: int | None = _newest(storage, on_damaged, lambda step: verify(storage, step).step)
    return step


def load_newest(
    storage: Where,
    on_damaged: Callable[[int, CheckpointCorrupt], None] | None = None,
    into: Any = None,
) -> Loaded | None:
    """Load the newest checkpoint that is complete and undamaged, reading each byte once; see :func:`load`."""
    loaded: Loaded | None = _newest(storage, on_damaged, lambda step: load(storage, step, into))
    return loaded


def _newest(
    storage: Where, on_damaged: Callable[[int, CheckpointCorrupt], None] | None, read: Callable[[int], Any]
) -> Any:
    storage = as_storage(storage)
    passed: set[int] = set()
    # Listed anew each time: a step that was removed meanwhile was so because a newer one had become complete.
    while left := [step for step in steps(storage) if step not in passed]:
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


def verify(storage: Where, step: int) -> Manifest:
    """Read every byte of a checkpoint, holding a few blocks at a time; return its manifest.

    Raises:
        CheckpointCorrupt: if it is not what was saved; the message names the tensor and its byte range.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    return _read(storage, step, lambda manifest: _read_files(storage, manifest, lambda _: {}))[0]


def find_damage(storage: Where, step: int) -> tuple[Manifest, list[Damage]]:
    """Read every byte of a checkpoint; return its manifest, and everything in its files that is not as it was saved.

    Raises:
        CheckpointCorrupt: if its manifest is damaged.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    manifest, _, damage = _settled(storage, step, lambda manifest: (None, _all_damage(storage, manifest)))
    return manifest, damage


def _all_damage(storage: Storage, manifest: Manifest) -> list[Damage]:
    gone = {name: why for name in manifest.files if (why := _why_gone(storage, manifest, name))}
    damage = [
        Damage(tensor="", file=name, start=0, end=manifest.files[name].size_bytes, what=why)
        for name, why in gone.items()
    ]
    tensors = {}
    for path, entry in manifest.tensors.items():
        tensors[path] = replace(entry, pieces=tuple(piece for piece in entry.pieces if piece.file not in gone))
        for piece in (piece for piece in entry.pieces if piece.file in gone):
            end = piece.offset + piece.size_bytes
            what = f"tensor {path!r} ({entry.dtype}, shape {list(entry.shape)}), bytes {piece.offset} to {end} of {piece.file}: {gone[piece.file]}"
            damage.append(Damage(tensor=path, file=piece.file, start=piece.offset, end=end, what=what))
    files = {name: file for name, file in manifest.files.items() if name not in gone}
    return damage + _read_files(storage, replace(manifest, files=files, tensors=tensors), lambda _: {})[1]


def _why_gone(storage: Storage, manifest: Manifest, name: str) -> str:
    """Return why a file cannot be opened, "" if it can."""
    try:
        with _open(storage, manifest, name):
            return ""
    except CheckpointCorrupt as error:
        return str(error)


def load(storage: Where, step: int, into: Any = None, only: Wanted | None = None) -> Loaded:
    """Read a checkpoint, or a part of it.

    Args:
        storage: Where checkpoints are.
        step: Which one.
        into: A state whose tensors are overwritten where they have the path, dtype and shape of a saved one, which saves
            memory and a copy. If loading fails they hold anything: load another checkpoint before they are used.
        only: Leave out of the state what this does not want, as :func:`~holdfast.checkpoint.parts.all_but`. No other
            values are read or checked, and no files without wanted ones opened.

    Raises:
        CheckpointCorrupt: if it is not what was saved; the message names the tensor and its byte range.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    storage = as_storage(storage)
    given = {} if into is None else _apart(flatten(into)[0])

    def place(manifest: Manifest) -> dict[str, torch.Tensor]:
        return {path: _room(path, entry, given.get(path)) for path, entry in manifest.tensors.items()}

    def read(whole: Manifest) -> tuple[tuple[Manifest, dict[str, torch.Tensor]], list[Damage]]:
        manifest = whole if only is None else select(whole, only)
        tensors, damage = _read_files(storage, manifest, place, values_only=only is not None)
        return (manifest, tensors), damage

    _, (manifest, tensors) = _read(storage, step, read)
    state = unflatten(tensors, manifest.skeleton)
    return Loaded(step=step, state=state, info=manifest.info, generation=manifest.generation)


def load_box(storage: Where, step: int, path: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Read a part of one tensor, from whichever pieces it was saved in; checks the blocks that it reads.

    Args:
        storage: Where checkpoints are.
        step: Which one.
        path: Of the tensor.
        start: First index in each dimension.
        shape: Of the part.

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
    """Read a part of one tensor of a checkpoint whose manifest was read before; see :func:`load_box`."""
    result, damage = _read_box(storage, manifest, path, start, shape)
    if damage:
        raise CheckpointCorrupt(_damaged(storage, manifest.step, damage[0].what))
    return result


def _read_box(
    storage: Storage, manifest: Manifest, path: str, start: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[torch.Tensor, list[Damage]]:
    step, entry = manifest.step, manifest.tensors.get(path)
    if entry is None:
        msg = f"there is no tensor {path!r} in the checkpoint of step {step}; there are {list(manifest.tensors)!r:.500}"
        raise CheckpointError(msg)
    if not len(start) == len(shape) == len(entry.shape) or any(
        a < 0 or n < 0 or a + n > size for a, n, size in zip(start, shape, entry.shape, strict=True)
    ):
        msg = f"the part of shape {list(shape)} from {list(start)} lies outside {path!r}, which has shape {list(entry.shape)}"
        raise CheckpointError(msg)
    needed = [piece for piece in entry.pieces if _common(piece, start, shape) is not None]
    with ExitStack() as stack:
        names = sorted({piece.file for piece in needed})
        files = {name: stack.enter_context(_open(storage, manifest, name)) for name in names}
        if wrong := [d for name in names if (d := _check_size(files[name], manifest, name)) is not None]:
            return torch.empty(0), wrong
        result = torch.empty(shape, dtype=DTYPES[entry.dtype])
        parts = {piece: torch.empty(piece.shape, dtype=result.dtype) for piece in needed}
        blocks = [block for piece, part in parts.items() for block in _blocks_of(path, piece, part)]
        size_bytes = sum(piece.size_bytes for piece in needed)
        damage = [d for d in run(lambda block: _check_block(files, manifest, block), blocks, size_bytes) if d]
    for piece, part in parts.items():
        common = _common(piece, start, shape)
        assert common is not None
        source = tuple(slice(a - p, b - p) for (a, b), p in zip(common, piece.start, strict=True))
        target = tuple(slice(a - s, b - s) for (a, b), s in zip(common, start, strict=True))
        result[target] = part[source]
    return result, damage


def read_manifest(storage: Where, step: int) -> Manifest:
    """Return what a checkpoint holds, without looking at its tensors.

    Raises:
        CheckpointCorrupt: if the manifest is not what was written.
        CheckpointMissing: if there is none.
    """
    storage = as_storage(storage)
    try:
        return _parse(step, _manifest_bytes(storage, step))
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(_damaged(storage, step, str(error))) from error


# ---------------------------------------------------------------------------------------------
# Manifests


def _read(
    storage: Storage, step: int, read: Callable[[Manifest], tuple[_Result, list[Damage]]]
) -> tuple[Manifest, _Result]:
    """Return the manifest of a step and what ``read`` makes of it, if that finds no damage."""
    manifest, result, damage = _settled(storage, step, read)
    if damage:
        why = damage[0].what + (f"; {len(damage)} places are damaged in all" if len(damage) > 1 else "")
        raise CheckpointCorrupt(_damaged(storage, step, why))
    return manifest, result


def _settled(
    storage: Storage, step: int, look: Callable[[Manifest], tuple[_Result, list[Damage]]]
) -> tuple[Manifest, _Result, list[Damage]]:
    """Return the manifest of a step, and what ``look`` makes of it and finds damaged; who is overtaken by a writer looks again.

    Raises:
        CheckpointCorrupt: if the manifest is damaged, or ``look`` raises that.
        CheckpointMissing: if there is no complete checkpoint of this step, or none any more.
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
        # Saved anew while we read: the old tensors are gone, and nothing is damaged.
        data = again


def _parse(step: int, data: bytes) -> Manifest:
    manifest = parse(data)
    if manifest.step != step:
        msg = f"manifest, step: says {manifest.step}, but its directory is that of step {step}"
        raise CheckpointCorrupt(msg)
    if manifest.format not in FORMATS:
        msg = f"manifest, format: must be one of {', '.join(FORMATS)}, is {manifest.format!r:.80}"
        raise CheckpointCorrupt(msg)
    return manifest


def _manifest_bytes(storage: Storage, step: int) -> bytes:
    data = storage.read(f"{step_folder(step)}/{MANIFEST_NAME}")
    if data is None:
        msg = f"there is no complete checkpoint of step {step} in {storage.url}, {_others(steps(storage))}"
        raise CheckpointMissing(msg)
    return data


def _others(there: Sequence[int]) -> str:
    """Return in words which steps there are instead, of many the first and the last."""
    if not there:
        return "nor of another step; name a place that has one"
    named = [str(step) for step in there]
    if len(named) > _NAMED:
        named[_NAMED // 2 : -(_NAMED // 2)] = ["..."]
    return f"there {'is step' if len(there) == 1 else 'are steps'} {', '.join(named)}; ask for one that is there"


def _damaged(storage: Storage, step: int, why: str) -> str:
    return (
        f"the checkpoint of step {step} in {storage.url} is damaged: {why}. "
        "Load an older step, and remove this one when you have looked at it"
    )


# ---------------------------------------------------------------------------------------------
# Values


def _room(path: str, entry: TensorEntry, given: Any) -> torch.Tensor:
    """Return the memory that a tensor is read into."""
    dtype = DTYPES[entry.dtype]
    if isinstance(given, torch.Tensor) and given.dtype == dtype and tuple(given.shape) == entry.shape:
        plain = given.detach()
        if plain.device.type == "cpu" and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            return plain
    try:
        return torch.empty(entry.shape, dtype=dtype)
    except RuntimeError as error:
        msg = f"tensor {path!r} of shape {list(entry.shape)} does not fit into memory: {error}"
        raise CheckpointError(msg) from error


def _apart(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that have their memory for themselves: two values cannot be read into the same bytes."""
    alone: dict[str, torch.Tensor] = {}
    end = 0
    tensors = [
        (t.data_ptr(), path, t) for path, t in given.items() if isinstance(t, torch.Tensor) and t.is_contiguous()
    ]
    for first, path, tensor in sorted(tensors, key=lambda item: item[:2]):
        if first >= end:
            alone[path] = tensor
            end = first + tensor.nbytes
    return alone


def _read_files(
    storage: Storage,
    manifest: Manifest,
    place: Callable[[Manifest], dict[str, torch.Tensor]],
    *,
    values_only: bool = False,
) -> tuple[dict[str, torch.Tensor], list[Damage]]:
    """Read all files, values into the memory that ``place`` gives; return it, and what is damaged.

    With ``values_only`` nothing is read but the values that the manifest names: there may be others in its files.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open(storage, manifest, name)) for name in manifest.files}
        # Sizes first: nobody sets memory aside for values that are not there.
        damage = [d for name in manifest.files if (d := _check_size(files[name], manifest, name)) is not None]
        tensors = {} if damage else place(manifest)
        blocks: list[_Block] = []
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for path, entry in manifest.tensors.items():
            for piece in entry.pieces:
                target = _part_of(tensors[path], piece) if path in tensors else None
                into = target
                if target is not None and not target.is_contiguous():
                    into = torch.empty(piece.shape, dtype=target.dtype)
                    moves.append((target, into))
                blocks += _blocks_of(path, piece, into)
        size_bytes = sum(entry.size_bytes for entry in manifest.tensors.values())
        found = run(lambda block: _check_block(files, manifest, block), blocks, size_bytes)
        damage += [d for d in found if d is not None]
        if not values_only:
            damage += [d for name in manifest.files if (d := _check_rest(files[name], manifest, name)) is not None]
        for target, source in moves:
            target.copy_(source)
        return tensors, damage


def _part_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    if tensor.shape == piece.shape:
        return tensor
    return tensor[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))]


def _open(storage: Storage, manifest: Manifest, name: str) -> Any:
    return storage.reader(f"{step_folder(manifest.step)}/{manifest.folder}/{name}")


def _blocks_of(path: str, piece: Piece, into: torch.Tensor | None) -> list[_Block]:
    return [
        _Block(path, piece, start, end, into, wanted)
        for (start, end), wanted in zip(block_ranges(piece.size_bytes), piece.blocks, strict=True)
    ]


def _check_block(files: Mapping[str, Reader], manifest: Manifest, block: _Block) -> Damage | None:
    # The view is made here, by the thread that fills it, while others read.
    into = _scratch_memory() if block.into is None else tensor_bytes(block.into)[block.start :]
    into = into[: block.end - block.start]
    first, last = block.piece.offset + block.start, block.piece.offset + block.end
    file = files[block.piece.file]
    got, found = _read_digested(file, first, into[: max(0, min(last, file.size_bytes) - first)])
    if got == last - first and found == block.wanted:
        return None
    entry = manifest.tensors[block.path]
    why = "they are not what was saved" if got == last - first else f"the file ends after {got} of them"
    what = f"tensor {block.path!r} ({entry.dtype}, shape {list(entry.shape)}), bytes {first} to {last} of {block.piece.file}: {why}"
    return Damage(tensor=block.path, file=block.piece.file, start=first, end=last, what=what)


def _read_digested(file: Reader, first: int, into: memoryview) -> tuple[int, str]:
    """Read bytes from ``first`` on; return how many there were, and their digest."""
    whole, got = xxhash.xxh3_64(), 0
    for start, part in parts_of(into, file.part_bytes):
        count = file.read_into(first + start, part)
        whole.update(part[:count])
        got += count
        if count < len(part):
            break
    return got, whole.hexdigest()


def _scratch_memory() -> memoryview:
    if not hasattr(_scratch, "memory"):
        _scratch.memory = memoryview(bytearray(BLOCK_BYTES))
    memory: memoryview = _scratch.memory
    return memory


def _check_size(file: Reader, manifest: Manifest, name: str) -> Damage | None:
    wanted = manifest.files[name].size_bytes
    if file.size_bytes == wanted:
        return None
    what = f"{name} has {file.size_bytes} bytes, the manifest says {wanted}"
    return Damage(tensor="", file=name, start=0, end=wanted, what=what)


def _check_rest(file: Reader, manifest: Manifest, name: str) -> Damage | None:
    entry = manifest.files[name]
    pieces = [piece for tensor in manifest.tensors.values() for piece in tensor.pieces if piece.file == name]
    rest = gaps(entry.size_bytes, pieces)
    is_there = not rest or rest[-1][1] <= file.size_bytes
    if is_there and digest_of(rest, file.read_into) == entry.rest_xxh3:
        return None
    start, end = (rest[0][0], rest[-1][1]) if rest else (0, 0)
    what = f"the bytes of {name} that hold no values (headers, tables of contents), between {start} and {end}, are not what was saved"
    return Damage(tensor="", file=name, start=start, end=end, what=what)


def _common(piece: Piece, start: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Return, for each dimension, the indices that a piece and a box have in common; None if there are none."""
    both = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(piece.start, piece.shape, start, shape, strict=True)]
    return both if all(low < high for low, high in both) else None
