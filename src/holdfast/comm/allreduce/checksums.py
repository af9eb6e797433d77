"""Checksums that go with what is summed: who adds a number looks whether it is the one that was given.

A vector is cut into tiles, the numbers that are added at a time. Each tile has a checksum, xxh3 over its bytes, made
by whoever made the tile, before anybody else can read it. Who adds the tile looks at it while it is in the cache, and
makes the checksum of what comes out, if that is sent on. Rows are added whole and in order, nobody adds anything on the
way; so bits are compared with bits, and there is neither a tolerance nor a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

TILE = 1 << 16
"""Numbers that are added at a time, at most: all terms of a tile, and its result, stay in the cache of a core."""
_SMALLEST = 1 << 10
_WORKERS = 64
"""As many workers may have a share of a vector, because shares are whole tiles: a short vector has shorter ones."""

SUM = -1
"""Stands, where a slice was altered, for the sum on its way back."""

NO_WORKER = -1
"""Stands, where a sum was altered, for the worker that gave it."""

Altered = Callable[[int], None]
"""Called with the slice whose term is not what was given, or :data:`SUM`."""

Midway = Callable[[], None]
"""Called when the terms of this process are known to all and its share of the result is not."""


def nobody_listens(number: int) -> None:
    """Do nothing."""


def note_altered(found: dict[str, int], what: str, owners: Mapping[int, int], number: int) -> None:
    """Note in ``found``, by name, which worker gave the slice that was altered in ``what`` was summed, or handed over."""
    if number == SUM:
        found[f"the sum of {what}"] = NO_WORKER
    else:
        found[f"{what} of slice {number}"] = owners[number]


def checksum(numbers: torch.Tensor) -> int:
    """Return a number from 0 to 2**63 - 1 for the bits of a tensor, in the order of its elements."""
    raw: Any = numbers.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(raw) >> 1


def tile_of(length: int) -> int:
    """Return how many numbers of a vector have a checksum together."""
    return min(TILE, max(1, -(-length // (_WORKERS * _SMALLEST))) * _SMALLEST)


def num_tiles(numel: int, tile: int) -> int:
    """Return how many tiles there are in so many numbers."""
    return -(-numel // tile)


@dataclass(frozen=True, slots=True)
class Vector:
    """Numbers, 1-D, and the checksum of each tile, 64-bit, wherever they lie; none where they are not checked."""

    numbers: torch.Tensor
    checksums: torch.Tensor | None = None
    tile: int = TILE

    def __getitem__(self, part: slice) -> Vector:
        """Return a part; where there are checksums it begins with a tile, and ends with one or with the vector."""
        if self.checksums is None:
            return Vector(self.numbers[part], None, self.tile)
        tiles = slice(num_tiles(part.start, self.tile), num_tiles(part.stop, self.tile))
        return Vector(self.numbers[part], self.checksums[tiles], self.tile)

    def split(self) -> tuple[Vector, ...]:
        """Return the tiles."""
        numbers = self.numbers.split(self.tile) if self.numbers.numel() else ()
        checksums = [None] * len(numbers) if self.checksums is None else self.checksums.split(1)
        return tuple(Vector(*both, self.tile) for both in zip(numbers, checksums, strict=False))

    def messages(self) -> tuple[torch.Tensor, ...]:
        """Return what is sent of it."""
        return (self.numbers,) if self.checksums is None else (self.numbers, self.checksums)

    def seal(self) -> None:
        """Make the checksums."""
        for tile in self.split():
            if tile.checksums is not None:
                tile.checksums.fill_(checksum(tile.numbers))

    def is_intact(self) -> bool:
        """Return whether the numbers are what the checksums say."""
        return all(b.checksums is None or int(b.checksums) == checksum(b.numbers) for b in self.split())
