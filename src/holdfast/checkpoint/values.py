"""Reads checkpoint values block by block, verifying each digest in the memory that the tensor keeps.

Several blocks are read in parallel, directly into their tensors: later changes of a file cannot affect a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from holdfast.checkpoint.block_writer import gaps
from holdfast.checkpoint.blocks import BLOCK_BYTES, block_ranges, digest, digest_of, parts_of, run
from holdfast.checkpoint.format import DTYPES, tensor_bytes
from holdfast.checkpoint.manifest import Manifest, TensorPiece
from holdfast.checkpoint.storage import Storage, StorageReader, step_folder

_scratch = threading.local()
"""Scratch memory of each thread, for blocks that are only verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedBytes:
    """A range of bytes that differ from what was saved."""

    tensor: str  # Path of the tensor, "" if the bytes are not values
    file: str  # Name of the file
    start: int  # First byte
    end: int  # Byte after the last
    what: str  # Description


class _Block(NamedTuple):
    """A block of values, and its destination."""

    path: str
    piece: TensorPiece
    start: int
    end: int
    into: torch.Tensor | None
    wanted: str


def read_files(
    storage: Storage,
    manifest: Manifest,
    place: Callable[[Manifest], dict[str, torch.Tensor]],
    *,
    values_only: bool = False,
) -> tuple[dict[str, torch.Tensor], list[DamagedBytes]]:
    """Read all files, values into the memory that ``place`` returns; return that memory and all damage.

    With ``values_only``, only the values that the manifest names are read: its files may contain others.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_file(storage, manifest, name)) for name in manifest.files}
        # Sizes are checked first, so that no memory is allocated for missing values.
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
        results = run(lambda block: _check_block(files, manifest, block), blocks, size_bytes)
        damage += [d for d in results if d is not None]
        if not values_only:
            damage += [d for name in manifest.files if (d := _check_rest(files[name], manifest, name)) is not None]
        for target, source in moves:
            target.copy_(source)
        return tensors, damage


def box_of(
    storage: Storage, manifest: Manifest, path: str, start: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[torch.Tensor, list[DamagedBytes]]:
    """Return a part of a tensor, which must lie inside it, and the damage of the blocks it spans."""
    entry = manifest.tensors[path]
    needed = [piece for piece in entry.pieces if _common(piece, start, shape) is not None]
    with ExitStack() as stack:
        names = sorted({piece.file for piece in needed})
        files = {name: stack.enter_context(open_file(storage, manifest, name)) for name in names}
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


def _part_of(tensor: torch.Tensor, piece: TensorPiece) -> torch.Tensor:
    if tensor.shape == piece.shape:
        return tensor
    return tensor[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))]


def open_file(storage: Storage, manifest: Manifest, name: str) -> Any:
    """Open a file of a checkpoint, see :meth:`Storage.reader`."""
    return storage.reader(f"{step_folder(manifest.step)}/{manifest.folder}/{name}")


def _blocks_of(path: str, piece: TensorPiece, into: torch.Tensor | None) -> list[_Block]:
    if len(piece.blocks) == 1:
        return [_Block(path, piece, 0, piece.size_bytes, into, piece.blocks[0])]
    return [
        _Block(path, piece, start, end, into, wanted)
        for (start, end), wanted in zip(block_ranges(piece.size_bytes), piece.blocks, strict=True)
    ]


def _check_block(files: Mapping[str, StorageReader], manifest: Manifest, block: _Block) -> DamagedBytes | None:
    # The view is created here, by the thread that fills it, while other threads read.
    into = _scratch_memory()[: block.end - block.start] if block.into is None else tensor_bytes(block.into)
    if len(into) > block.end - block.start:
        into = into[block.start : block.end]
    first, last = block.piece.offset + block.start, block.piece.offset + block.end
    file = files[block.piece.file]
    got, block_digest = _read_digested(
        file, first, into if last <= file.size_bytes else into[: max(0, file.size_bytes - first)]
    )
    if got == last - first and block_digest == block.wanted:
        return None
    entry = manifest.tensors[block.path]
    why = "they are not what was saved" if got == last - first else f"the file ends after {got} of them"
    what = f"tensor {block.path!r} ({entry.dtype}, shape {list(entry.shape)}), bytes {first} to {last} of {block.piece.file}: {why}"
    return DamagedBytes(tensor=block.path, file=block.piece.file, start=first, end=last, what=what)


def _read_digested(file: StorageReader, first: int, into: memoryview) -> tuple[int, str]:
    """Read bytes starting at ``first``; return their number and their digest."""
    if len(into) <= file.part_bytes:
        got = file.read_into(first, into)
        return got, digest(into[:got])
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


def _check_size(file: StorageReader, manifest: Manifest, name: str) -> DamagedBytes | None:
    wanted = manifest.files[name].size_bytes
    if file.size_bytes == wanted:
        return None
    what = f"{name} has {file.size_bytes} bytes, the manifest says {wanted}"
    return DamagedBytes(tensor="", file=name, start=0, end=wanted, what=what)


def _check_rest(file: StorageReader, manifest: Manifest, name: str) -> DamagedBytes | None:
    entry = manifest.files[name]
    if entry.rest_xxh3 is None:
        return None
    pieces = [piece for tensor in manifest.tensors.values() for piece in tensor.pieces if piece.file == name]
    rest = gaps(entry.size_bytes, pieces)
    is_there = not rest or rest[-1][1] <= file.size_bytes
    if is_there and digest_of(rest, file.read_into) == entry.rest_xxh3:
        return None
    start, end = (rest[0][0], rest[-1][1]) if rest else (0, 0)
    what = f"the bytes of {name} that hold no values (headers, tables of contents), between {start} and {end}, are not what was saved"
    return DamagedBytes(tensor="", file=name, start=start, end=end, what=what)


def _common(piece: TensorPiece, start: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Return the intersection of a piece and a box as an index range per dimension; None if it is empty."""
    both = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(piece.start, piece.shape, start, shape, strict=True)]
    return both if all(low < high for low, high in both) else None
