"""The sum by messages: exchange raw slices (Alltoall), add one's share in order, collect the shares (Allgather)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.adding import Addition, Mean
from holdfast.comm.base import Exchange
from holdfast.comm.checked import SUM, Altered, Vector, nobody_listens, num_tiles
from holdfast.comm.shared import Slots, Span, aligned

_MOST_KEPT = 64
"""Spans whose buffers are kept from one sum to the next."""


@dataclass(slots=True)
class _Buffers:
    """What one exchange needs, kept from step to step because fresh memory costs page faults.

    What goes to a process is a chunk of each row, and right behind it the checksums of the chunk if there are any.
    """

    slots: Slots
    send: torch.Tensor
    received: torch.Tensor
    share: Vector
    result: Vector
    addition: Addition


class ExchangedSum:
    """The sum among processes that share no memory, or none that is large enough.

    Args:
        comm: Who takes part.
        terms: The memory of each slot of this process, bytes.
    """

    def __init__(self, comm: Exchange, terms: Sequence[torch.Tensor]) -> None:
        self._comm = comm
        self._terms = terms
        self._last = torch.empty(0)
        self._me = comm.processes.index(comm.here)
        self._buffers: dict[tuple[Span, str], _Buffers] = {}

    def __call__(
        self,
        span: Span,
        slots: Slots,
        order: str,
        mean: Mean | None,
        midway: Callable[[], None],
        altered: Altered = nobody_listens,
    ) -> torch.Tensor:
        """Return the sum; see :class:`~holdfast.comm.ordered.OrderedSum`."""
        buffers = self._get_buffers(span, slots, order)
        for row in range(len(slots[self._me])):
            columns = _with_checksums(span, buffers.send[:, row], buffers.share.numbers.numel())
            for mine, column in zip(span.vector(self._terms[row]).messages(), columns, strict=True):
                _scatter(mine, column)
        self._comm.alltoall(buffers.send, buffers.received)
        midway()
        buffers.addition(mean, altered)
        for mine, everybodys in zip(buffers.share.messages(), buffers.result.messages(), strict=True):
            self._comm.allgather(mine, everybodys)
        self._last = buffers.result.numbers
        if span.checked and not _flat(buffers.result, span.length).is_intact():
            altered(SUM)
        return self.result(span)

    def result(self, span: Span) -> torch.Tensor:
        """Return the sum that was made last; it is whole only where it was completed."""
        return self._last.view(-1)[: span.length]

    def _get_buffers(self, span: Span, slots: Slots, order: str) -> _Buffers:
        if len(self._buffers) > _MOST_KEPT:  # collectives may be of any length
            self._buffers.clear()
        known = self._buffers.get((span, order))
        if known is None or known.slots != slots:
            known = self._buffers[span, order] = self._make_buffers(span, slots, order)
        return known

    def _make_buffers(self, span: Span, slots: Slots, order: str) -> _Buffers:
        processes, rows = len(slots), max(1, *map(len, slots))
        chunk = -(-span.length // (processes * span.line)) * span.line
        tiles = num_tiles(chunk, span.tile) * span.checked
        width = chunk + aligned(8 * tiles) // span.dtype.itemsize
        device = self._terms[0].device if self._terms else torch.device("cpu")
        send = torch.zeros(processes, rows, width, dtype=span.dtype, device=device)
        received = torch.zeros_like(send)

        def summed(*shape: int) -> Vector:
            numbers = torch.zeros(*shape, chunk, dtype=span.dtype, device=device)
            checksums = torch.zeros(*shape, tiles, dtype=torch.int64, device=device) if span.checked else None
            return Vector(numbers, checksums, span.tile)

        share, mine = summed(), slice(0, max(0, min(span.length - self._me * chunk, chunk)))
        pieces = sorted((n, (process, row)) for process, held in enumerate(slots) for row, n in enumerate(held))
        terms = [(n, _vector(span, _with_checksums(span, received[place], chunk))[mine]) for n, place in pieces]
        addition = Addition(terms, share[mine], self._me * chunk, order)
        return _Buffers(slots, send, received, share, summed(processes), addition)


def _with_checksums(span: Span, rows: torch.Tensor, chunk: int) -> tuple[torch.Tensor, ...]:
    """Return a chunk of each row, and the checksums behind it if there are any; shapes ``(..., chunk)``, ``(..., tiles)``."""
    if not span.checked:
        return (rows,)
    at = chunk * span.dtype.itemsize
    return rows[..., :chunk], rows.view(torch.uint8)[..., at : at + 8 * num_tiles(chunk, span.tile)].view(torch.int64)


def _vector(span: Span, messages: tuple[torch.Tensor, ...]) -> Vector:
    numbers, *checksums = messages
    return Vector(numbers, checksums[0] if checksums else None, span.tile)


def _flat(rows: Vector, length: int) -> Vector:
    """Return the vector whose chunks are rows, without what fills up the last ones."""
    assert rows.checksums is not None
    return Vector(rows.numbers.view(-1), rows.checksums.view(-1), rows.tile)[slice(0, length)]


def _scatter(term: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy ``term`` into the rows of ``columns``, one process's chunk after another; the last one may be short."""
    processes, chunk = columns.shape
    whole = min(processes, term.numel() // chunk) if chunk else 0
    columns[:whole].copy_(term[: whole * chunk].view(whole, chunk))
    if whole < processes and chunk:
        rest = term[whole * chunk :]
        columns[whole, : rest.numel()].copy_(rest)
