"""The all-reduce of a model that is not in host memory: its terms are copied there, added, and the results copied back.

::

    the backward pass completes a gradient    in device memory
    copy to the host                          beside the rest of the backward pass, into memory that workers share
    all-reduce in host memory                 see holdfast.comm.allreduce.ordered: same order, same bits
    copy to the device                        beside the all-reduces of the following buckets
    the optimizer reads the result            in device memory that belongs to this worker

Each :class:`~holdfast.comm.device.Wait` below prevents the accident that it names; a test removes each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.comm.allreduce.mover import FABRIC, MakeMover, fabric_mover
from holdfast.comm.allreduce.ordered import OrderedAllReduce
from holdfast.comm.allreduce.path import ReduceCall, ReducePath, Slots, SlotSpan
from holdfast.comm.allreduce.shm import sum_alone
from holdfast.comm.base import Collectives
from holdfast.comm.device import Device, DeviceEvent, DeviceStream, Wait
from holdfast.comm.virtual import VirtualCommunicator


class StagedAllReduce(OrderedAllReduce):
    """All-reduces terms in the memory of ``device``; the other arguments are those of :class:`OrderedAllReduce`.

    The result lies in device memory, too. It is this worker's own: no other process reads it.
    """

    def __init__(
        self,
        comm: Collectives,
        order: str,
        size_bytes: int,
        device: Device,
        *,
        shared_bytes: int = -1,
        make_mover: MakeMover = fabric_mover,
        may_grow: bool = False,
    ) -> None:
        super().__init__(comm, order, size_bytes, shared_bytes=shared_bytes, make_mover=make_mover, may_grow=may_grow)
        self._on = device
        self._terms: list[torch.Tensor] = []
        self._results: torch.Tensor | None = None
        self._copies: dict[tuple[int, int], DeviceEvent] = {}
        """The copies to the host in this attempt, by row and start of the span."""
        self._sending: dict[int, DeviceEvent] = {}
        """The last copy of a result to the device, by start of the span."""
        self._pinned: torch.Tensor | None = None

    def room(self, row: int) -> torch.Tensor:
        """See :meth:`OrderedAllReduce.room`; this memory is on the device."""
        while len(self._terms) <= row:
            self._terms.append(self._on.allocate(self._size_bytes))
        return self._terms[row]

    def close(self) -> None:
        """See :meth:`OrderedAllReduce.close`. Memory must not be unmapped while it is pinned."""
        for stream in (DeviceStream.TO_HOST, DeviceStream.TO_DEVICE):
            self._on.wait(self._on.mark(stream), Wait.UNPINNED)
        for memory in (*self._room, *([] if self._pinned is None else [self._pinned])):
            self._on.unpin(memory)
        self._room, self._pinned = [], None

    def begin(self) -> None:
        """See :meth:`OrderedAllReduce.begin`. Copies of an earlier attempt may go on: later ones overwrite theirs."""
        self._copies.clear()

    @property
    def start_copy(self) -> Callable[[SlotSpan, int], None]:
        return self._start_copy

    def _start_copy(self, span: SlotSpan, row: int) -> None:
        self._on.hold(DeviceStream.TO_HOST, self._on.mark(DeviceStream.COMPUTE), Wait.COMPUTED)
        self._on.copy(span.of(self.shared_room(row)), span.of(self.room(row)), DeviceStream.TO_HOST)
        self._copies[row, span.start] = self._on.mark(DeviceStream.TO_HOST)

    def seal(self, span: SlotSpan, rows: int) -> None:
        """See :meth:`OrderedAllReduce.seal`; checksums are those of the terms in host memory."""
        self._await_terms(span, rows)
        super().seal(span, rows)

    def _reduce(self, span: SlotSpan, slots: Slots, call: ReduceCall) -> torch.Tensor:
        self._await_terms(span, len(slots[self._comm.processes.index(self._comm.local_ranks)]))
        if span.start in self._sending:
            self._on.wait(self._sending.pop(span.start), Wait.SENT)
        return self._send(span, super()._reduce(span, slots, call))

    def result(self, span: SlotSpan) -> torch.Tensor:
        return self._send(span, super().result(span))

    def _await_terms(self, span: SlotSpan, rows: int) -> None:
        """Wait until the first ``rows`` terms are in host memory."""
        for row in range(rows):
            if (row, span.start) not in self._copies:
                self._start_copy(span, row)
        for row in range(rows):
            self._on.wait(self._copies[row, span.start], Wait.COPIED)

    def _send(self, span: SlotSpan, result: torch.Tensor) -> torch.Tensor:
        """Copy a result to the device, and return it there."""
        assert self._taken is not None
        self.in_host = result
        memory = self._taken.result_memory
        into = span.of(self._device_results())
        self._on.hold(DeviceStream.TO_DEVICE, self._on.mark(DeviceStream.COMPUTE), Wait.CONSUMED)
        self._on.copy(into, result if memory is None else span.of(memory), DeviceStream.TO_DEVICE)
        self._sending[span.start] = event = self._on.mark(DeviceStream.TO_DEVICE)
        self._on.hold(DeviceStream.COMPUTE, event, Wait.ARRIVED)
        return into

    def _device_results(self) -> torch.Tensor:
        """Return the memory for results on the device: that of the first term where it is no longer needed."""
        if not self.keeps_terms:
            return self.room(0)
        if self._results is None:
            self._results = self._on.allocate(self._size_bytes)
        return self._results

    # -- setup

    def _more_room(self) -> torch.Tensor:
        memory = super()._more_room()
        self._on.pin(memory)
        return memory

    def _make_path(self, rows: int) -> tuple[ReducePath, Sequence[int]]:
        path, counts = super()._make_path(rows)
        for event in self._sending.values():
            self._on.wait(event, Wait.UNPINNED)
        self._sending.clear()
        if self._pinned is not None:
            self._on.unpin(self._pinned)
        self._pinned = path.result_memory
        if self._pinned is not None:
            self._on.pin(self._pinned)
        return path, counts


class DeviceAllReduce(OrderedAllReduce):
    """All-reduces terms in the memory of ``device`` where one process runs all workers, which copies nothing.

    The other arguments are those of :class:`OrderedAllReduce`.
    """

    def __init__(self, comm: VirtualCommunicator, order: str, size_bytes: int, device: Device) -> None:
        super().__init__(comm, order, size_bytes, device=device.device)
        self._on = device

    def _more_room(self) -> torch.Tensor:
        return self._on.allocate(self._size_bytes)

    def _make_path(self, rows: int) -> tuple[ReducePath, Sequence[int]]:
        self.shared_room(max(0, rows - 1))
        add = self._on.ordered_add
        return sum_alone(self._comm, self._room, self._size_bytes, self._on.device, add), (0,)


def make_allreduce(
    comm: Collectives,
    order: str,
    size_bytes: int,
    *,
    device: Device,
    shared_bytes: int = -1,
    between_hosts: str = FABRIC,
    may_grow: bool = False,
) -> OrderedAllReduce:
    """Return the all-reduce for terms in the memory of ``device``; for the arguments see :class:`OrderedAllReduce`.

    Raises:
        ConfigError: if what ``between_hosts`` names cannot be used here; see :func:`choose_mover`.
    """
    make_mover = choose_mover(between_hosts, device.device)
    if device.adds and isinstance(comm, VirtualCommunicator) and not device.is_host:
        return DeviceAllReduce(comm, order, size_bytes, device)
    if device.is_host:
        return OrderedAllReduce(
            comm,
            order,
            size_bytes,
            device=device.device,
            shared_bytes=shared_bytes,
            make_mover=make_mover,
            may_grow=may_grow,
        )
    return StagedAllReduce(
        comm, order, size_bytes, device, shared_bytes=shared_bytes, make_mover=make_mover, may_grow=may_grow
    )


def choose_mover(between_hosts: str, device: torch.device) -> MakeMover:
    """Return how to make movers for a model on ``device``, by the value of ``Settings.between_hosts``.

    Raises:
        ConfigError: if this mover cannot be used here.
    """
    if between_hosts == FABRIC:
        return fabric_mover
    from holdfast.comm.allreduce.nccl import NcclMover
    from holdfast.comm.allreduce.nccl_library import library_of

    library = library_of(device)
    return lambda comm, hosts: NcclMover(comm, hosts, library)
