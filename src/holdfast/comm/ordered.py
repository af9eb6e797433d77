"""The sum whose order belongs to the job: the same bits whoever holds which slice, and however many are alive.

The workers exchange raw slices (Alltoall), each adds its share of the vector in slice order, and the shares are
collected (Allgather). Floating-point addition is not associative, so this is what makes the result independent of
who died when; it also is faster than a general Allreduce for large vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.base import Communicator

_LINE = 16
"""Shares are a multiple of this many numbers, so that they begin on cache lines."""


def _nothing() -> None:
    pass


def fold(terms: Sequence[tuple[int, torch.Tensor]], out: torch.Tensor) -> None:
    """Add ``((0+1)+2)+3``, the order of plain accumulation.

    Args:
        terms: ``(slice, tensor)``, ascending by slice, at least one.
        out: Where the sum goes. The first term is copied, not added to zero: 0.0 + -0.0 would lose a sign.
    """
    out.copy_(terms[0][1])
    for _, term in terms[1:]:
        out.add_(term)


def tree(terms: Sequence[tuple[int, torch.Tensor]], out: torch.Tensor) -> None:
    """Add in a balanced binary tree over slice numbers: ``(0+1)+(2+3)``.

    Args:
        terms: ``(slice, tensor)``, ascending by slice, at least one.
        out: Where the sum goes.
    """
    level = [(number, term) for number, term in terms]
    while len(level) > 1:
        paired: list[tuple[int, torch.Tensor]] = []
        for number, term in level:
            if paired and paired[-1][0] == number // 2:
                paired[-1] = (number // 2, paired[-1][1] + term)
            else:
                paired.append((number // 2, term))
        level = paired
    out.copy_(level[0][1])


ORDERS: dict[str, Callable[[Sequence[tuple[int, torch.Tensor]], torch.Tensor], None]] = {"fold": fold, "tree": tree}


_Shape = tuple[int, torch.dtype, int, int, int]
"""Key, type, length, processes, most slices of a process."""


@dataclass(slots=True)
class _Buffers:
    """What one exchange needs, kept from step to step because fresh memory costs page faults."""

    send: torch.Tensor
    received: torch.Tensor
    share: torch.Tensor
    result: torch.Tensor


class OrderedSum:
    """Sums one term a slice, in slice order, over all processes of a communicator.

    Args:
        comm: Who takes part.
        order: ``"fold"`` or ``"tree"``.
    """

    def __init__(self, comm: Communicator, order: str) -> None:
        self._comm = comm
        self._add = ORDERS[order]
        self._buffers: dict[_Shape, _Buffers] = {}

    def __call__(
        self,
        terms: Mapping[int, torch.Tensor],
        owners: Mapping[int, int],
        *,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        key: int = 0,
        midway: Callable[[], None] = _nothing,
    ) -> torch.Tensor:
        """Return the sum, the same bits at every process; it stays valid until the next call with this ``key``.

        Args:
            terms: By slice, for every slice in ``owners`` whose owner this process plays; 1-D, contiguous. Untouched.
            owners: The rank that holds each slice that takes part, the same everywhere; ranks that are not members
                are left out.
            length: Numbers in each term.
            dtype: Of the terms.
            device: Of the terms.
            key: Names the buffers that are used again; one a bucket.
            midway: Called when this process has given its terms and not yet its share of the result.

        Raises:
            PeerFailed: if it did not complete here.
        """
        processes = self._comm.processes
        slots = self._slots(owners)
        buffers = self._get_buffers((key, dtype, length, len(processes), max(1, *map(len, slots))), device)
        me = processes.index(self._comm.here)
        for row, number in enumerate(slots[me]):
            _scatter(terms[number], buffers.send[:, row])
        self._comm.alltoall(buffers.send, buffers.received)
        midway()
        pieces = sorted((n, (process, row)) for process, held in enumerate(slots) for row, n in enumerate(held))
        if pieces:
            self._add([(n, buffers.received[place]) for n, place in pieces], buffers.share)
        else:
            buffers.share.fill_(-0.0)
        self._comm.allgather(buffers.share, buffers.result)
        return buffers.result.view(-1)[:length]

    def _slots(self, owners: Mapping[int, int]) -> list[list[int]]:
        """Return the slices that each process holds, ascending."""
        return [sorted(n for n, rank in owners.items() if rank in ranks) for ranks in self._comm.processes]

    def _get_buffers(self, shape: _Shape, device: torch.device | str) -> _Buffers:
        if shape not in self._buffers:
            key, dtype, length, processes, rows = shape
            for old in [known for known in self._buffers if known[0] == key]:
                del self._buffers[old]
            chunk = -(-length // (processes * _LINE)) * _LINE
            self._buffers[shape] = _Buffers(
                send=torch.zeros(processes, rows, chunk, dtype=dtype, device=device),
                received=torch.zeros(processes, rows, chunk, dtype=dtype, device=device),
                share=torch.zeros(chunk, dtype=dtype, device=device),
                result=torch.zeros(processes, chunk, dtype=dtype, device=device),
            )
        return self._buffers[shape]


def _scatter(term: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy ``term`` into the rows of ``columns``, one process's chunk after another; the last one may be short."""
    processes, chunk = columns.shape
    whole = min(processes, term.numel() // chunk)
    columns[:whole].copy_(term[: whole * chunk].view(whole, chunk))
    if whole < processes:
        rest = term[whole * chunk :]
        columns[whole, : rest.numel()].copy_(rest)
