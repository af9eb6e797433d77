"""All-reduce by messages: exchange slices (Alltoall), add this rank's share in order, collect the shares (Allgather).

Slices that an owner may add locally without changing a bit are sent as their sum
(:func:`~holdfast.comm.allreduce.adding.addable`): in ``tree`` order an owner of many slices sends little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.allreduce.adding import MeanDivisor, TiledSum, addable
from holdfast.comm.allreduce.checksums import SUM, Altered, ChecksummedVector, Midway, ignore_corruption, num_tiles
from holdfast.comm.allreduce.shm import LEFT_OUT, Slots, SlotSpan, aligned
from holdfast.comm.base import Collectives

_MOST_KEPT = 512
"""Maximum number of spans whose buffers are kept from step to step."""


@dataclass(slots=True)
class _Buffers:
    """Buffers of one exchange, kept from step to step because new memory costs page faults.

    Each process is sent a chunk of each row, followed by the checksums of the chunk if there are any. A row is a slice,
    or the sum of several. ``send`` and ``received`` have the shape ``(processes, rows, numbers)``.

    Args:
        raw: Slots of the slices that are sent unchanged, and the row of each.
        sums: The additions that fill the rows that are sums, one per chunk.
        addition: Computes the share of this process.
    """

    cut: _Cut
    slots: Slots
    raw: list[tuple[int, int]]
    sums: list[TiledSum]
    send: torch.Tensor
    received: torch.Tensor
    share: ChecksummedVector
    result: ChecksummedVector
    addition: TiledSum


class AllToAllReduce:
    """The all-reduce for processes without (enough) shared memory.

    Args:
        comm: The members.
        terms: The memory of each slot here, bytes.
        slot_bytes: Its size, also where there is none.
    """

    def __init__(self, comm: Collectives, terms: Sequence[torch.Tensor], slot_bytes: int) -> None:
        self.result_memory = None
        """See :attr:`SharedMemoryReduce.result_memory`."""
        self._comm = comm
        self._terms = terms
        self._slot_bytes = slot_bytes
        self._last = torch.empty(0)
        self._me = comm.processes.index(comm.local_ranks)
        self._buffers: dict[tuple[SlotSpan, str], _Buffers] = {}

    def __call__(
        self,
        span: SlotSpan,
        slots: Slots,
        order: str,
        mean: MeanDivisor | None,
        midway: Midway,
        altered: Altered = ignore_corruption,
    ) -> torch.Tensor:
        """Return the reduced vector; see :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce`."""
        buffers = self._get_buffers(span, slots, order)
        for slot, row in buffers.raw:
            columns = buffers.cut.split(buffers.send[:, row])
            for mine, column in zip(span.vector(self._terms[slot]).messages(), columns, strict=True):
                _scatter(mine, column)
        for addition in buffers.sums:
            addition(altered=altered)
        self._comm.alltoall(buffers.send, buffers.received)
        midway()
        buffers.addition(mean, altered)
        for mine, gathered in zip(buffers.share.messages(), buffers.result.messages(), strict=True):
            self._comm.allgather(mine, gathered)
        self._last = buffers.result.numbers
        if span.checked and not _flat(buffers.result, span.length).is_intact():
            altered(SUM)
        return self.result(span)

    def result(self, span: SlotSpan) -> torch.Tensor:
        """Return the last result; it is complete only if the all-reduce completed on this process."""
        return self._last.view(-1)[: span.length]

    def _get_buffers(self, span: SlotSpan, slots: Slots, order: str) -> _Buffers:
        known = self._buffers.get((span, order))
        if known is None or known.slots != slots:
            self._evict(span, order)
            known = self._buffers[span, order] = self._make_buffers(span, slots, order)
        return known

    def _evict(self, span: SlotSpan, order: str) -> None:
        """Drop the oldest buffers until those of ``span`` and of the rest would fit into a slot, side by side.

        The buckets of a model do fit, so their buffers are all kept. Collectives may be of any length.
        """
        self._buffers.pop((span, order), None)
        size_bytes = sum(kept.end - kept.start for kept, _ in (*self._buffers, (span, order)))
        while self._buffers and (size_bytes > self._slot_bytes or len(self._buffers) >= _MOST_KEPT):
            oldest = next(iter(self._buffers))
            del self._buffers[oldest]
            size_bytes -= oldest[0].end - oldest[0].start

    def _make_buffers(self, span: SlotSpan, slots: Slots, order: str) -> _Buffers:
        cut, rows = _Cut(span, len(slots)), _rows(slots, order)
        device = self._terms[0].device if self._terms else torch.device("cpu")
        send = torch.zeros(len(slots), max(1, *map(len, rows)), cut.width, dtype=span.dtype, device=device)
        received = torch.zeros_like(send)

        def summed(*shape: int) -> ChecksummedVector:
            numbers = torch.zeros(*shape, cut.chunk, dtype=span.dtype, device=device)
            checksums = torch.zeros(*shape, cut.tiles, dtype=torch.int64, device=device) if span.checked else None
            return ChecksummedVector(numbers, checksums, span.tile)

        share, part = summed(), cut.part(self._me)
        places = sorted(
            (group[0], (process, row)) for process, mine in enumerate(rows) for row, group in enumerate(mine)
        )
        terms = [(n, cut.term(received[place], part)) for n, place in places]
        addition = TiledSum(terms, share[slice(0, part.stop - part.start)], part.start, order)
        raw, sums = self._make_rows(cut, slots[self._me], rows[self._me], order, send)
        return _Buffers(cut, slots, raw, sums, send, received, share, summed(len(slots)), addition)

    def _make_rows(
        self, cut: _Cut, held: Sequence[int], groups: Sequence[tuple[int, ...]], order: str, send: torch.Tensor
    ) -> tuple[list[tuple[int, int]], list[TiledSum]]:
        """Return which slots fill which rows unchanged, and the additions that fill the other rows."""
        raw, sums = [], []
        for row, group in enumerate(groups):
            if len(group) == 1:
                raw.append((held.index(group[0]), row))
                continue
            vectors = [(n, cut.span.vector(self._terms[held.index(n)])) for n in group]
            for place, sent in enumerate(send[:, row]):
                part = cut.part(place)
                terms = [(n, vector[part]) for n, vector in vectors]
                sums.append(TiledSum(terms, cut.term(sent, part), part.start, order))
        return raw, sums


class _Cut:
    """The split of a vector into one chunk per process."""

    def __init__(self, span: SlotSpan, processes: int) -> None:
        self.span = span
        self.chunk = -(-span.length // (processes * span.line)) * span.line
        """Elements per chunk; the last chunks may be short, or empty."""
        self.tiles = num_tiles(self.chunk, span.tile) * span.checked
        """Checksums per chunk."""
        self.width = self.chunk + aligned(8 * self.tiles) // span.dtype.itemsize
        """Elements per chunk including its checksums."""

    def part(self, place: int) -> slice:
        """Return the range of a process's chunk."""
        return slice(min(place * self.chunk, self.span.length), min((place + 1) * self.chunk, self.span.length))

    def term(self, sent: torch.Tensor, part: slice) -> ChecksummedVector:
        """Return the received message of a part as a vector, with its checksums if there are any."""
        numbers, *checksums = self.split(sent)
        return ChecksummedVector(numbers, checksums[0] if checksums else None, self.span.tile)[
            slice(0, part.stop - part.start)
        ]

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the numbers of some rows, and any checksums; shapes ``(..., chunk)``, ``(..., tiles)``."""
        if not self.span.checked:
            return (rows,)
        at = self.chunk * self.span.dtype.itemsize
        return rows[..., : self.chunk], rows.view(torch.uint8)[..., at : at + 8 * self.tiles].view(torch.int64)


def _rows(slots: Slots, order: str) -> list[list[tuple[int, ...]]]:
    """Return the rows that each process sends: slices, and groups of slices that it adds locally."""
    holders = {n: process for process, held in enumerate(slots) for n in held if n != LEFT_OUT}
    rows: list[list[tuple[int, ...]]] = [[] for _ in slots]
    for group in addable(holders, order):
        rows[holders[group[0]]].append(group)
    return rows


def _flat(rows: ChecksummedVector, length: int) -> ChecksummedVector:
    """Return the vector whose chunks are rows, without padding."""
    assert rows.checksums is not None
    return ChecksummedVector(rows.numbers.view(-1), rows.checksums.view(-1), rows.tile)[slice(0, length)]


def _scatter(term: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy ``term`` into the rows of ``columns``, one chunk per process; the last one may be short."""
    processes, chunk = columns.shape
    whole = min(processes, term.numel() // chunk) if chunk else 0
    columns[:whole].copy_(term[: whole * chunk].view(whole, chunk))
    if whole < processes and chunk:
        rest = term[whole * chunk :]
        columns[whole, : rest.numel()].copy_(rest)
