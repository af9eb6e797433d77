"""The memory of messages: one buffer that all spans use in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from holdfast.comm.allreduce.checksums import ChecksummedVector, num_tiles
from holdfast.comm.allreduce.path import SlotSpan, aligned

Block = tuple[tuple[int, ...], torch.dtype]
"""The shape of numbers, whose last dimension is a part of a vector, and their type."""


class MessageMemory:
    """A buffer as large as the longest span needs. It belongs to one generation.

    All-reduces run one at a time, and each ends when its messages have arrived, so the next one may use the same memory.
    An operation that was abandoned after a failure may still write there, or into the result: both belong to its
    generation. No message is received into a term.

    Args:
        device: Device of the messages.
        on_growth: Called before the buffer is replaced by a larger one: what was divided until then is no longer used.
    """

    def __init__(self, device: torch.device | str, on_growth: Callable[[], None]) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._on_growth = on_growth

    def divide(self, span: SlotSpan, blocks: Sequence[Block]) -> Iterator[ChecksummedVector]:
        """Yield memory for each block, with checksums if vectors of ``span`` have them."""
        tiles = [(*shape[:-1], num_tiles(shape[-1], span.tile)) for shape, _ in blocks]
        numbers = [aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in blocks]
        checksums = [aligned(8 * math.prod(tile) * span.checked) for tile in tiles]
        starts = list(itertools.accumulate(map(sum, zip(numbers, checksums, strict=True)), initial=0))
        if starts[-1] > self.buffer.numel():
            self._on_growth()
            self.buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=self.buffer.device)
        for (shape, dtype), tile, start, size in zip(blocks, tiles, starts, numbers, strict=False):
            vector = self._part(start, shape, dtype)
            sealed = self._part(start + size, tile, torch.int64) if span.checked else None
            yield ChecksummedVector(vector, sealed, span.tile)

    def _part(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
