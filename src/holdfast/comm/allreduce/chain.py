"""All-reduce between hosts in ``fold`` order: a running sum goes from host to host, and the result after it.

A fold can be continued where it was left: a host with slices 0 to 3 sends ``((0+1)+2)+3``, and the one with slices 4 to 7
adds them to it. So a host sends one vector for all of its slices instead of each of them::

    barrier A                        all terms are there
    host 0: add its slices           each worker its share of the vector
    host 1: continue the sum         ...
    last host: finish it, divide     then the result goes from host to host, into the result of each
    barrier B                        all shares of all results are there

A host whose slices are not consecutive is visited several times. The vector is divided into pieces as in
:mod:`~holdfast.comm.allreduce.hierarchical`. Each piece makes one hop in each turn, one turn after the piece before it, so
all links are busy at a time. A host sends at most one vector for each visit, and one of the result.

Running sums lie in one buffer that all spans use in turn (:mod:`~holdfast.comm.allreduce.message_memory`). A host adds
its slices to a received sum in place, unless it is the last: then they are added into the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch

from holdfast.comm.allreduce.adding import TiledSum
from holdfast.comm.allreduce.checksums import SUM, ChecksummedVector, num_tiles
from holdfast.comm.allreduce.hierarchical import HierarchicalReduce, ReducePiece, pieces
from holdfast.comm.allreduce.message_memory import MessageMemory
from holdfast.comm.allreduce.mover import Mover
from holdfast.comm.allreduce.path import LEFT_OUT, ReduceCall, Slots, SlotSpan
from holdfast.comm.allreduce.shm import HostMemory
from holdfast.comm.base import Collectives

ORDER_IN_CHAIN = "fold"
"""The order in which a sum can be continued."""

PIECE_BYTES = 1 << 20
"""Approximate least bytes of a piece: smaller ones would wait for more turns."""
MOST_DIVIDED = 16
"""Maximum number of pieces that a worker's share of a host's pieces is divided into."""

_Messages = list[tuple[int, torch.Tensor]]


class Visit(NamedTuple):
    """Some consecutive slices of a host."""

    host: int
    slices: tuple[int, ...]


class _Addition(NamedTuple):
    """What is added in a turn; the last visit's sum is divided."""

    sum: TiledSum
    is_last: bool


@dataclass(slots=True)
class _Turn:
    """What a process does in a turn: additions, then what it sends and receives."""

    additions: list[_Addition] = field(default_factory=list)
    give: _Messages = field(default_factory=list)
    take: _Messages = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """The work of one process for one span."""

    slots: Slots
    turns: list[_Turn]
    taken: list[ChecksummedVector] = field(default_factory=list)


def visits_of(holders: dict[int, int]) -> list[Visit]:
    """Return the visits of a sum, given the host of each slice; at least one."""
    runs = groupby(sorted(holders), lambda n: holders[n])
    return [Visit(host, tuple(slices)) for host, slices in runs] or [Visit(0, ())]


