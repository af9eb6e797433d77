"""Where the terms of an all-reduce lie, and the interface of what carries it: :class:`ReducePath`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.allreduce.adding import MeanDivisor
from holdfast.comm.allreduce.checksums import (
    TILE,
    Altered,
    ChecksummedVector,
    Midway,
    ignore_corruption,
    num_tiles,
    tile_of,
)

ALIGN = 64
"""Vectors, and each process's share of them, begin on cache lines, bytes."""

LEFT_OUT = -1
"""In place of a slice whose term does not take part."""

Slots = Sequence[Sequence[int]]
"""The slices that each process owns, ascending; the index of a slice in its list is the slot of its term."""


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """The location of a vector in the memory of every slice.

    Args:
        start: First byte, a multiple of :data:`ALIGN`.
        length: Number of elements.
        dtype: Their type.
        checked: Checksums follow the elements; see :mod:`~holdfast.comm.allreduce.checksums`.
    """

    start: int
    length: int
    dtype: torch.dtype
    checked: bool = False

    @property
    def end(self) -> int:
        """First byte after it where another span may begin."""
        return self._numbers_end + aligned(8 * num_tiles(self.length, self.tile) * self.checked)

    @property
    def _numbers_end(self) -> int:
        return self.start + aligned(self.length * self.dtype.itemsize)

    @property
    def line(self) -> int:
        """Parts of the vector begin at multiples of this number of elements."""
        return self.tile if self.checked else ALIGN // self.dtype.itemsize

    @property
    def tile(self) -> int:
        """Number of elements that are added at a time, and that share a checksum if there are any."""
        return tile_of(self.length) if self.checked else TILE

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the vector in ``memory`` (bytes)."""
        return memory[self.start : self.start + self.length * self.dtype.itemsize].view(self.dtype)

    def vector(self, memory: torch.Tensor) -> ChecksummedVector:
        """Return the vector in ``memory`` (bytes), with its checksums if it has any."""
        if not self.checked:
            return ChecksummedVector(self.of(memory))
        at = self._numbers_end
        checksums = memory[at : at + 8 * num_tiles(self.length, self.tile)].view(torch.int64)
        return ChecksummedVector(self.of(memory), checksums, self.tile)


def aligned(size_bytes: int) -> int:
    """Return the next multiple of :data:`ALIGN`."""
    return -(-size_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class ReduceCall:
    """How one span is all-reduced; see :meth:`~holdfast.comm.allreduce.ordered.OrderedAllReduce.__call__`."""

    order: str
    mean: MeanDivisor | None = None
    midway: Midway = lambda: None
    altered: Altered = ignore_corruption


class ReducePath(ABC):
    """The transport of an all-reduce, for one generation of the communicator."""

    in_place = False
    """Whether all processes have the result once the all-reduce completes on any of them."""
    uses_messages = True
    """Whether it sends messages, and is not shared memory alone."""
    keeps_terms = True
    """See :attr:`~holdfast.comm.allreduce.ordered.OrderedAllReduce.keeps_terms`; may change between two calls."""
    result_memory: torch.Tensor | None = None
    """The memory of the results as this process writes it, bytes; None if they lie in no memory of their own."""

    @abstractmethod
    def __call__(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        """Return the reduced vector; see :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce`."""

    @abstractmethod
    def result(self, span: SlotSpan) -> torch.Tensor:
        """Return the last result.

        If :attr:`in_place`, it is complete once *any* worker has completed the all-reduce, otherwise only if this
        process has.
        """

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The memory of this path besides the terms and the shared result, bytes."""
        return ()

    def adds(self, order: str) -> bool:
        """Return whether it can add in this order."""
        return True

    def check_same(self, span: SlotSpan, order: str) -> None:  # noqa: B027 - without shared memory it would cost a message
        """Raise ``ScriptError`` unless all processes all-reduce vectors of one kind, as far as that costs no message."""

    def maximum(self, values: Sequence[int]) -> list[int] | None:
        """Return the maximum of each integer over all members, None if this path cannot carry them."""
        return None
