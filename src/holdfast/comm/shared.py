"""The sum through shared memory: everybody adds its share, straight from where the others' terms lie.

::

    each worker's terms lie in its own segments     nobody else writes them
    barrier A                                       all terms are there
    add my share of the vector into the result      nobody else writes that share
    barrier B                                       all shares are there
    the optimizer reads the result in place

Nothing is sent and no term is touched. What makes it safe when workers die, or were stopped and wake up late:

- *Do not trust the barrier.* Everybody writes how far it is into the result's head; all words are checked after A and
  after B, and only then has the sum completed.
- *New generation, fresh memory.* A worker that was stopped while adding may wake much later and write old values. It
  writes them into the memory of its own generation, which nobody uses any more: survivors make a new result.
- *Read-only.* The terms of others, and the result as it is given out, are mapped for reading: nobody can change what
  others still read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.comm.adding import Addition, Mean
from holdfast.comm.base import Exchange
from holdfast.comm.memory import Segment, host_id, open_segment
from holdfast.errors import PeerFailed, ScriptError

ALIGN = 64
"""Vectors, and everybody's share of them, begin on cache lines, bytes."""

_WORDS = 8
"""64-bit words in a worker's line of the head: incarnation, generation, how far, length of the vector."""

_MAGIC = 0x5355_4D4D_4148_4F4C
"""Says that a segment is the result of a sum."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a vector lies in the memory of every slice.

    Args:
        start: First byte, a multiple of :data:`ALIGN`.
        length: Numbers.
        dtype: Of the numbers.
    """

    start: int
    length: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """First byte behind it where another span may begin."""
        return self.start + -(-self.length * self.dtype.itemsize // ALIGN) * ALIGN

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the vector in ``memory`` (bytes)."""
        return memory[self.start : self.start + self.length * self.dtype.itemsize].view(self.dtype)


Slots = Sequence[Sequence[int]]
"""The slices that each process holds, ascending; the place of a slice in its list says where its term lies."""


class SharedSum:
    """The sum among processes whose terms and result lie in memory that all of them can reach.

    Args:
        comm: Gives barriers.
        terms: Of each process, the memory of each slot, bytes.
        result: Where the sum goes, bytes, for writing.
        given: The same memory as it is given out.
        words: How far each process is, 64-bit, shape ``(processes, 8)``; None where one process is all there is.
        incarnations: What each process writes into its line first.
    """

    def __init__(
        self,
        comm: Exchange,
        terms: Sequence[Sequence[torch.Tensor]],
        result: torch.Tensor,
        given: torch.Tensor,
        words: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None,
        incarnations: Sequence[int] = (),
    ) -> None:
        self._comm = comm
        self._terms = terms
        self._result = result
        self._given = given
        self._words = words
        self._me = comm.processes.index(comm.here)
        self._known = np.array([[who, comm.generation] for who in incarnations], dtype=np.int64)
        self._phase = 0
        self._additions: dict[tuple[Span, str], tuple[Slots, Addition]] = {}

    def __call__(
        self, span: Span, slots: Slots, order: str, mean: Mean | None, midway: Callable[[], None]
    ) -> torch.Tensor:
        """Return the sum; see :class:`~holdfast.comm.ordered.OrderedSum`."""
        addition = self._addition(span, slots, order)
        if self._words is not None:
            self._words[self._me, 3] = span.length
        self._meet()  # A: all terms are there
        if self._words is not None and (self._words[:, 3] != span.length).any():
            msg = f"the workers sum vectors of different lengths, in the order of ranks {self._words[:, 3].tolist()}"
            raise ScriptError(msg)
        midway()
        addition(mean)
        self._meet()  # B: all shares are there
        return self.result(span)

    def result(self, span: Span) -> torch.Tensor:
        """Return the sum that was made last; it is whole once *anybody* has completed it."""
        return span.of(self._given)

    def _addition(self, span: Span, slots: Slots, order: str) -> Addition:
        known = self._additions.get((span, order))
        if known is None or known[0] != slots:
            share = ALIGN // span.dtype.itemsize
            chunk = -(-span.length // (len(slots) * share)) * share
            mine = slice(min(self._me * chunk, span.length), min((self._me + 1) * chunk, span.length))
            terms = sorted((n, (process, row)) for process, held in enumerate(slots) for row, n in enumerate(held))
            addition = Addition(
                [(n, span.of(self._terms[process][row])[mine]) for n, (process, row) in terms],
                span.of(self._result)[mine],
                mine.start,
                order,
            )
            known = self._additions[span, order] = (slots, addition)
        return known[1]

    def _meet(self) -> None:
        """Wait for everybody, and make sure that everybody is as far as this worker."""
        self._phase += 1
        if self._words is None:
            self._comm.barrier()
            return
        self._words[self._me, 2] = self._phase
        self._comm.barrier()
        if (self._words[:, 2] < self._phase).any() or (self._words[:, :2] != self._known).any():
            msg = f"a barrier returned although not everybody was at phase {self._phase}: {self._words[:, :3].tolist()}"
            raise PeerFailed(msg)


# ---------------------------------------------------------------------------------------------
# Setting up, an act of recovery: all members take part, and all end with the same answer


def sum_alone(comm: Exchange, slots: Sequence[torch.Tensor], size_bytes: int, device: torch.device) -> SharedSum:
    """Return the sum of a process that is all there is; the result lies in its private memory."""
    result = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return SharedSum(comm, [slots], result, result)


def sum_shared(comm: Exchange, mine: Sequence[Segment] | None, size_bytes: int) -> SharedSum | str:
    """Return the sum through shared memory among all members, or in words why there can be none.

    Args:
        comm: Whose members take part, all at the same time.
        mine: This worker's slots; None if it has no memory for them.
        size_bytes: Of every slot.

    Raises:
        PeerFailed: if somebody died meanwhile.
    """
    count, me = len(comm.processes), comm.processes.index(comm.here)
    head_bytes = count * _WORDS * 8
    made = None if me or mine is None else _make_result(head_bytes + size_bytes)
    mine = None if me == 0 and made is None else mine
    told = _tell(comm, mine, made)
    if len({row[1] for row in told}) > 1:
        return "the workers are not on one host"
    opened = None
    if all(row[0] for row in told):
        opened = _open(comm, told, head_bytes, size_bytes)
    if comm.maximum([int(opened is None)])[0] or opened is None:
        return "not every worker has the memory"
    return opened


def _make_result(size_bytes: int) -> Segment | None:
    try:
        made = Segment(size_bytes)
    except OSError:
        return None
    made.bytes[:8].view(torch.int64)[0] = _MAGIC
    return made


def _tell(comm: Exchange, mine: Sequence[Segment] | None, made: Segment | None) -> list[list[int]]:
    """Return what everybody says: whether it is ready, host, process, incarnation, the result, its slots."""
    incarnation = int.from_bytes(os.urandom(7), "little")
    fds = [] if mine is None else [segment.fd for segment in mine]
    said = [int(mine is not None), host_id(), os.getpid(), incarnation, -1 if made is None else made.fd, *fds]
    width = comm.maximum([len(said)])[0]
    row = torch.tensor(said + [-1] * (width - len(said)), dtype=torch.int64)
    rows = torch.empty(len(comm.processes), width, dtype=torch.int64)
    comm.allgather(row, rows)
    told: list[list[int]] = rows.tolist()
    return told


def _open(comm: Exchange, told: Sequence[Sequence[int]], head_bytes: int, size_bytes: int) -> SharedSum | None:
    me = comm.processes.index(comm.here)
    try:
        terms = [[open_segment(row[2], fd, size_bytes) for fd in row[5:] if fd >= 0] for row in told]
        whole = open_segment(told[0][2], told[0][4], head_bytes + size_bytes, writable=True)
        given = open_segment(told[0][2], told[0][4], head_bytes + size_bytes)
    except OSError:
        return None
    head = whole[:head_bytes].view(torch.int64).numpy().reshape(len(told), _WORDS)
    if me == 0 and head[0, 0] != _MAGIC:
        return None
    head[me, :2] = (told[me][3], comm.generation)
    return SharedSum(comm, terms, whole[head_bytes:], given[head_bytes:], head, [row[3] for row in told])
