"""Checksums of the terms of an all-reduce: each term is verified before it is added.

A vector is split into tiles, the unit of addition. Each tile has a checksum, xxh3 over its bytes, computed by the
process that wrote the tile, before any other can read it. The process that adds the tile verifies it while it is in the
cache, and computes the checksum of the result if that is sent on. Rows are added whole and in order, and no hop adds
anything on the way. So bits are compared with bits: there is no tolerance and there are no false alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

TILE = 1 << 16
"""Maximum number of elements per tile: all terms of a tile, and its result, fit in the cache of a core."""
_SMALLEST = 1 << 10
_WORKERS = 64
"""A vector can be divided among this many workers: shares are whole tiles, so a short vector has smaller tiles."""

SUM = -1
"""In place of the slice that was altered: the result, on its way back."""

NO_WORKER = -1
"""In place of the owner of the altered slice, where the result was altered."""

Altered = Callable[[int], None]
"""Called with the slice whose term does not match its checksum, or with :data:`SUM`."""

Midway = Callable[[], None]
"""Called when all processes can read the terms of this process, and its share of the result is not finished."""


def ignore_corruption(number: int) -> None:
    """Do nothing."""


def note_altered(found: dict[str, int], what: str, owners: Mapping[int, int], number: int) -> None:
    """Record in ``found``, by name, the owner of the slice altered in an all-reduce or a transfer of ``what``."""
    if number == SUM:
        found[f"the sum of {what}"] = NO_WORKER
    else:
        found[f"{what} of slice {number}"] = owners[number]


def checksum(numbers: torch.Tensor) -> int:
    """Return a hash from 0 to 2**63 - 1 of the bits of a tensor, in the order of its elements."""
    raw: Any = numbers.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(raw) >> 1


def tile_of(length: int) -> int:
    """Return the tile size, in elements, of a vector of ``length`` elements."""
    return min(TILE, max(1, -(-length // (_WORKERS * _SMALLEST))) * _SMALLEST)


def num_tiles(numel: int, tile: int) -> int:
    """Return the number of tiles in ``numel`` elements."""
    return -(-numel // tile)


@dataclass(frozen=True, slots=True)
class ChecksummedVector:
    """A 1-D tensor, and the 64-bit checksum of each of its tiles; None if it is not checked."""

    numbers: torch.Tensor
    checksums: torch.Tensor | None = None
    tile: int = TILE

    def __getitem__(self, part: slice) -> ChecksummedVector:
        """Return a part; with checksums, it must begin at a tile boundary, and end at one or at the vector's end."""
        if self.checksums is None:
            return ChecksummedVector(self.numbers[part], None, self.tile)
        tiles = slice(num_tiles(part.start, self.tile), num_tiles(part.stop, self.tile))
        return ChecksummedVector(self.numbers[part], self.checksums[tiles], self.tile)

    def split(self) -> tuple[ChecksummedVector, ...]:
        """Return the tiles."""
        numbers = self.numbers.split(self.tile) if self.numbers.numel() else ()
        checksums = [None] * len(numbers) if self.checksums is None else self.checksums.split(1)
        return tuple(ChecksummedVector(*both, self.tile) for both in zip(numbers, checksums, strict=False))

    def messages(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors to send."""
        return (self.numbers,) if self.checksums is None else (self.numbers, self.checksums)

    def seal(self) -> None:
        """Compute the checksums."""
        for tile in self.split():
            if tile.checksums is not None:
                tile.checksums.fill_(checksum(tile.numbers))

    def is_intact(self) -> bool:
        """Return whether the numbers match the checksums."""
        return all(b.checksums is None or int(b.checksums) == checksum(b.numbers) for b in self.split())
