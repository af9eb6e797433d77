"""The sum by messages: exchange raw slices (Alltoall), add one's share in order, collect the shares (Allgather)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.adding import Addition, Mean
from holdfast.comm.base import Exchange
from holdfast.comm.shared import ALIGN, Slots, Span

_MOST_KEPT = 64
"""Spans whose buffers are kept from one sum to the next."""


@dataclass(slots=True)
class _Buffers:
    """What one exchange needs, kept from step to step because fresh memory costs page faults."""

    slots: Slots
    send: torch.Tensor
    received: torch.Tensor
    share: torch.Tensor
    result: torch.Tensor
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
        self, span: Span, slots: Slots, order: str, mean: Mean | None, midway: Callable[[], None]
    ) -> torch.Tensor:
        """Return the sum; see :class:`~holdfast.comm.ordered.OrderedSum`."""
        buffers = self._get_buffers(span, slots, order)
        for row in range(len(slots[self._me])):
            _scatter(span.of(self._terms[row]), buffers.send[:, row])
        self._comm.alltoall(buffers.send, buffers.received)
        midway()
        buffers.addition(mean)
        self._comm.allgather(buffers.share, buffers.result)
        self._last = buffers.result
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
        line = ALIGN // span.dtype.itemsize
        processes, rows = len(slots), max(1, *map(len, slots))
        chunk = -(-span.length // (processes * line)) * line
        device = self._terms[0].device if self._terms else torch.device("cpu")
        send = torch.zeros(processes, rows, chunk, dtype=span.dtype, device=device)
        received, share = torch.zeros_like(send), torch.zeros(chunk, dtype=span.dtype, device=device)
        pieces = sorted((n, (process, row)) for process, held in enumerate(slots) for row, n in enumerate(held))
        addition = Addition([(n, received[place]) for n, place in pieces], share, self._me * chunk, order)
        result = torch.zeros(processes, chunk, dtype=span.dtype, device=device)
        return _Buffers(slots, send, received, share, result, addition)


def _scatter(term: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy ``term`` into the rows of ``columns``, one process's chunk after another; the last one may be short."""
    processes, chunk = columns.shape
    whole = min(processes, term.numel() // chunk) if chunk else 0
    columns[:whole].copy_(term[: whole * chunk].view(whole, chunk))
    if whole < processes and chunk:
        rest = term[whole * chunk :]
        columns[whole, : rest.numel()].copy_(rest)
