"""All-reduce by messages: exchange slices, add this rank's share of the vector in order, collect the shares.

::

    my slices                        sent from where they are, each process its part of them
    add my share                     from my slices, and from the received parts of the others
    my share                         sent to every process, or relayed
    the result                       beside the slices, or in place of the first of them

Slices that an owner may add locally without changing a bit are sent as their sum
(:func:`~holdfast.comm.allreduce.adding.addable`): in ``tree`` order an owner of many slices sends little more. Each
process sends its own rows only. Where some have more rows than others, as after a loss, the shares are such that none
sends much more than another (:mod:`~holdfast.comm.allreduce.parts`).

In the orders that round to bfloat16 (:mod:`holdfast.base.orders`), units and results are sent in 16 bits, and only sums of
parts of a unit in 32.

Received parts lie in one buffer that all spans use in turn (:mod:`~holdfast.comm.allreduce.message_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.base.orders import base_of, is_rounded, unit_of
from holdfast.comm.allreduce.adding import TiledSum, addable
from holdfast.comm.allreduce.checksums import SUM, ChecksummedVector
from holdfast.comm.allreduce.message_memory import MessageMemory
from holdfast.comm.allreduce.parts import BALANCED_BYTES, Division, divide
from holdfast.comm.allreduce.path import LEFT_OUT, ReduceCall, ReducePath, Slots, SlotSpan
from holdfast.comm.base import Collectives

_MOST_KEPT = 512
"""Maximum number of spans whose plans are kept from step to step."""

_Messages = list[tuple[int, torch.Tensor]]


class Row(NamedTuple):
    """What a process sends of some of its slices: their sum, of this type."""

    slices: tuple[int, ...]
    dtype: torch.dtype

    def is_made(self, dtype: torch.dtype) -> bool:
        """Return whether it has to be added, or rounded, before it is sent; otherwise it is a term, of this type."""
        return len(self.slices) > 1 or self.dtype != dtype


@dataclass(slots=True)
class _Plan:
    """The work of one process for one span: its additions, and the tensors that it sends and receives.

    Args:
        slots: The slots for which it was made.
        result: The result as it is sent; its memory is not the terms'.
        sums: The additions of rows that are sent as a sum, or in another type, one for each destination.
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
    is_relayed: bool
    give_relayed: _Messages
    take_relayed: _Messages


