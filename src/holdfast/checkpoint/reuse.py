"""Incremental checkpoints: blocks that an earlier checkpoint holds are not written again.

A writer remembers a digest of each block of rows that it wrote, and where the block is. A later checkpoint gives the
files that hold its unchanged blocks a second name in its own folder, a hard link, and writes the other blocks. So every
folder has all files of its checkpoint: removing, copying and verifying one takes no knowledge of any other, and the file
system keeps a file until its last name is removed.

- **The newest two share nothing.** A checkpoint shares files with the last but one, never with the last. So damage of a
  file leaves one of the newest two intact, as if both were full.
- **Old files do not pile up.** A writer shares at most :data:`_MOST_FILES` files, with at most as many unused bytes as
  it saves, and goes back to a full checkpoint over at most :data:`_FULL_EVERY` others.
- **Training that changes everything pays nothing.** Tensors that changed everywhere are not compared for the next
  :data:`_REST` checkpoints.

Whatever cannot be shared is written: another layout after workers were lost, a removed checkpoint, a storage without
links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import xxhash

from holdfast.checkpoint.blocks import block_ranges, digest, run
from holdfast.checkpoint.format import tensor_bytes
from holdfast.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry, TensorPiece
from holdfast.checkpoint.storage import Storage, step_folder, step_of
from holdfast.checkpoint.write_plan import WriteBox, WritePlan, make_box

GRAIN_BYTES = 128 << 10
"""Rows are compared in blocks of about this size: the largest whole number of rows that fits, at least one.
Smaller ones would find more unchanged rows of an embedding, and take more memory and a larger manifest."""

_LEAST_BYTES = 64 << 10
"""Smaller tensors are always written: a file has room for thousands of them."""

_MOST_FILES = 8
_FULL_EVERY = 16
_REST = 16
_LEAST_SHARE = 1 / 8
"""Of a tensor less of which is unchanged, nothing is compared for a while."""

_Place = tuple[str, int]
"""A file of a checkpoint, and an offset in it."""


@dataclass(frozen=True, slots=True)
class ReusedBlocks:
    """A part of a checkpoint, divided into what is written and what an earlier checkpoint holds."""

    boxes: tuple[WriteBox, ...]  # The values to write
    pieces: Mapping[str, Sequence[TensorPiece]]  # The other values, by the path of their tensor
    files: dict[str, FileEntry]  # The shared files, by their names in the new folder

    def merged(self, written: Mapping[str, TensorEntry], boxes: Sequence[WriteBox]) -> dict[str, TensorEntry]:
        """Return the entries of all tensors, in the order of ``boxes``; ``written`` are those of what was written."""
        entries = {}
        for box in boxes:
            new = written[box.path].pieces if box.path in written else ()
            pieces = sorted((*new, *self.pieces.get(box.path, ())), key=lambda piece: piece.start)
            entries[box.path] = TensorEntry(
                dtype=str(box.tensor.dtype).removeprefix("torch."), shape=box.whole, pieces=tuple(pieces)
            )
        return entries


@dataclass(frozen=True, slots=True)
class _Rows:
    """The blocks of a box in a checkpoint."""

    shape: tuple[object, ...]  # What must be the same for a comparison
    digests: Sequence[bytes]
    places: Sequence[_Place]


@dataclass(frozen=True, slots=True)
class _Written:
    """The part of a checkpoint that this writer wrote."""

    step: int
    folder: str  # Path of its data folder
    sizes: Mapping[str, int]  # Sizes of its files
    rows: Mapping[str, _Rows]  # By path of the tensor
    age: int  # Number of checkpoints since the full one that it goes back to


@dataclass(slots=True)
class BlockReuse:
    """What one writer remembers of its last checkpoints: a digest and a place for each block of rows, some 0.1 % of its part."""

    _written: list[_Written] = field(default_factory=list)
    _digests: dict[str, Sequence[bytes]] = field(default_factory=dict)
    """Digests of the checkpoint that is being written, where they are known."""
    _rests_until: dict[str, int] = field(default_factory=dict)
    _count: int = 0
    _age: int = 0

    def plan(self, storage: Storage, step: int, folder: str, content: WritePlan) -> ReusedBlocks | None:
        """Compare the values with those of an earlier checkpoint, and link its files into ``folder``, which must exist.

        Returns:
            What to write and what to reuse; None if everything must be written.
        """
        self._digests, self._age = {}, 0
        base = self._base(storage, step)
        if base is None:
            return None
        unchanged = self._unchanged(base, content)
        in_use: Counter[str] = Counter()
        for box in content.boxes:
            if box.path in unchanged:
                for (start, end), place in zip(_grains(box), unchanged[box.path], strict=True):
                    if place is not None:
                        in_use[place[0]] += (end - start) * _row_bytes(box)
        names: dict[str, str] = {}
        room_bytes = content.size_bytes
        for file, used_bytes in in_use.most_common(_MOST_FILES):
            unused_bytes, name = base.sizes[file] - used_bytes, f"kept-{content.part:05d}-{len(names)}"
            if unused_bytes <= room_bytes and storage.link(f"{base.folder}/{file}", f"{folder}/{name}"):
                names[file] = name
                room_bytes -= unused_bytes
        if not names:
            self._rest(unchanged)
            return None
        self._age = base.age + 1
        return _divided(content, unchanged, names, base.sizes)

    def remember(self, manifest: Manifest, content: WritePlan) -> None:
        """Remember what was written; ``manifest`` is that of this writer's part."""
        rows = {}
        boxes = [box for box in content.boxes if self._is_compared(box)]
        self._digests |= _digest_all([box for box in boxes if box.path not in self._digests])
        for box in boxes:
            places = list(_places(box, manifest.tensors[box.path].pieces))
            rows[box.path] = _Rows(_shape(box), self._digests[box.path], places)
        sizes = {name: file.size_bytes for name, file in manifest.files.items()}
        folder = f"{step_folder(manifest.step)}/{manifest.folder}"
        self._written = [*self._written[-2:], _Written(manifest.step, folder, sizes, rows, self._age)]
        self._count += 1

    def forget(self, step: int) -> None:
        """Forget the checkpoint of a step: it was abandoned."""
        self._written = [each for each in self._written if each.step != step]

    def _base(self, storage: Storage, step: int) -> _Written | None:
        """Return the checkpoint to share files with: the second newest, if this writer wrote it and the newest.

        These two share nothing, since the newest had the one before them as its base, and so on. In any other case, such as
        a checkpoint whose fate is not known here yet, everything is written.
        """
        if len(self._written) < 2:
            return None
        base, last = self._written[-2:]
        if [last.step, base.step] != list(islice(_complete_steps(storage, step), 2)) or base.age + 1 >= _FULL_EVERY:
            return None
        return base

    def _unchanged(self, base: _Written, content: WritePlan) -> dict[str, list[_Place | None]]:
        """Return the place of each unchanged block in the earlier checkpoint, None for the others, by path."""
        boxes = [
            box
            for box in content.boxes
            if self._is_compared(box) and box.path in base.rows and base.rows[box.path].shape == _shape(box)
        ]
        self._digests = _digest_all(boxes)
        unchanged = {}
        for box in boxes:
            rows = base.rows[box.path]
            pairs = zip(self._digests[box.path], rows.digests, rows.places, strict=True)
            places = [place if now == then else None for now, then, place in pairs]
            if sum(place is not None for place in places) >= _LEAST_SHARE * len(places):
                unchanged[box.path] = places
            else:
                self._rest([box.path])
        return unchanged

    def _is_compared(self, box: WriteBox) -> bool:
        return box.tensor.nbytes >= _LEAST_BYTES and self._rests_until.get(box.path, 0) <= self._count

    def _rest(self, paths: Iterable[str]) -> None:
        self._rests_until |= dict.fromkeys(paths, self._count + _REST)


