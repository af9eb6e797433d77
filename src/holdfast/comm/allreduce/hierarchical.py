"""All-reduce between hosts: shared memory on each host, and between hosts only sums that cannot be reduced further.

Only in ``tree`` order, whose aligned groups of slices can be added by the host that owns them all
(:func:`~holdfast.comm.allreduce.adding.groups`)::

    each worker's terms lie in its own segments          no other process writes them
    phase A: all-gather, ready                           all terms are there
    add the groups of my host, my share of the vector    in place, from the terms
    exchange the sums of groups, finish the tree         one worker per chunk, which also divides it
    exchange finished chunks                             into the result shared by my host
    phase B: all-gather, done                            all shares of all results are there
    the optimizer reads the result of its host in place

Every worker of a host has a share of the vector. For each piece of it, it communicates with the one worker of every
other host whose share contains the piece. So each chunk crosses once from host to host, however many workers they have,
and no worker waits for another of its own host between A and B.

Correctness after failures and late wake-ups rests on the same rules as in :mod:`~holdfast.comm.allreduce.shm`: one
writer per share, terms that no other process writes, new memory in every generation. The phase words are all-gathered
instead of written to memory, because not every process could read them there; a missing or stale word is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from holdfast.comm.allreduce.adding import MeanDivisor, TiledSum, groups
from holdfast.comm.allreduce.checksums import SUM, Altered, ChecksummedVector, Midway, ignore_corruption, num_tiles
from holdfast.comm.allreduce.shm import HostMemory, Slots, SlotSpan
from holdfast.comm.base import Collectives
from holdfast.errors import PeerFailed, ScriptError

ORDER_BETWEEN_HOSTS = "tree"
"""The order in which a host may add its slices before sending."""

_Messages = list[tuple[int, torch.Tensor]]
_Group = tuple[int, ...]
_Terms = dict[int, ChecksummedVector]


@dataclass(frozen=True, slots=True)
class ReducePiece:
    """A part of the vector in the share of one worker per host (``workers``); host ``finisher`` completes its sum."""

    part: slice
    workers: tuple[int, ...]
    finisher: int


@dataclass(slots=True)
class _Plan:
    """The work of one rank for one span: its additions, and the tensors that it sends and receives."""

    slots: Slots
    own: list[TiledSum] = field(default_factory=list)
    give_sums: _Messages = field(default_factory=list)
    take_sums: _Messages = field(default_factory=list)
    finish: list[TiledSum] = field(default_factory=list)
    give_results: _Messages = field(default_factory=list)
    take_results: _Messages = field(default_factory=list)
    taken: list[ChecksummedVector] = field(default_factory=list)


class HierarchicalReduce:
    """The all-reduce for processes on several hosts, each of which has shared memory.

    ``hosts`` has the host of each process, from 0 without gaps. The words in ``memory`` are not used.
    """

    def __init__(self, comm: Collectives, hosts: Sequence[int], memory: HostMemory) -> None:
        self._comm = comm
        self._hosts = hosts
        self._memory = memory
        self._me = comm.processes.index(comm.local_ranks)
        self._words = torch.tensor([[n, comm.generation, 0, 0] for n in memory.incarnations], dtype=torch.int64)
        self._heard = torch.zeros_like(self._words)
        self._plans: dict[SlotSpan, _Plan] = {}

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
        assert order == ORDER_BETWEEN_HOSTS, order
        plan = self._get_plan(span, slots)
        self._gather_phases(span)  # A: all terms are there
        midway()
        for addition in plan.own:
            addition(altered=altered)
        self._comm.sendrecv(plan.give_sums, plan.take_sums)
        for addition in plan.finish:
            addition(mean, altered)
        self._comm.sendrecv(plan.give_results, plan.take_results)
        if not all(part.is_intact() for part in plan.taken):
            altered(SUM)
        self._gather_phases(span)  # B: all shares are there, on all hosts
        return self.result(span)

    @property
    def result_memory(self) -> torch.Tensor | None:
        """The memory of the results as this process writes it, bytes; None if they lie in no memory of their own."""
        return self._memory.result

    def result(self, span: SlotSpan) -> torch.Tensor:
        """Return the last result; it is complete once *any* worker, on any host, has completed the all-reduce."""
        return span.of(self._memory.given)

    def _gather_phases(self, span: SlotSpan) -> None:
        """All-gather the phase words, and check that all processes are in the same phase."""
        self._words[:, 2] += 1
        self._words[self._me, 3] = span.length
        self._comm.allgather(self._words[self._me], self._heard)
        if not torch.equal(self._heard[:, :3], self._words[:, :3]):
            heard = self._heard[:, :3].tolist()
            raise PeerFailed(f"not every worker has reported phase {self._words[0, 2]}: got {heard}")
        if (self._heard[:, 3] != span.length).any():
            lengths = self._heard[:, 3].tolist()
            raise ScriptError(f"the workers all-reduce vectors of different lengths, in rank order {lengths}")

    # -- the plan: additions and messages

    def _get_plan(self, span: SlotSpan, slots: Slots) -> _Plan:
        known = self._plans.get(span)
        if known is None or known.slots != slots:
            known = self._plans[span] = self._make_plan(span, slots)
        return known

    def _make_plan(self, span: SlotSpan, slots: Slots) -> _Plan:
        plan, host = _Plan(slots), self._hosts[self._me]
        places = {n: (process, row) for process, held in enumerate(slots) for row, n in enumerate(held)}
        holders = {n: self._hosts[process] for n, (process, _) in places.items()}
        of_host: list[list[_Group]] = [[] for _ in set(self._hosts)]
        for group in groups(holders):
            of_host[holders[group[0]]].append(group)
        terms = {
            n: span.vector(self._memory.terms[p][row]) for n, (p, row) in sorted(places.items()) if holders[n] == host
        }
        for piece in pieces(self._hosts, span.length, span.line):
            if piece.workers[host] == self._me and piece.finisher == host:
                self._finish(plan, span, piece, terms, of_host)
            elif piece.workers[host] == self._me:
                self._reduce_host(plan, span, piece, terms, of_host[host])
        return plan

    def _reduce_host(self, plan: _Plan, span: SlotSpan, piece: ReducePiece, terms: _Terms, mine: list[_Group]) -> None:
        """Add the groups of this host, send the sums to the worker that finishes the piece, and receive the result."""
        peer, part = piece.workers[piece.finisher], piece.part
        if mine:
            sums = _rows(mine, span, part)
            for i, group in enumerate(mine):
                group_terms = [(n, terms[n][part]) for n in group]
                plan.own.append(TiledSum(group_terms, _row(sums, i), part.start, ORDER_BETWEEN_HOSTS))
            plan.give_sums += [(peer, message) for message in sums.messages()]
        result = _result(span, span.of(self._memory.result)[part])
        plan.take_results += [(peer, message) for message in result.messages()]
        plan.taken.append(result)

    def _finish(
        self,
        plan: _Plan,
        span: SlotSpan,
        piece: ReducePiece,
        terms: dict[int, ChecksummedVector],
        of_host: list[list[tuple[int, ...]]],
    ) -> None:
        """Receive the sums of other hosts, add them and the slices of this one, and send the result to all hosts."""
        meeting = [(n, term[piece.part]) for n, term in terms.items()]
        out = _result(span, span.of(self._memory.result)[piece.part])
        for host, (peer, theirs) in enumerate(zip(piece.workers, of_host, strict=True)):
            if host == piece.finisher:
                continue
            if theirs:
                sums = _rows(theirs, span, piece.part)
                plan.take_sums += [(peer, message) for message in sums.messages()]
                # A group's sum takes the place of one of its slices: no other slice is added before it is complete.
                meeting += [(group[0], _row(sums, i)) for i, group in enumerate(theirs)]
            plan.give_results += [(peer, message) for message in out.messages()]
        meeting.sort(key=lambda term: term[0])
        plan.finish.append(TiledSum(meeting, out, piece.part.start, ORDER_BETWEEN_HOSTS))


def _rows(of: Sequence[object], span: SlotSpan, part: slice) -> ChecksummedVector:
    """Return zeroed memory for one row of numbers per element of ``of``, and for their checksums."""
    length = part.stop - part.start
    checksums = torch.zeros(len(of), num_tiles(length, span.tile), dtype=torch.int64) if span.checked else None
    return ChecksummedVector(torch.zeros(len(of), length, dtype=span.dtype), checksums, span.tile)


def _row(rows: ChecksummedVector, i: int) -> ChecksummedVector:
    return ChecksummedVector(rows.numbers[i], None if rows.checksums is None else rows.checksums[i], rows.tile)


def _result(span: SlotSpan, numbers: torch.Tensor) -> ChecksummedVector:
    """Return a part of the result, with memory for the checksums that are sent with it to other hosts."""
    tiles = num_tiles(numbers.numel(), span.tile)
    return ChecksummedVector(numbers, torch.zeros(tiles, dtype=torch.int64) if span.checked else None, span.tile)


def pieces(hosts: Sequence[int], length: int, line: int) -> Iterator[ReducePiece]:
    """Yield the pieces of a vector, ascending, none of them empty.

    Every host divides the vector evenly among its workers. Between two boundaries of any host, the vector is divided
    evenly among the hosts, which each finish one piece, so traffic is balanced. Boundaries are multiples of ``line``.
    """
    count = max(hosts) + 1
    workers = [[process for process, host in enumerate(hosts) if host == mine] for mine in range(count)]
    chunks = [_even(length, len(here), line) for here in workers]
    places = (i * chunk for here, chunk in zip(workers, chunks, strict=True) for i in range(len(here)))
    cuts = sorted({place for place in places if place < length})
    for start, stop in pairwise([*cuts, length]):
        owners = tuple(here[start // chunk] for here, chunk in zip(workers, chunks, strict=True))
        size = _even(stop - start, count, line)
        for finisher, begin in enumerate(range(start, stop, size)):
            yield ReducePiece(slice(begin, min(begin + size, stop)), owners, finisher)


def _even(length: int, count: int, line: int) -> int:
    """Return the size of the largest of ``count`` even parts of a vector, a multiple of ``line``, at least one."""
    return max(1, -(-length // (count * line))) * line