class AllToAllReduce(ReducePath):
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
        self.keeps_terms = keeps_terms
        self._comm = comm
        self._terms = terms
        self._slot_bytes = slot_bytes
        self._me = comm.processes.index(comm.local_ranks)
        self._is_connected = False
        self._result: torch.Tensor | None = None
        self._plans: dict[tuple[SlotSpan, str, bool], _Plan] = {}
        self._memory = MessageMemory(terms[0].device, self._plans.clear)

    def __call__(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        """Return the reduced vector; see :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce`."""
        if not self._is_connected or not span.length:
            self._comm.barrier()  # messages need a collective before them, and without numbers there are no messages
            self._is_connected = True
        plan = self._get_plan(span, slots, call.order)
        for addition in plan.sums:
            addition(altered=call.altered)
        self._comm.sendrecv(plan.give_rows, plan.take_rows)
        call.midway()
        plan.addition(call.mean, call.altered)
        self._comm.sendrecv(plan.give_share, plan.take_shares)
        if plan.is_relayed:
            self._comm.sendrecv(plan.give_relayed, plan.take_relayed)
        if span.checked and not plan.result.is_intact():
            call.altered(SUM)
        result = self.result(span)
        if result.data_ptr() != plan.result.numbers.data_ptr():
            result.copy_(plan.result.numbers)
        return result

    def result(self, span: SlotSpan) -> torch.Tensor:
        return span.of(self._result_memory() if self.keeps_terms else self._terms[0])

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return tuple(memory for memory in (self._memory.buffer, self._result) if memory is not None)

    def _result_memory(self) -> torch.Tensor:
        if self._result is None:
            self._result = torch.zeros(self._slot_bytes, dtype=torch.uint8, device=self._terms[0].device)
        return self._result

    # -- the plan: additions and messages

    def _get_plan(self, span: SlotSpan, slots: Slots, order: str) -> _Plan:
        key = (span, order, self.keeps_terms)
        plan = self._plans.get(key)
        if plan is None or plan.slots != slots:
            if len(self._plans) >= _MOST_KEPT:  # collectives may be of any length
                del self._plans[next(iter(self._plans))]
            plan = self._make_plan(span, slots, order)
            self._plans[key] = plan
        return plan

    def _make_plan(self, span: SlotSpan, slots: Slots, order: str) -> _Plan:
        rows = _rows(slots, order, span.dtype)
        result_type = torch.bfloat16 if is_rounded(order) else span.dtype
        division = _division(span, rows, result_type)
        parts = division.parts
        own_part, peers = parts[self._me], [i for i in range(len(slots)) if i != self._me]
        terms = {n: span.vector(self._terms[slot]) for slot, n in enumerate(slots[self._me]) if n != LEFT_OUT}
        taken = [(i, row) for i in peers for row in rows[i]]
        sent = [(i, row) for i in peers for row in rows[self._me]]
        added = [(i, row) for i, row in sent if row.is_made(span.dtype)]
        is_apart = not self.keeps_terms or is_rounded(order)
        lengths = [(own_part.stop - own_part.start, row.dtype) for _, row in taken]
        lengths += [(parts[i].stop - parts[i].start, row.dtype) for i, row in added]
        lengths += [(span.length, result_type)] * is_apart
        vectors = self._memory.divide(span, [((length,), dtype) for length, dtype in lengths])
        received = [(i, row.slices[0], next(vectors)) for i, row in taken]
        meeting = [(n, term[own_part]) for n, term in terms.items()] + [(n, part) for _, n, part in received]
        meeting.sort(key=lambda term: term[0])
        sums = [
            TiledSum([(n, terms[n][parts[i]]) for n in row.slices], next(vectors), parts[i].start, base_of(order))
            for i, row in added
        ]
        ready = iter(sums)
        payloads = [
            (i, next(ready).out if row.is_made(span.dtype) else terms[row.slices[0]][parts[i]]) for i, row in sent
        ]
        result = next(vectors) if is_apart else span.vector(self._result_memory())
        return _Plan(
            slots,
            result,
            TiledSum(meeting, result[own_part], own_part.start, order),
            sums,
            [*_messages(payloads), *self._tokens(parts, rows, gives=True)],
            [*_messages((i, part) for i, _, part in received), *self._tokens(parts, rows, gives=False)],
            *self._shares(division, result, peers),
        )

    def _shares(
        self, division: Division, result: ChecksummedVector, peers: Sequence[int]
    ) -> tuple[_Messages, _Messages, bool, _Messages, _Messages]:
        """Return the messages of the results: those sent and received, whether there are relays, and their messages."""
        me, parts, relays = self._me, division.parts, division.relays
        sources = {relay.source for relay in relays}
        direct = [(relay.by, relay.piece) for relay in relays if relay.source == me]
        first = [(relay.source, relay.piece) for relay in relays if relay.by == me]
        passed = [(i, relay.piece) for relay in relays if relay.by == me for i in peers if i != relay.source]
        later = [(relay.by, relay.piece) for relay in relays if me not in (relay.by, relay.source)]
        give = direct if me in sources else [(i, parts[me]) for i in peers]
        take = [(i, parts[i]) for i in peers if i not in sources] + first

        def messages(pieces: Iterable[tuple[int, slice]]) -> _Messages:
            return list(_messages((i, result[piece]) for i, piece in pieces))

        return messages(give), messages(take), bool(relays), messages(passed), messages(later)

    def _tokens(self, parts: Sequence[slice], rows: Sequence[Sequence[object]], *, gives: bool) -> _Messages:
        """Return messages of a byte from the processes that would send nothing otherwise.

        No process may have a result before all have begun. The first one with a share receives the messages.
        """
        has_share = [part.start < part.stop for part in parts]
        to = has_share.index(True) if any(has_share) else 0
        silent = [i for i in range(len(parts)) if not rows[i] and not has_share[i] and i != to]
        if gives:
            return [(to, torch.zeros(1, dtype=torch.uint8))] if self._me in silent else []
        return [(i, torch.empty(1, dtype=torch.uint8)) for i in silent] if self._me == to else []


def _messages(vectors: Iterable[tuple[int, ChecksummedVector]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the messages of vectors that are not empty, each with its destination or source."""
    for i, vector in vectors:
        if vector.numbers.numel():
            yield from ((i, message) for message in vector.messages())


def _division(span: SlotSpan, rows: Sequence[Sequence[Row]], result_type: torch.dtype) -> Division:
    """Return the share of each process."""
    loads = [sum(row.dtype.itemsize for row in process_rows) / result_type.itemsize for process_rows in rows]
    is_long = span.length * span.dtype.itemsize >= BALANCED_BYTES
    return divide(span.length, span.line, loads, balanced=is_long)


def _rows(slots: Slots, order: str, dtype: torch.dtype) -> list[list[Row]]:
    """Return the rows that each process sends: slices, and groups of slices that it adds locally."""
    holders = {n: process for process, held in enumerate(slots) for n in held if n != LEFT_OUT}
    rows: list[list[Row]] = [[] for _ in slots]
    for group in addable(holders, order):
        rows[holders[group[0]]].append(Row(group, row_type(group, holders, order, dtype)))
    return rows


def row_type(group: tuple[int, ...], slices: Mapping[int, int], order: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the sum of a group is sent: 16 bits if it is a unit, all of its ``slices``, to be rounded."""
    unit = unit_of(order)
    if not unit:
        return dtype
    first = group[0] // unit * unit
    return torch.bfloat16 if sum(n in slices for n in range(first, first + unit)) == len(group) else dtype