def _divided(
    content: WritePlan,
    unchanged: Mapping[str, Sequence[_Place | None]],
    names: Mapping[str, str],
    sizes: Mapping[str, int],
) -> ReusedBlocks:
    """Divide the values; ``names`` are the new names of the shared files."""
    paths = {box.path for box in content.boxes}
    boxes: list[WriteBox] = []
    pieces: dict[str, list[TensorPiece]] = {}
    for box in content.boxes:
        places = [place if place and place[0] in names else None for place in unchanged.get(box.path, ())]
        if not any(places):
            boxes.append(box)
            continue
        for start, end, place in _runs(box, places):
            values, first = box.tensor[start:end], (box.start[0] + start, *box.start[1:])
            if place is None:
                boxes.append(make_box(box.path, values, first, box.whole, paths))
            else:
                pieces.setdefault(box.path, []).append(_piece(values, first, names[place[0]], place[1]))
    files = {new: FileEntry(size_bytes=sizes[old], rest_xxh3=None) for old, new in names.items()}
    return ReusedBlocks(tuple(boxes), pieces, files)


def _piece(values: torch.Tensor, start: tuple[int, ...], file: str, offset: int) -> TensorPiece:
    """Describe values that a file holds. The digests are those of the values in memory: damage of the file will be found."""
    data = tensor_bytes(values)
    blocks = run(lambda ends: digest(data[ends[0] : ends[1]]), [*block_ranges(len(data))], len(data))
    return TensorPiece(
        file=file,
        offset=offset,
        start=start,
        shape=tuple(values.shape),
        size_bytes=len(data),
        blocks=tuple(blocks),
    )


