"""All-reduce between hosts: shared memory on each host, and between hosts only sums that cannot be reduced further.

Only in the orders of a tree, whose aligned groups of slices can be added by the host that owns them all
(:func:`~holdfast.comm.allreduce.adding.addable`)::

    each worker's terms lie in its own segments          no other process writes them
    barrier A                                            all terms are there
    add the groups of my host, my share of the vector    in place, from the terms
    exchange the sums of groups, finish the tree         one worker per chunk, which also divides it
    gather finished chunks                               into the result shared by my host
    barrier B                                            all shares of all results are there
    the optimizer reads the result of its host in place

Every worker of a host has a share of the vector. For each piece of it, it communicates with the one worker of every
other host whose share contains the piece: on hosts with as many workers each, the n-th of one with the n-th of the
others, its *rail* (:func:`rails`). So each chunk crosses once from host to host, however many workers they have, and no
worker waits for another of its own host between A and B.

With ``H`` hosts and vectors of ``B`` bytes a host sends ``g * B * (H - 1) / H`` bytes of sums, where ``g`` is the
number of groups that it holds, and ``B * (H - 1) / H`` of results: ``1.75 * B`` for 8 hosts whose slices form one
group each. After a loss only the hosts that then hold more groups send more. Where the order rounds units to bfloat16,
the sums of whole units and the results are sent in 16 bits.

Sums, and results in 16 bits, lie in one buffer that all spans use in turn (:mod:`~holdfast.comm.allreduce.message_memory`).

Correctness after failures and late wake-ups rests on the same rules as in :mod:`~holdfast.comm.allreduce.shm`: one
writer per share, terms that no other process writes, new memory in every generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from holdfast.base.orders import base_of, is_rounded
from holdfast.comm.allreduce.adding import TiledSum, addable
from holdfast.comm.allreduce.alltoall import Row, row_type
from holdfast.comm.allreduce.checksums import SUM, ChecksummedVector, num_tiles
from holdfast.comm.allreduce.host_barrier import HostBarrier
from holdfast.comm.allreduce.message_memory import Block, MessageMemory
from holdfast.comm.allreduce.mover import Mover, RoundMover
from holdfast.comm.allreduce.path import LEFT_OUT, ReduceCall, ReducePath, Slots, SlotSpan
from holdfast.comm.allreduce.shm import MAX_INTEGERS, HostMemory
from holdfast.comm.base import Collectives, Round
from holdfast.errors import ScriptError

ORDER_BETWEEN_HOSTS = "tree"
"""The order in which a host may add its slices before sending, also if units are rounded."""

ROUND_BYTES = 2 << 20
"""Least bytes of a part that is exchanged in a round of its own. Additions take place while other rounds are on their way."""

_Messages = list[tuple[int, torch.Tensor]]
_Terms = dict[int, ChecksummedVector]


@dataclass(frozen=True, slots=True)
class ReducePiece:
    """A part of the vector in the share of one worker per host (``workers``); host ``finisher`` completes its sum."""

    part: slice
    workers: tuple[int, ...]
    finisher: int

    def divided(self, count: int, line: int) -> Iterator[ReducePiece]:
        """Yield at most ``count`` even parts of it, none of them empty, whose boundaries are multiples of ``line``."""
        start, stop = self.part.start, self.part.stop
        size = _even(stop - start, count, line)
        for begin in range(start, stop, size):
            yield ReducePiece(slice(begin, min(begin + size, stop)), self.workers, self.finisher)


@dataclass(slots=True)
class _Round:
    """The work of one rank for a part of a span: its additions, and the tensors that it sends and receives."""

    own: list[TiledSum] = field(default_factory=list)
    give_sums: _Messages = field(default_factory=list)
    take_sums: _Messages = field(default_factory=list)
    finish: list[TiledSum] = field(default_factory=list)
    give_results: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    take_results: _Messages = field(default_factory=list)
    taken: list[ChecksummedVector] = field(default_factory=list)
    unpacked: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def messages(self) -> Round:
        """Return what is sent and received."""
        results = [(place, data) for places, data in self.give_results for place in places]
        return Round(self.give_sums, self.take_sums, results, self.take_results)


class _Plan(NamedTuple):
    """The work of one rank for one span, in rounds."""

    slots: Slots
    rounds: list[_Round]
    messages: list[Round]


class _Sums(NamedTuple):
    """What the plan of a span is made of: its order, the terms of this host, and the rows that each host sends."""

    span: SlotSpan
    order: str
    terms: _Terms
    rows: list[list[Row]]


class HierarchicalReduce(ReducePath):
    """The all-reduce for processes on several hosts, each of which has shared memory.

    Args:
        comm: The members.
        hosts: The host of each process, from 0 without gaps.
        memory: The memory of this worker's host.
        mover: Moves sums and results between hosts.
    """

    order = ORDER_BETWEEN_HOSTS
    """The order of its additions, with or without the rounding of units."""
    in_place = True

    def __init__(self, comm: Collectives, hosts: Sequence[int], memory: HostMemory, mover: Mover) -> None:
        self.result_memory = memory.result
        self._hosts = hosts
        self._memory = memory
        self._me = comm.processes.index(comm.local_ranks)
        self._barrier = HostBarrier(comm, hosts, memory)
        self._mover = mover
        self._most_rounds = mover.most_rounds if isinstance(mover, RoundMover) else 1
        self._plans: dict[tuple[SlotSpan, str], _Plan] = {}
        self._buffer = MessageMemory("cpu", self._plans.clear)

    def __call__(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        """Return the reduced vector; see :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce`."""
        assert self.adds(call.order), call.order
        plan = self._get_plan(span, slots, call.order)
        self.check_same(span, call.order)  # A: all terms are there
        call.midway()
        for addition in (addition for part in plan.rounds for addition in part.own):
            addition(altered=call.altered)

        def finish(number: int) -> None:
            for addition in plan.rounds[number].finish:
                addition(call.mean, call.altered)

        if len(plan.rounds) > 1:
            cast("RoundMover", self._mover).pipeline(plan.messages, finish)
        else:
            (only,) = plan.rounds
            self._mover.exchange(only.give_sums, only.take_sums)
            finish(0)
            self._mover.gather(only.give_results, only.take_results)
        if not all(result.is_intact() for part in plan.rounds for result in part.taken):
            call.altered(SUM)
        for packed, result in (pair for part in plan.rounds for pair in part.unpacked):
            result.copy_(packed)
        self._barrier()  # B: all shares are there, on all hosts
        return self.result(span)

    def adds(self, order: str) -> bool:
        """See :meth:`ReducePath.adds`; units may be rounded."""
        return base_of(order) == self.order

    def check_same(self, span: SlotSpan, order: str) -> None:
        """A barrier; raises ``ScriptError`` unless all processes all-reduce vectors of one length."""
        longest, shortest = self._barrier((span.length, -span.length))
        if longest != -shortest:
            raise ScriptError(f"the workers all-reduce vectors of different lengths, from {-shortest} to {longest}")

    def maximum(self, values: Sequence[int]) -> list[int] | None:
        """Return the maximum of each integer over all members, None if these are too many."""
        return self._barrier(values) if len(values) <= MAX_INTEGERS else None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self._buffer.buffer,)

    def result(self, span: SlotSpan) -> torch.Tensor:
        """See :meth:`ReducePath.result`; any worker is one on any host."""
        return span.of(self._memory.given)

    # -- the plan: additions and messages

    def _get_plan(self, span: SlotSpan, slots: Slots, order: str) -> _Plan:
        plan = self._plans.get((span, order))
        if plan is None or (plan.slots is not slots and plan.slots != slots):
            plan = self._plans[span, order] = self._make_plan(span, slots, order)
        return plan

    def _make_plan(self, span: SlotSpan, slots: Slots, order: str) -> _Plan:
        host = self._hosts[self._me]
        sums = self._sums(span, slots, order)
        cut = list(pieces(self._hosts, span.length, span.line))
        rounds = [_Round() for _ in range(self._num_rounds(span, cut))]
        own_pieces = [piece for piece in cut if piece.workers[host] == self._me]
        parts = [(n, part) for piece in own_pieces for n, part in enumerate(piece.divided(len(rounds), span.line))]
        vectors = self._buffer.divide(span, [block for _, piece in parts for block in _blocks(piece, host, sums)])
        for number, piece in parts:
            if piece.finisher == host:
                self._finish(rounds[number], piece, sums, vectors)
            else:
                self._reduce_host(rounds[number], piece, sums, vectors)
        return _Plan(slots, rounds, [part.messages() for part in rounds])

    def _sums(self, span: SlotSpan, slots: Slots, order: str) -> _Sums:
        places = {
            n: (process, row) for process, held in enumerate(slots) for row, n in enumerate(held) if n != LEFT_OUT
        }
        holders = {n: self._hosts[process] for n, (process, _) in places.items()}
        rows: list[list[Row]] = [[] for _ in set(self._hosts)]
        for group in addable(holders, order):
            rows[holders[group[0]]].append(Row(group, row_type(group, holders, order, span.dtype)))
        host = self._hosts[self._me]
        terms = {
            n: span.vector(self._memory.terms[p][row]) for n, (p, row) in sorted(places.items()) if holders[n] == host
        }
        return _Sums(span, order, terms, rows)

    def _num_rounds(self, span: SlotSpan, cut: Sequence[ReducePiece]) -> int:
        """Return in how many rounds all processes exchange a vector."""
        largest = max((piece.part.stop - piece.part.start for piece in cut), default=0)
        return max(1, min(self._most_rounds, largest * span.dtype.itemsize // ROUND_BYTES))

    def _reduce_host(self, plan: _Round, piece: ReducePiece, sums: _Sums, vectors: Iterator[ChecksummedVector]) -> None:
        """Add the groups of this host, send the sums to the worker that finishes the piece, and receive the result."""
        span, _, terms, rows = sums
        result = self._result(plan, piece, sums, vectors)
        own_rows = rows[self._hosts[self._me]]
        peer, part = piece.workers[piece.finisher], piece.part
        if _is_one_slice(own_rows, span):  # nothing to add: it is sent from where it is, as the only row
            plan.give_sums += [(peer, message[None]) for message in terms[own_rows[0].slices[0]][part].messages()]
        else:
            received, messages = _divided(own_rows, vectors)
            for (slices, _), out in zip(own_rows, received, strict=True):
                group_terms = [(n, terms[n][part]) for n in slices]
                plan.own.append(TiledSum(group_terms, out, part.start, ORDER_BETWEEN_HOSTS))
            plan.give_sums += [(peer, message) for message in messages]
        plan.take_results += [(peer, message) for message in result.messages()]
        plan.taken.append(result)

    def _finish(self, plan: _Round, piece: ReducePiece, sums: _Sums, vectors: Iterator[ChecksummedVector]) -> None:
        """Receive the sums of other hosts, add them and the slices of this one, and send the result to all hosts."""
        meeting = [(n, term[piece.part]) for n, term in sums.terms.items()]
        out = self._result(plan, piece, sums, vectors)
        peers = [worker for host, worker in enumerate(piece.workers) if host != piece.finisher]
        plan.give_results += [(peers, message) for message in out.messages()]
        for host, (peer, peer_rows) in enumerate(zip(piece.workers, sums.rows, strict=True)):
            if host == piece.finisher:
                continue
            received, messages = _divided(peer_rows, vectors)
            plan.take_sums += [(peer, message) for message in messages]
            # A group's sum takes the place of one of its slices: no other slice is added before it is complete.
            meeting += [(row.slices[0], vector) for row, vector in zip(peer_rows, received, strict=True)]
        meeting.sort(key=lambda term: term[0])
        plan.finish.append(TiledSum(meeting, out, piece.part.start, sums.order))

    def _result(
        self, plan: _Round, piece: ReducePiece, sums: _Sums, vectors: Iterator[ChecksummedVector]
    ) -> ChecksummedVector:
        """Return a part of the result as it is sent to other hosts, with memory for its checksums.

        It is the memory of the result, or has 16 bits and is copied there at the end.
        """
        span, result = sums.span, sums.span.of(self._memory.result)[piece.part]
        if is_rounded(sums.order):
            packed = next(vectors)
            plan.unpacked.append((packed.numbers, result))
            return packed
        tiles = num_tiles(len(result), span.tile)
        return ChecksummedVector(result, torch.zeros(tiles, dtype=torch.int64) if span.checked else None, span.tile)


def _is_one_slice(rows: Sequence[Row], span: SlotSpan) -> bool:
    return len(rows) == 1 and len(rows[0].slices) == 1 and rows[0].dtype == span.dtype


def _blocks(piece: ReducePiece, host: int, sums: _Sums) -> Iterator[Block]:
    """Yield the memory that a worker of ``host`` needs for a piece, in the order in which it is taken.

    It is that of the result, if that has 16 bits, and of the sums that it receives, or else sends: a block for each type.
    """
    length = piece.part.stop - piece.part.start
    if is_rounded(sums.order):
        yield (length,), torch.bfloat16
    own_rows = sums.rows[host]
    peer_rows = [rows for other, rows in enumerate(sums.rows) if other != host]
    moved = peer_rows if piece.finisher == host else [] if _is_one_slice(own_rows, sums.span) else [own_rows]
    for rows in moved:
        for dtype, count in Counter(row.dtype for row in rows).items():
            yield (count, length), dtype


def _divided(
    rows: Sequence[Row], blocks: Iterator[ChecksummedVector]
) -> tuple[list[ChecksummedVector], list[torch.Tensor]]:
    """Take the blocks of some rows; return the memory of each row, and the messages that carry the blocks."""
    vectors: dict[Row, ChecksummedVector] = {}
    messages: list[torch.Tensor] = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        block = next(blocks)
        alike = [row for row in rows if row.dtype == dtype]
        vectors |= {row: _row(block, i) for i, row in enumerate(alike)}
        messages += block.messages()
    return [vectors[row] for row in rows], messages


def _row(rows: ChecksummedVector, i: int) -> ChecksummedVector:
    return ChecksummedVector(rows.numbers[i], None if rows.checksums is None else rows.checksums[i], rows.tile)


def pieces(hosts: Sequence[int], length: int, line: int) -> Iterator[ReducePiece]:
    """Yield the pieces of a vector, ascending, none of them empty.

    Every host divides the vector evenly among its workers. Between two boundaries of any host, the vector is divided
    evenly among the hosts, which each finish one piece, so traffic is balanced. Boundaries are multiples of ``line``.
    """
    count = max(hosts) + 1
    workers = [[process for process, host in enumerate(hosts) if host == index] for index in range(count)]
    chunks = [_even(length, len(host_workers), line) for host_workers in workers]
    places = (i * chunk for host_workers, chunk in zip(workers, chunks, strict=True) for i in range(len(host_workers)))
    cuts = sorted({place for place in places if place < length})
    for start, stop in pairwise([*cuts, length]):
        owners = tuple(host_workers[start // chunk] for host_workers, chunk in zip(workers, chunks, strict=True))
        size = _even(stop - start, count, line)
        for finisher, begin in enumerate(range(start, stop, size)):
            yield ReducePiece(slice(begin, min(begin + size, stop)), owners, finisher)


def rails(hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups of processes that exchange pieces: the n-th of every host, or all if hosts are not alike."""
    workers = [[process for process, host in enumerate(hosts) if host == index] for index in range(max(hosts) + 1)]
    if len({len(host_workers) for host_workers in workers}) > 1:
        return [tuple(range(len(hosts)))]
    return list(zip(*workers, strict=True))


def _even(length: int, count: int, line: int) -> int:
    """Return the size of the largest of ``count`` even parts of a vector, a multiple of ``line``, at least one."""
    return max(1, -(-length // (count * line))) * line