class ChainReduce(HierarchicalReduce):
    """The all-reduce for processes on several hosts, each of which has shared memory, in ``fold`` order."""

    order = ORDER_IN_CHAIN

    def __init__(self, comm: Collectives, hosts: Sequence[int], memory: HostMemory, mover: Mover) -> None:
        super().__init__(comm, hosts, memory, mover)
        self._chains: dict[SlotSpan, _Plan] = {}
        self._buffer = MessageMemory("cpu", self._chains.clear)

    def __call__(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        """Return the reduced vector; see :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce`."""
        assert self.adds(call.order), call.order
        plan = self._chains.get(span)
        if plan is None or (plan.slots is not slots and plan.slots != slots):
            planner = _Planner(self._me, self._hosts, self._memory, span, slots)
            plan = self._chains[span] = planner.plan(self._buffer)
        self.check_same(span, call.order)  # A: all terms are there
        call.midway()
        for turn in plan.turns:
            for addition, is_last in turn.additions:
                addition(call.mean if is_last else None, call.altered)
            if turn.give or turn.take:
                self._mover.exchange(turn.give, turn.take)
        if not all(result.is_intact() for result in plan.taken):
            call.altered(SUM)
        self._barrier()  # B: all shares are there, on all hosts
        return self.result(span)

    def adds(self, order: str) -> bool:
        """See :meth:`ReducePath.adds`; a chain cannot round."""
        return order == self.order


class _Planner:
    """Plans the turns of one process for one span."""

    def __init__(self, me: int, hosts: Sequence[int], memory: HostMemory, span: SlotSpan, slots: Slots) -> None:
        self._me, self._hosts, self._memory = me, hosts, memory
        places = {
            n: (process, row) for process, held in enumerate(slots) for row, n in enumerate(held) if n != LEFT_OUT
        }
        holders = {n: self._hosts[process] for n, (process, _) in places.items()}
        self._host = self._hosts[self._me]
        self._terms = {
            n: span.vector(self._memory.terms[process][row])
            for n, (process, row) in places.items()
            if holders[n] == self._host
        }
        self._visits = visits_of(holders)
        self._span, self._slots = span, slots
        self._turns: dict[int, _Turn] = {}
        self._taken: list[ChecksummedVector] = []
        self._vectors: Iterator[ChecksummedVector] = iter(())

    def plan(self, buffer: MessageMemory) -> _Plan:
        """Return the plan. The ``n``-th piece of a share makes its first hop in turn ``n``."""
        numbered = list(self._pieces())
        held = range(_num_held(self._host, self._visits))
        lengths = [piece.part.stop - piece.part.start for _, piece in numbered for _ in held]
        self._vectors = buffer.divide(self._span, [((length,), self._span.dtype) for length in lengths])
        for number, piece in numbered:
            self._follow(number, piece)
        turns = [self._turns.get(n, _Turn()) for n in range(max(self._turns, default=-1) + 1)]
        return _Plan(self._slots, turns, self._taken)

    def _pieces(self) -> Iterator[tuple[int, ReducePiece]]:
        """Yield the pieces in the share of this process, numbered within the pieces of the same workers."""
        span, numbers = self._span, dict[tuple[int, ...], int]()
        for piece in pieces(self._hosts, span.length, span.line):
            size_bytes = (piece.part.stop - piece.part.start) * span.dtype.itemsize
            for part in piece.divided(max(1, min(MOST_DIVIDED, size_bytes // PIECE_BYTES)), span.line):
                number = numbers[part.workers] = numbers.get(part.workers, -1) + 1
                if part.workers[self._host] == self._me:
                    yield number, part

    def _follow(self, number: int, piece: ReducePiece) -> None:
        """Plan the hops of a piece: its sum from visit to visit, then its result from host to host."""
        last = len(self._visits) - 1
        prefix: ChecksummedVector | None = None
        for at, (visit, following) in enumerate(zip(self._visits, [*self._visits[1:], None], strict=True)):
            turn, is_mine = number + at, visit.host == self._host
            if is_mine:
                prefix = self._add(turn, visit, prefix, piece, is_last=at == last)
            if following is not None and is_mine:
                self._send(turn, piece.workers[following.host], prefix)
            elif following is not None and following.host == self._host:
                prefix = self._receive(turn, piece.workers[visit.host], next(self._vectors))
        self._pass_on(number + last, piece, prefix)

    def _pass_on(self, turn: int, piece: ReducePiece, result: ChecksummedVector | None) -> None:
        """Plan the hops of a result, which the host of the last visit has in ``turn``."""
        count, first = len(piece.workers), self._visits[-1].host
        for hop in range(count - 1):
            source, to = (first + hop) % count, (first + hop + 1) % count
            if source == self._host:
                self._send(turn + hop, piece.workers[to], result)
            elif to == self._host:
                result = self._receive(turn + hop, piece.workers[source], self._result(piece))
                self._taken.append(result)

    def _add(
        self, turn: int, visit: Visit, prefix: ChecksummedVector | None, piece: ReducePiece, *, is_last: bool
    ) -> ChecksummedVector:
        """Plan the addition of a visit, and return its sum."""
        terms = [(n, self._terms[n][piece.part]) for n in visit.slices]
        if prefix is not None:
            terms.insert(0, (self._visits[0].slices[0], prefix))
        if len(terms) == 1 and not is_last:
            return terms[0][1]  # sent from where it is
        # A tile of a received sum is verified before it is overwritten.
        out = self._result(piece) if is_last else prefix or next(self._vectors)
        self._turn(turn).additions.append(_Addition(TiledSum(terms, out, piece.part.start, ORDER_IN_CHAIN), is_last))
        return out

    def _turn(self, number: int) -> _Turn:
        return self._turns.setdefault(number, _Turn())

    def _send(self, turn: int, to: int, vector: ChecksummedVector | None) -> None:
        assert vector is not None
        self._turn(turn).give += [(to, message) for message in vector.messages()]

    def _receive(self, turn: int, source: int, into: ChecksummedVector) -> ChecksummedVector:
        self._turn(turn).take += [(source, message) for message in into.messages()]
        return into

    def _result(self, piece: ReducePiece) -> ChecksummedVector:
        numbers = self._span.of(self._memory.result)[piece.part]
        tiles = num_tiles(len(numbers), self._span.tile)
        checksums = torch.zeros(tiles, dtype=torch.int64) if self._span.checked else None
        return ChecksummedVector(numbers, checksums, self._span.tile)


def _num_held(host: int, visits: Sequence[Visit]) -> int:
    """Return how many running sums of a piece a host has memory for: one for each visit.

    The first visit needs none if it sends a slice from where it is, or is also the last.
    """
    adds_first = len(visits) > 1 and len(visits[0].slices) > 1
    return sum(at > 0 or adds_first for at, visit in enumerate(visits) if visit.host == host)


def is_shorter(hosts: Sequence[int]) -> bool:
    """Return whether a chain sends less than slices one by one: where each host has several workers.

    With one worker a host, a slice is all that it has, and the hops of the result would only take longer.
    """
    return min(hosts.count(host) for host in set(hosts)) > 1