def _runs(box: WriteBox, places: Sequence[_Place | None]) -> Iterator[tuple[int, int, _Place | None]]:
    """Yield ranges of rows, as long as possible, that are to be written (place None), or lie in one piece in a file."""
    first, last, where = 0, 0, places[0]
    for (start, end), place in zip(_grains(box), places, strict=True):
        expected = where and (where[0], where[1] + (start - first) * _row_bytes(box))
        if place != expected:
            yield first, last, where
            first, where = start, place
        last = end
    yield first, last, where


def _places(box: WriteBox, pieces: Sequence[TensorPiece]) -> Iterator[_Place]:
    """Yield the place of each block of rows of a box that lies in these pieces."""
    ordered = iter(sorted(pieces, key=lambda piece: piece.start[0]))
    piece = next(ordered)
    for start, _ in _grains(box):
        row = box.start[0] + start
        while row >= piece.start[0] + piece.shape[0]:
            piece = next(ordered)
        yield piece.file, piece.offset + (row - piece.start[0]) * _row_bytes(box)


def _grains(box: WriteBox) -> list[tuple[int, int]]:
    """Return first and last row (excluded) of each block of rows that is compared as a whole."""
    rows = box.tensor.shape[0]
    step = max(1, GRAIN_BYTES // _row_bytes(box))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _row_bytes(box: WriteBox) -> int:
    return box.tensor.nbytes // box.tensor.shape[0]


def _shape(box: WriteBox) -> tuple[object, ...]:
    return box.start, box.whole, tuple(box.tensor.shape), box.tensor.dtype


def _digest_all(boxes: Sequence[WriteBox]) -> dict[str, Sequence[bytes]]:
    """Return a digest of each block of rows, by path. 128 bits: whatever has the same one is taken for the same."""
    jobs = [(box, start, end) for box in boxes for start, end in _grains(box)]

    def work(job: tuple[WriteBox, int, int]) -> bytes:
        box, start, end = job
        return xxhash.xxh3_128_digest(tensor_bytes(box.tensor[start:end]))

    digests: dict[str, list[bytes]] = {box.path: [] for box in boxes}
    for (box, _, _), block_digest in zip(jobs, run(work, jobs, sum(box.tensor.nbytes for box in boxes)), strict=True):
        digests[box.path].append(block_digest)
    return {**digests}


def _complete_steps(storage: Storage, but: int) -> Iterator[int]:
    """Yield the steps that have a complete checkpoint, the newest first, except for one."""
    candidates = sorted((step for name in storage.names("") if (step := step_of(name)) is not None), reverse=True)
    return (step for step in candidates if step != but and MANIFEST_NAME in storage.names(step_folder(step)))
