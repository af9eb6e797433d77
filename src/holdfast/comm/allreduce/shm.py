"""All-reduce through shared memory: each process adds its share of the vector, directly from all terms.

::

    each worker's terms lie in its own segments     no other process writes them
    barrier A                                       all terms are there
    add my share of the vector into the result      no other process writes that share
    barrier B                                       all shares are there
    the optimizer reads the result in place

No data is sent and no term is modified. Why this is safe when workers fail, or were stopped and wake up late:

- *The barrier consists of words in the result's head.* Each worker writes its phase there; A and B end when all words
  have reached the phase. MPI is polled meanwhile for failures, and is trusted for nothing else.
- *A new generation has new memory.* A worker that was stopped while adding may wake up much later and write old values.
  They go into the memory of its own generation, which is no longer in use: survivors have created a new result.
- *Read-only mappings.* The terms of other workers, and the result that is returned, are mapped for reading: no process
  can modify memory that another still reads.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.comm.allreduce.adding import ORDERS, TiledSum
from holdfast.comm.allreduce.checksums import ChecksummedVector
from holdfast.comm.allreduce.ordered_add import OrderedAdd, WholeSum
from holdfast.comm.allreduce.path import LEFT_OUT, ReduceCall, ReducePath, Slots, SlotSpan
from holdfast.comm.base import Collectives
from holdfast.comm.memory import OpenSegments, SharedSegment, host_id, open_segment
from holdfast.comm.waiting import patience, wait_until, waiting
from holdfast.errors import PeerFailed, ScriptError

_WORDS = 40
"""64-bit words per worker in the head: incarnation, generation, phase, vector length and kind, two sets of integers."""

MAX_INTEGERS = 15
"""Maximum number of integers whose maximum is taken through the head."""

_INTEGERS_AT = 8
_MOST_KEPT = 512
"""Maximum number of spans whose additions are kept from step to step."""
ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
"""Whether other cores see stores in program order (x86), so that a visible phase word implies visible numbers."""

_MAGIC = 0x5355_4D4D_4148_4F4C
"""Marks a segment, in the last word of its first line, as the result of an all-reduce."""


DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
"""In an order that is the same on all workers."""
_ORDERS = list(ORDERS)


@functools.cache
def _memory_kind(dtype: torch.dtype, order: str) -> int:
    return DTYPES.index(dtype) * len(_ORDERS) + _ORDERS.index(order)


def _kind_name(kind: int) -> str:
    dtype, order = divmod(kind, len(_ORDERS))
    return f"{DTYPES[dtype]} {_ORDERS[order]}" if 0 <= dtype < len(DTYPES) else "nothing"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The shared memory of one host, as mapped by one of its processes.

    Args:
        terms: For each process, the memory of each slot, bytes; empty for processes on other hosts.
        result: Writable memory of the result, bytes.
        given: The same memory, mapped read-only, as it is returned.
        words: Phase words of each process, 64-bit, shape ``(processes, 40)``; None for a single process.
        incarnations: For each process, a number that no other process has.
    """

    terms: Sequence[Sequence[torch.Tensor]]
    result: torch.Tensor
    given: torch.Tensor
    words: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None
    incarnations: Sequence[int] = ()


