"""The deterministic all-reduce: the same bits whichever ranks own the slices, and however many workers are alive.

The transport depends on the members, and changes no bit: shared memory among the workers of one host
(:mod:`~holdfast.comm.allreduce.shm`); shared memory on each host, then messages between hosts, of sums
(:mod:`~holdfast.comm.allreduce.hierarchical`) or in ``fold`` order of a running sum
(:mod:`~holdfast.comm.allreduce.chain`); otherwise messages (:mod:`~holdfast.comm.allreduce.alltoall`).
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.base.orders import base_of
from holdfast.comm.allreduce.adding import MeanDivisor
from holdfast.comm.allreduce.alltoall import AllToAllReduce
from holdfast.comm.allreduce.chain import ORDER_IN_CHAIN, ChainReduce, is_shorter
from holdfast.comm.allreduce.checksums import SUM, Altered, Midway, ignore_corruption
from holdfast.comm.allreduce.hierarchical import ORDER_BETWEEN_HOSTS, HierarchicalReduce
from holdfast.comm.allreduce.mover import MakeMover, Mover, fabric_mover
from holdfast.comm.allreduce.path import ALIGN, LEFT_OUT, ReduceCall, ReducePath, Slots, SlotSpan
from holdfast.comm.allreduce.shm import MemoryExchange, SharedMemoryReduce, sum_alone
from holdfast.comm.base import Collectives
from holdfast.comm.memory import OpenSegments, SharedSegment, free_bytes

__all__ = ["SUM", "MeanDivisor", "OrderedAllReduce", "SlotSpan"]


class OrderedAllReduce:
    """All-reduces one term per slice, in slice order, over all processes of a communicator.

    A worker writes the terms of its slices into :meth:`room`, then all members call the all-reduce. From then until the
    step is committed, or until all members have answered a recovery, it must not modify them: other processes read them
    in place. Collective methods raise :class:`~holdfast.errors.PeerFailed` if they did not complete on this process.

    Args:
        comm: The members.
        order: ``"fold"``, ``"tree"`` or another of :data:`~holdfast.comm.allreduce.adding.ORDERS`.
        size_bytes: Memory per slice, the same on every member; spans lie in it.
        device: Device of the terms.
        shared_bytes: Upper bound of the memory that this worker shares with its host; 0: none, -1: what is free.
        make_mover: Makes what moves bytes between hosts in :class:`HierarchicalReduce`.
        may_grow: A worker that is alone may get others later, which will map its terms.
    """

    def __init__(
        self,
        comm: Collectives,
        order: str,
        size_bytes: int,
        *,
        device: torch.device | str = "cpu",
        shared_bytes: int = -1,
        make_mover: MakeMover = fabric_mover,
        may_grow: bool = False,
    ) -> None:
        self._comm = comm
        self._make_mover = make_mover
        self._mover: Mover | None = None
        self.order = order
        """May be set before the first all-reduce."""
        self._size_bytes = max(ALIGN, size_bytes)
        self._device = torch.device(device)
        self._shared_bytes = shared_bytes
        shares = self._device.type == "cpu" and shared_bytes and (len(comm.processes) > 1 or may_grow)
        self._segments: list[SharedSegment] | None = [] if shares else None
        self._room: list[torch.Tensor] = []
        self._opened = OpenSegments()
        self._path: ReducePath | None = None
        self._taken: ReducePath | None = None
        self._made_for: tuple[int, tuple[int, ...]] = (-1, ())
        self._fits: Slots = ()
        self._slots_key: tuple[Sequence[int], Sequence[int], Mapping[int, int]] = ((), (), {})
        self._slots: Slots = ()
        self._warned = shared_bytes == 0
        self.keeps_terms = True
        """Whether terms stay as they are until the step ends; if not, the result may overwrite the first of each process."""
        self.in_host: torch.Tensor | None = None
        """The last result in host memory, if the returned one is not."""

    def room(self, row: int) -> torch.Tensor:
        """Return the memory for the terms of this process's ``row``-th slice, bytes, shape ``(size_bytes,)``."""
        return self.shared_room(row)

    def shared_room(self, row: int) -> torch.Tensor:
        """Return the memory from which the terms of this process's ``row``-th slice are added, by any process."""
        while len(self._room) <= row:
            self._room.append(self._more_room())
        return self._room[row]

    @property
    def start_copy(self) -> Callable[[SlotSpan, int], None] | None:
        """A function that starts the copy of a complete term to the host, given its row; None if it needs none."""
        return None

    def close(self) -> None:
        """Release what the process would keep otherwise; there is no further call."""

    def begin(self) -> None:
        """Begin an attempt at a step: every term will be written again."""

    def seal(self, span: SlotSpan, rows: int) -> None:
        """Before the all-reduce, compute the checksums of this process's first ``rows`` terms if the span has any."""
        for row in range(rows if span.checked else 0):
            span.vector(self.shared_room(row)).seal()

    def __call__(
        self,
        span: SlotSpan,
        owners: Mapping[int, int],
        *,
        rows: Sequence[int] = (),
        order: str = "",
        mean: MeanDivisor | None = None,
        midway: Midway = lambda: None,
        altered: Altered = ignore_corruption,
    ) -> torch.Tensor:
        """Return the all-reduce of one span, the same bits on every process.

        The result is valid until the next all-reduce of this span. It must not be modified: others may read it.

        Args:
            span: Location of the terms in :meth:`room`; row ``i`` has the term of this process's ``i``-th slice.
            owners: The rank that owns each participating slice, the same on every process; non-members are left out.
            rows: Slice of each row of this process; needed if some rows are left out, because their owner failed while
                this process has their terms. Default: all its slices, ascending.
            order: Overrides this object's order for this call.
            mean: Division of the result, before any process reads it.
            midway: Called when all processes can read the terms of this process, but its result is unfinished.
            altered: If the span is checked, called with each slice whose term does not match its checksum; where sums
                of several slices are sent, with the first of them; with ``SUM`` if the result changed on its way here.
        """
        call = ReduceCall(order or self.order, mean, midway, altered)
        return self._reduce(span, self._assign_slots(owners, rows), call)

    def _reduce(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        self._taken = self._choose_path(slots, call.order)
        self._taken.keeps_terms = self.keeps_terms
        return self._taken(span, slots, call)

    def open(self) -> None:
        """Set up this generation's transport unless an all-reduce has: maxima then cost no message. A collective."""
        self._path_of_generation(((),) * len(self._comm.processes))

    @property
    def is_set_up(self) -> bool:
        """Whether this generation's transport is known."""
        return self._path is not None and self._made_for[0] == self._comm.generation

    @property
    def uses_messages(self) -> bool:
        """Whether this generation's transport sends messages, and is not shared memory alone."""
        return self._path is None or self._path.uses_messages

    def check_same(self, span: SlotSpan, order: str) -> None:
        """Raise ``ScriptError`` unless all members reduce the same kind of vector, where the check costs no message."""
        if self._path is not None and self.is_set_up:
            self._path.check_same(span, order)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each of a few 64-bit integers, over this generation's transport; see :meth:`open`."""
        result = self._path.maximum(values) if self._path is not None and self.is_set_up else None
        return self._comm.maximum(values) if result is None else result

    def result(self, span: SlotSpan) -> torch.Tensor:
        """Return the last result, for an all-reduce that failed here and is known to have completed on another process.

        It is complete if :attr:`in_place`; otherwise only if the all-reduce completed on this process.
        """
        assert self._taken is not None, "no all-reduce has been made yet"
        return self._taken.result(span)

    @property
    def in_place(self) -> bool:
        """Whether the last all-reduce used shared memory: once it completes on any process, all have the result."""
        return self._taken is not None and self._taken.in_place

    def memory(self) -> dict[str, list[torch.Tensor]]:
        """Return this process's memory by purpose: ``terms``, ``result``, which its host may share, and ``messages``."""
        path = self._taken or self._path
        result = None if path is None else path.result_memory
        messages = () if path is None else path.buffers
        return {"terms": list(self._room), "result": [] if result is None else [result], "messages": list(messages)}

    # -- setup

    def _assign_slots(self, owners: Mapping[int, int], rows: Sequence[int]) -> Slots:
        """Return which process has which terms; all buckets of a step get the same object, computed once."""
        key = (self._comm.members, list(rows), owners)
        if self._slots_key != key:
            processes = self._comm.processes
            process_of = {rank: process for process, ranks in enumerate(processes) for rank in ranks}
            held: list[list[int]] = [[] for _ in processes]
            for number in sorted(owners):
                if owners[number] in process_of:
                    held[process_of[owners[number]]].append(number)
            if rows:
                me = process_of[self._comm.local_ranks[0]]
                own_slices = set(held[me])
                held[me] = [number if number in own_slices else LEFT_OUT for number in rows]
            self._slots_key, self._slots = (*key[:2], dict(owners)), tuple(map(tuple, held))
        return self._slots

    def _choose_path(self, slots: Slots, order: str) -> ReducePath:
        path = self._path_of_generation(slots)
        if not path.adds(order):
            return AllToAllReduce(self._comm, self._room, self._size_bytes)  # for this call only
        return path

    def _path_of_generation(self, slots: Slots) -> ReducePath:
        """Return the transport, chosen anew in every generation: shared memory of an older one is not reused."""
        generation, counts = self._made_for
        if self._path is not None and slots is self._fits and generation == self._comm.generation:
            return self._path
        rows = tuple(map(len, slots))
        is_old = generation != self._comm.generation
        if is_old or any(need > have for need, have in zip(rows, counts, strict=True)):
            rows = rows if is_old else tuple(map(max, rows, counts))
            if is_old and self._mover is not None:
                self._mover.abort()
                self._mover = None
            self._path, self._taken, self._made_for = None, None, (-1, ())
            self._path, new_counts = self._make_path(rows[self._comm.processes.index(self._comm.local_ranks)])
            self._made_for = (self._comm.generation, tuple(map(max, rows, new_counts)))
        assert self._path is not None
        self._fits = slots
        return self._path

    def _make_path(self, rows: int) -> tuple[ReducePath, Sequence[int]]:
        """Return the transport, and how many slots of each process it maps, or 0 where that does not matter."""
        none = (0,) * len(self._comm.processes)
        self.shared_room(max(0, rows - 1))  # at least one: a hot spare must have it ready when it is assigned a slice
        if len(self._comm.processes) == 1:
            return sum_alone(self._comm, self._room, self._size_bytes, self._device), none
        why = f"tensors are on {self._device}"
        if self._device.type == "cpu" and self._shared_bytes:  # the same on every process
            exchange = MemoryExchange(self._comm, self._segments, self._size_bytes, self._opened)
            between = between_hosts(self.order, exchange.hosts)
            if not exchange.is_one_host and between is None:
                return AllToAllReduce(self._comm, self._room, self._size_bytes), none  # expected, no warning
            memory = exchange.open()
            if not isinstance(memory, str):
                if exchange.is_one_host:
                    made: ReducePath = SharedMemoryReduce(self._comm, memory)
                else:
                    assert between is not None
                    self._mover = self._mover or self._make_mover(self._comm, exchange.hosts)
                    made = between(self._comm, exchange.hosts, memory, self._mover)
                return made, [len(row.slots) for row in exchange.told]
            why = memory
        self._warn(why)
        return AllToAllReduce(self._comm, self._room, self._size_bytes), none

    def _warn(self, why: str) -> None:
        if not self._warned and self._comm.members[0] in self._comm.local_ranks:
            self._warned = True
            warnings.warn(f"all-reduce uses messages instead of shared memory, which is slower: {why}", stacklevel=2)

    def _more_room(self) -> torch.Tensor:
        if self._segments is not None:
            try:
                self._check_budget()
                self._segments.append(SharedSegment(self._size_bytes))
                return self._segments[-1].bytes
            except OSError:
                self._segments = None  # the members agree on the consequence when the transport is set up
        return torch.zeros(self._size_bytes, dtype=torch.uint8, device=self._device)

    def _check_budget(self) -> None:
        """Refuse more memory than is free; every process may be about to add a slot, and one per group the result."""
        wanted = (len(self._room) + 2) * self._size_bytes
        groups = self._comm.num_processes // len(self._comm.processes)
        if 0 < self._shared_bytes < wanted or (self._comm.num_processes + groups) * self._size_bytes > free_bytes():
            raise OSError(errno.ENOMEM, "not enough shared memory")


def between_hosts(order: str, hosts: Sequence[int]) -> type[HierarchicalReduce] | None:
    """Return the transport between hosts that have shared memory; None if they send messages as if they had none."""
    if base_of(order) == ORDER_BETWEEN_HOSTS:
        return HierarchicalReduce
    return ChainReduce if order == ORDER_IN_CHAIN and is_shorter(hosts) else None
