"""All-reduce by messages: exchange slices, add this rank's share of the vector in order, collect the shares.

::

    my slices                        sent from where they are, each process its part of them
    add my share                     from my slices, and from the received parts of the others
    my share                         sent to every process
    the result                       beside the slices, or in place of the first of them

Slices that an owner may add locally without changing a bit are sent as their sum
(:func:`~holdfast.comm.allreduce.adding.addable`): in ``tree`` order an owner of many slices sends little more. Each
process sends its own rows only: after the loss of one of N workers the vectors sent grow by 1/N, and only at the worker
that took over its slice.

Received parts lie in one buffer that all spans use in turn (:mod:`~holdfast.comm.allreduce.message_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.allreduce.adding import MeanDivisor, TiledSum, addable
from holdfast.comm.allreduce.checksums import SUM, Altered, ChecksummedVector, Midway, ignore_corruption
from holdfast.comm.allreduce.message_memory import MessageMemory
from holdfast.comm.allreduce.shm import LEFT_OUT, Slots, SlotSpan
from holdfast.comm.base import Collectives

_MOST_KEPT = 512
"""Maximum number of spans whose plans are kept from step to step."""

_Messages = list[tuple[int, torch.Tensor]]


@dataclass(slots=True)
class _Plan:
    """The work of one process for one span: its additions, and the tensors that it sends and receives.

    Args:
        slots: The slots for which it was made.
        result: The result; its memory is not the terms'.
        sums: The additions of groups that are sent as their sum, one for each destination.
        addition: Computes the share of this process.
    """

    slots: Slots
    result: ChecksummedVector
    addition: TiledSum
    sums: list[TiledSum]
    give_rows: _Messages
    take_rows: _Messages
    give_share: _Messages
    take_shares: _Messages


class AllToAllReduce:
    """The all-reduce for processes without (enough) shared memory.

    Args:
        comm: The members.
        terms: The memory of each slot here, bytes.
        slot_bytes: Its size, also where there is none.
        keeps_terms: See :attr:`OrderedAllReduce.keeps_terms`; may change between two calls.
    """

    def __init__(
        self, comm: Collectives, terms: Sequence[torch.Tensor], slot_bytes: int, *, keeps_terms: bool = True
    ) -> None:
        self.result_memory = None
        """See :attr:`SharedMemoryReduce.result_memory`."""
        self.keeps_terms = keeps_terms
        self._comm = comm
        self._terms = terms
        self._slot_bytes = slot_bytes
        self._me = comm.processes.index(comm.local_ranks)
        self._is_connected = False
        self._result: torch.Tensor | None = None
        self._plans: dict[tuple[SlotSpan, str, bool], _Plan] = {}
        self._memory = MessageMemory(terms[0].device, self._plans.clear)

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
        if not self._is_connected or not span.length:
            self._comm.barrier()  # messages need a collective before them, and without numbers there are no messages
            self._is_connected = True
        plan = self._get_plan(span, slots, order)
        for addition in plan.sums:
            addition(altered=altered)
        self._comm.sendrecv(plan.give_rows, plan.take_rows)
        midway()
        plan.addition(mean, altered)
        self._comm.sendrecv(plan.give_share, plan.take_shares)
        if span.checked and not plan.result.is_intact():
            altered(SUM)
        if not self.keeps_terms:
            span.of(self._terms[0]).copy_(plan.result.numbers)
        return self.result(span)

    def result(self, span: SlotSpan) -> torch.Tensor:
        """Return the last result; it is complete only if the all-reduce completed on this process."""
        return span.of(self._result_memory() if self.keeps_terms else self._terms[0])

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The memory of this path besides the terms, bytes."""
        return tuple(memory for memory in (self._memory.buffer, self._result) if memory is not None)

    def _result_memory(self) -> torch.Tensor:
        if self._result is None:
            self._result = torch.zeros(self._slot_bytes, dtype=torch.uint8, device=self._terms[0].device)
        return self._result

    # -- the plan: additions and messages

    def _get_plan(self, span: SlotSpan, slots: Slots, order: str) -> _Plan:
        key = (span, order, self.keeps_terms)
        known = self._plans.get(key)
        if known is None or known.slots != slots:
            if len(self._plans) >= _MOST_KEPT:  # collectives may be of any length
                del self._plans[next(iter(self._plans))]
            known = self._make_plan(span, slots, order)
            self._plans[key] = known
        return known

    def _make_plan(self, span: SlotSpan, slots: Slots, order: str) -> _Plan:
        parts, rows = _parts(span, len(slots)), _rows(slots, order)
        mine, others = parts[self._me], [i for i in range(len(slots)) if i != self._me]
        terms = {n: span.vector(self._terms[slot]) for slot, n in enumerate(slots[self._me]) if n != LEFT_OUT}
        taken = [(i, group[0]) for i in others for group in rows[i]]
        sent = [(i, group) for i in others for group in rows[self._me]]
        lengths = [mine.stop - mine.start for _ in taken]
        lengths += [parts[i].stop - parts[i].start for i, group in sent if len(group) > 1]
        lengths += [span.length] * (not self.keeps_terms)
        vectors = self._memory.divide(span, [(length,) for length in lengths])
        received = [(i, n, next(vectors)) for i, n in taken]
        meeting = [(n, term[mine]) for n, term in terms.items()] + [(n, part) for _, n, part in received]
        sums = [
            TiledSum([(n, terms[n][parts[i]]) for n in group], next(vectors), parts[i].start, order)
            for i, group in sent
            if len(group) > 1
        ]
        ready = iter(sums)
        given = [(i, next(ready).out if len(group) > 1 else terms[group[0]][parts[i]]) for i, group in sent]
        result = span.vector(self._result_memory()) if self.keeps_terms else next(vectors)
        meeting.sort(key=lambda term: term[0])
        return _Plan(
            slots,
            result,
            TiledSum(meeting, result[mine], mine.start, order),
            sums,
            [*_messages(given), *self._tokens(parts, rows, gives=True)],
            [*_messages((i, part) for i, _, part in received), *self._tokens(parts, rows, gives=False)],
            [*_messages((i, result[mine]) for i in others)],
            [*_messages((i, result[parts[i]]) for i in others)],
        )

    def _tokens(self, parts: Sequence[slice], rows: Sequence[Sequence[object]], *, gives: bool) -> _Messages:
        """Return messages of a byte from the processes that would send nothing otherwise.

        No process may have a result before all have begun. The first one always has a share, and receives the messages.
        """
        silent = [i for i, part in enumerate(parts) if not rows[i] and part.start == part.stop and i]
        if gives:
            return [(0, torch.zeros(1, dtype=torch.uint8))] if self._me in silent else []
        return [(i, torch.empty(1, dtype=torch.uint8)) for i in silent] if self._me == 0 else []


def _messages(vectors: Iterable[tuple[int, ChecksummedVector]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the messages of vectors that are not empty, each with its destination or source."""
    for i, vector in vectors:
        if vector.numbers.numel():
            yield from ((i, message) for message in vector.messages())


def _parts(span: SlotSpan, processes: int) -> list[slice]:
    """Return the share of each process; the last ones may be short, or empty."""
    chunk = -(-span.length // (processes * span.line)) * span.line
    return [slice(min(i * chunk, span.length), min((i + 1) * chunk, span.length)) for i in range(processes)]


def _rows(slots: Slots, order: str) -> list[list[tuple[int, ...]]]:
    """Return the rows that each process sends: slices, and groups of slices that it adds locally."""
    holders = {n: process for process, held in enumerate(slots) for n in held if n != LEFT_OUT}
    rows: list[list[tuple[int, ...]]] = [[] for _ in slots]
    for group in addable(holders, order):
        rows[holders[group[0]]].append(group)
    return rows
