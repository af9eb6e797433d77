"""Writes values into the files that a format has laid out and digests them, several blocks in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xxhash

from holdfast.checkpoint.blocks import block_ranges, digest, digest_of, parts_of, run
from holdfast.checkpoint.files.base import FileLayout
from holdfast.checkpoint.format import tensor_bytes
from holdfast.checkpoint.manifest import FileEntry, TensorEntry, TensorPiece
from holdfast.checkpoint.write_plan import WriteBox
from holdfast.errors import CheckpointError

_EARLY_BYTES = 1 << 20
"""Writeback of blocks of at least this size starts immediately; flushing smaller ones page by page would be slower."""


def write_blocks(
    folder: Path, layout: FileLayout, boxes: Sequence[WriteBox], tell: Callable[[int], None] = lambda size: None
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Write the values to their places in the layout and digest them, several blocks in parallel.

    ``tell`` is called with the bytes of each block that is written, from any thread.
    """
    numbers = {name: os.open(folder / name, os.O_RDWR | os.O_CLOEXEC) for name in layout.files}
    try:
        jobs = [(box, start, end) for box in boxes for start, end in block_ranges(box.tensor.nbytes)]

        def write(job: tuple[WriteBox, int, int]) -> str:
            box, start, end = job
            data = tensor_bytes(box.tensor)[start:end]
            if layout.has_values:
                xxh3 = digest(data)
            else:
                file, offset = layout.places[box.key]
                xxh3 = _write_block(numbers[file], data, offset + start)
            tell(end - start)
            return xxh3

        total = sum(box.tensor.nbytes for box in boxes)
        digests: dict[str, list[str]] = {}
        for (box, _, _), block_digest in zip(jobs, run(write, jobs, total), strict=True):
            digests.setdefault(box.key, []).append(block_digest)
        tensors: dict[str, TensorEntry] = {}
        for box in boxes:
            before = tensors[box.path].pieces if box.path in tensors else ()
            tensors[box.path] = TensorEntry(
                dtype=str(box.tensor.dtype).removeprefix("torch."),
                shape=box.whole,
                pieces=(*before, _piece(box, layout, digests[box.key])),
            )
        files = {name: _describe_file(name, number, tensors) for name, number in numbers.items()}
    finally:
        for number in numbers.values():
            os.close(number)
    return files, tensors


def _piece(box: WriteBox, layout: FileLayout, blocks: Sequence[str]) -> TensorPiece:
    file, offset = layout.places[box.key]
    return TensorPiece(
        file=file,
        offset=offset,
        start=box.start,
        shape=tuple(box.tensor.shape),
        size_bytes=box.tensor.nbytes,
        blocks=tuple(blocks),
    )


def _write_block(number: int, data: memoryview, offset: int) -> str:
    """Write a block and return its digest."""
    whole = xxhash.xxh3_64()
    for start, part in parts_of(data):
        whole.update(part)
        done = 0
        while done < len(part):
            done += os.pwrite(number, part[done:], offset + start + done)
    if len(data) >= _EARLY_BYTES:
        # Linux starts writing these pages to disk now, while other blocks are digested, instead of at the final fsync.
        os.posix_fadvise(number, offset, len(data), os.POSIX_FADV_DONTNEED)
    return whole.hexdigest()


def _describe_file(name: str, number: int, tensors: Mapping[str, TensorEntry]) -> FileEntry:
    size = os.fstat(number).st_size
    pieces = [piece for entry in tensors.values() for piece in entry.pieces if piece.file == name]
    rest = digest_of(gaps(size, pieces), lambda offset, out: os.preadv(number, [out], offset))
    if rest is None:
        raise CheckpointError(f"{name} ends after {size} bytes, before the values that were written into it")
    return FileEntry(size_bytes=size, rest_xxh3=rest)


def gaps(size_bytes: int, pieces: Sequence[TensorPiece]) -> list[tuple[int, int]]:
    """Return the byte ranges of a file that hold no values."""
    ranges, end = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.size_bytes:
            ranges.append((end, piece.offset))
            end = piece.offset + piece.size_bytes
    return [(a, b) for a, b in [*ranges, (end, size_bytes)] if b > a]