class SharedMemoryReduce(ReducePath):
    """The all-reduce for processes that all map the terms and the result in ``memory``.

    Args:
        comm: The processes.
        memory: The terms and the result.
        add: Adds the terms of a single process where they are, if that is not host memory.
    """

    in_place = True
    uses_messages = False

    def __init__(self, comm: Collectives, memory: HostMemory, add: OrderedAdd | None = None) -> None:
        self.result_memory = memory.result
        self._comm = comm
        self._add = add
        self._memory = memory
        self._words = words = memory.words
        self._me = comm.processes.index(comm.local_ranks)
        self._known = np.array([[n, comm.generation] for n in memory.incarnations], dtype=np.int64)
        self._phase = 0
        self._words_far = np.zeros(1, dtype=np.int64) if words is None else words[:, 2]
        self._maxima = 0
        self._patience = patience(comm.num_processes)
        self._additions: dict[tuple[SlotSpan, str], tuple[Slots, TiledSum | WholeSum]] = {}

    def __call__(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        """Return the reduced vector, without a copy; see :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce`."""
        addition = self._addition(span, slots, call.order)
        self.check_same(span, call.order)  # A: all terms are there
        call.midway()
        addition(call.mean, call.altered)
        self._barrier()  # B: all shares are there
        return self.result(span)

    def check_same(self, span: SlotSpan, order: str) -> None:
        """A barrier; raises ``ScriptError`` unless all processes all-reduce vectors of one length, type and order."""
        if self._words is None:
            self._barrier()
            return
        self._words[self._me, 3:5] = (span.length, _memory_kind(span.dtype, order))
        self._barrier()
        lengths, kinds = self._words[:, 3].tolist(), self._words[:, 4].tolist()
        if len(set(lengths)) > 1 or len(set(kinds)) > 1:
            self._barrier()  # no process may overwrite its words before all have read these
        if len(set(lengths)) > 1:
            raise ScriptError(f"the workers all-reduce vectors of different lengths, in rank order {lengths}")
        if len(set(kinds)) > 1:
            names = ", ".join(_kind_name(kind) for kind in kinds)
            raise ScriptError(f"the workers all-reduce vectors of different kinds, in rank order {names}")

    def maximum(self, values: Sequence[int]) -> list[int] | None:
        """Return the maximum of each integer over all members, None if there are no words to carry it.

        One barrier is enough: the next integers use the other set of words, and those after them are written only after
        another barrier, which every process enters after it has read these.
        """
        if self._words is None or len(values) > MAX_INTEGERS:
            return None
        self._maxima += 1
        start = _INTEGERS_AT + self._maxima % 2 * MAX_INTEGERS
        places = slice(start, start + len(values))
        self._words[self._me, places] = values
        self._barrier()
        largest: list[int] = self._words[:, places].max(0).tolist()
        return largest

    def result(self, span: SlotSpan) -> torch.Tensor:
        return span.of(self._memory.given)

    def _addition(self, span: SlotSpan, slots: Slots, order: str) -> TiledSum | WholeSum:
        if len(self._additions) > _MOST_KEPT:  # collectives may be of any length
            del self._additions[next(iter(self._additions))]
        entry = self._additions.get((span, order))
        if entry is None or entry[0] != slots:
            chunk = -(-span.length // (len(slots) * span.line)) * span.line
            own_part = slice(min(self._me * chunk, span.length), min((self._me + 1) * chunk, span.length))
            terms = sorted(
                (n, (process, row)) for process, held in enumerate(slots) for row, n in enumerate(held) if n != LEFT_OUT
            )
            vectors = [(n, _share(span, self._memory.terms[process][row], own_part)) for n, (process, row) in terms]
            out = ChecksummedVector(
                span.of(self._memory.result)[own_part], tile=vectors[0][1].tile if vectors else span.tile
            )
            entry = self._additions[span, order] = (slots, self._sum_of(vectors, out, own_part.start, order))
        return entry[1]

    def _sum_of(
        self, terms: Sequence[tuple[int, ChecksummedVector]], out: ChecksummedVector, start: int, order: str
    ) -> TiledSum | WholeSum:
        if self._add is None:
            return TiledSum(terms, out, start, order)
        return WholeSum(terms, out, start, order, self._add)

    def _barrier(self) -> None:
        """Barrier: wait until all processes have reached this phase, and verify their incarnations and generation."""
        self._phase += 1
        if self._words is None:
            self._comm.barrier()
            return
        self._words[self._me, 2] = self._phase  # after all numbers; where stores are not ordered, a barrier follows
        # MPI's own barrier would spin meanwhile, and take the core from processes that still compute.
        with waiting:
            wait_until(lambda: self._words_far.min() >= self._phase, self._comm.check_failures, self._patience)
        if not ORDERED_STORES:
            self._comm.barrier()
        if (self._words[:, 2] < self._phase).any() or (self._words[:, :2] != self._known).any():
            raise PeerFailed(f"not every worker has reached phase {self._phase}: {self._words[:, :3].tolist()}")


def _share(span: SlotSpan, memory: torch.Tensor, part: slice) -> ChecksummedVector:
    """Return a part of a term. Tiles are for the cache of a core: on another device they would only cost more calls."""
    if span.checked or memory.is_cpu:
        return span.vector(memory)[part]
    return ChecksummedVector(span.of(memory)[part], tile=max(1, span.length))


# -- setup, part of a recovery: all members take part, and all return the same decision


def sum_alone(
    comm: Collectives,
    slots: Sequence[torch.Tensor],
    size_bytes: int,
    device: torch.device,
    add: OrderedAdd | None = None,
) -> SharedMemoryReduce:
    """Return the all-reduce of a single process; the result lies in its private memory. For ``add`` see the class."""
    result = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return SharedMemoryReduce(comm, HostMemory([slots], result, result), add)


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The data that a process publishes before memory is shared: file descriptors of its slots, and of any result.

    ``ready`` says whether it has the memory that it needs; no other process has the same ``incarnation``.
    """

    ready: bool
    host: int
    pid: int
    incarnation: int
    result: int
    slots: tuple[int, ...]


class MemoryExchange:
    """An exchange in which all members publish where their memory is, and learn which of them share a host.

    Args:
        comm: The members.
        segments: This worker's slots; None if it has no memory for them.
        size_bytes: Size of every slot.
        opened: Slots of other processes mapped already: only their owners write them, so they outlive a generation.
    """

    def __init__(
        self, comm: Collectives, segments: Sequence[SharedSegment] | None, size_bytes: int, opened: OpenSegments
    ) -> None:
        self.comm = comm
        self.size_bytes = size_bytes
        self._opened = opened
        self.me = comm.processes.index(comm.local_ranks)
        self._segments = segments
        self._head_bytes = len(comm.processes) * _WORDS * 8
        self._incarnation = int.from_bytes(os.urandom(7), "little")
        self._made = self._make_result() if self.me == 0 else None
        self.told = self._publish(is_maker=self.me == 0)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each process, numbered in order of appearance."""
        numbers = {host: i for i, host in enumerate(dict.fromkeys(row.host for row in self.told))}
        return tuple(numbers[row.host] for row in self.told)

    @property
    def is_one_host(self) -> bool:
        """Whether all members share memory."""
        return not any(self.hosts)

    def _publish_results(self) -> None:
        """Let the first process of each host create a result, and publish it."""
        is_maker = self.me == self.hosts.index(self.hosts[self.me])
        if is_maker and self._made is None:
            self._made = self._make_result()
        self.told = self._publish(is_maker=is_maker)

    def open(self) -> HostMemory | str:
        """Return the memory of this worker's host, or the reason why not every process has all of it."""
        if not self.is_one_host:
            self._publish_results()
        memory = self._open() if all(row.ready for row in self.told) else None
        self._opened.forget_others()
        if self.comm.maximum([int(memory is None)])[0] or memory is None:
            return "not every worker has the memory"
        return memory

    def _make_result(self) -> SharedSegment | None:
        if self._segments is None:
            return None
        try:
            made = SharedSegment(self._head_bytes + self.size_bytes)
        except OSError:
            return None
        made.bytes[: _WORDS * 8].view(torch.int64)[-1] = _MAGIC
        return made

    def _publish(self, *, is_maker: bool) -> list[MemoryOffer]:
        ready = self._segments is not None and (self._made is not None or not is_maker)
        fds = [segment.fd for segment in self._segments or ()]
        result = -1 if self._made is None else self._made.fd
        offer = [int(ready), host_id(), os.getpid(), self._incarnation, result, *fds]
        width, largest, smallest = self.comm.maximum([len(offer), self.size_bytes, -self.size_bytes])
        if largest != -smallest:
            lengths = f"of {-smallest} to {largest} bytes"
            raise ScriptError(f"the workers all-reduce vectors of different lengths, {lengths}")
        row = torch.tensor(offer + [-1] * (width - len(offer)), dtype=torch.int64)
        rows = torch.empty(len(self.comm.processes), width, dtype=torch.int64)
        self.comm.allgather(row, rows)
        return [
            MemoryOffer(bool(ready), host, pid, incarnation, result, tuple(fd for fd in slots if fd >= 0))
            for ready, host, pid, incarnation, result, *slots in rows.tolist()
        ]

    def _open(self) -> HostMemory | None:
        host, size_bytes = self.told[self.me].host, self._head_bytes + self.size_bytes
        maker = next(row for row in self.told if row.host == host)
        try:
            near = [row.slots if row.host == host else () for row in self.told]
            terms = [
                [open_segment(row.pid, fd, self.size_bytes, opened=self._opened) for fd in slots]
                for row, slots in zip(self.told, near, strict=True)
            ]
            whole = open_segment(maker.pid, maker.result, size_bytes, writable=True)
            read_view = open_segment(maker.pid, maker.result, size_bytes)
        except OSError:
            return None
        head = whole[: self._head_bytes].view(torch.int64).numpy().reshape(len(self.told), _WORDS)
        if head[0, -1] != _MAGIC:
            return None
        head[self.me, :2] = (self._incarnation, self.comm.generation)
        incarnations = [row.incarnation for row in self.told]
        return HostMemory(terms, whole[self._head_bytes :], read_view[self._head_bytes :], head, incarnations)
