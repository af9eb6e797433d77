"""The sum whose order belongs to the job: the same bits whoever holds which slice, however many are alive.

How the terms meet depends on who is there, and changes no bit: through shared memory among the workers of one host
(:mod:`~holdfast.comm.allreduce.shm`); in the order ``tree`` through the memory of each host and then between hosts
(:mod:`~holdfast.comm.allreduce.hierarchical`); by messages otherwise (:mod:`~holdfast.comm.allreduce.alltoall`).
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Mapping, Sequence

import torch

from holdfast.comm.allreduce.adding import Mean
from holdfast.comm.allreduce.alltoall import ExchangedSum
from holdfast.comm.allreduce.checksums import SUM, Altered, Midway, nobody_listens
from holdfast.comm.allreduce.hierarchical import ORDER_BETWEEN_HOSTS, HostsSum
from holdfast.comm.allreduce.shm import ALIGN, LEFT_OUT, Introduction, SharedSum, Slots, Span, sum_alone
from holdfast.comm.base import Exchange
from holdfast.comm.memory import Opened, Segment, free_bytes

__all__ = ["SUM", "Mean", "OrderedSum", "Span"]

Path = SharedSum | HostsSum | ExchangedSum
"""How the terms meet."""


class OrderedSum:
    """Sums one term a slice, in slice order, over all processes of a communicator.

    A worker writes the terms of its slices into :meth:`room`, then all call the sum. From there until the step is
    closed, or until everybody has answered a recovery, it must not write them: others read them where they lie.
    What involves the others raises :class:`~holdfast.errors.PeerFailed` if it did not complete here.

    Args:
        comm: Who takes part.
        order: ``"fold"``, ``"tree"`` or another of :data:`~holdfast.comm.allreduce.adding.ORDERS`.
        size_bytes: Memory of each slice, the same everywhere; spans lie in it.
        device: Of the terms.
        shared_bytes: Most memory that this worker may share with others of its host; 0: none, -1: what is free.
    """

    def __init__(
        self, comm: Exchange, order: str, size_bytes: int, *, device: torch.device | str = "cpu", shared_bytes: int = -1
    ) -> None:
        self._comm = comm
        self._order = order
        self._size_bytes = max(ALIGN, size_bytes)
        self._device = torch.device(device)
        self._shared_bytes = shared_bytes
        shares = self._device.type == "cpu" and shared_bytes and len(comm.processes) > 1
        self._segments: list[Segment] | None = [] if shares else None
        self._room: list[torch.Tensor] = []
        self._opened = Opened()
        self._path: Path | None = None
        self._taken: Path | None = None
        self._made_for: tuple[int, tuple[int, ...]] = (-1, ())
        self._warned = shared_bytes == 0

    def room(self, row: int) -> torch.Tensor:
        """Return the memory of the ``row``-th of the slices that this process holds, bytes, shape ``(size_bytes,)``."""
        while len(self._room) <= row:
            self._room.append(self._more_room())
        return self._room[row]

    def seal(self, span: Span, rows: int) -> None:
        """Make the checksums of the terms of this process's first ``rows`` slices, if the span has some: before the sum."""
        for row in range(rows if span.checked else 0):
            span.vector(self.room(row)).seal()

    def __call__(
        self,
        span: Span,
        owners: Mapping[int, int],
        *,
        rows: Sequence[int] = (),
        order: str = "",
        mean: Mean | None = None,
        midway: Midway = lambda: None,
        altered: Altered = nobody_listens,
    ) -> torch.Tensor:
        """Return the sum of one span, the same bits at every process.

        It stays valid until the next sum of this span, and must not be written: others may read the same memory.

        Args:
            span: Where the terms lie in :meth:`room`; the term of the ``i``-th of this process's slices lies in row ``i``.
            owners: The rank that holds each slice that takes part, the same everywhere; ranks that are not members
                are left out.
            rows: Slices in the order of the rows of this process; needed where some of them are left out, because their
                worker died whose terms lie here too. Default: ascending, without those that are left out.
            order: Another than this object's, for this once.
            mean: What to divide, before anybody reads the result.
            midway: Called when the terms of this process are known to all and its share of the result is not.
            altered: Where the span is checked, called with each slice whose term is not what was sealed, or, where sums of
                several slices are sent, with the first of them; with ``SUM`` if the result changed on its way here.
        """
        slots = tuple(tuple(sorted(n for n, rank in owners.items() if rank in ranks)) for ranks in self._comm.processes)
        if rows:
            me = self._comm.processes.index(self._comm.here)
            mine = tuple(n if n in slots[me] else LEFT_OUT for n in rows)
            slots = (*slots[:me], mine, *slots[me + 1 :])
        self._taken = self._choose_path(slots, order or self._order)
        return self._taken(span, slots, order or self._order, mean, midway, altered)

    def open(self) -> None:
        """Set up what this generation needs, if no sum has done so: then maxima cost no message. All members together."""
        self._path_of_generation(((),) * len(self._comm.processes))

    def check_same(self, span: Span, order: str) -> None:
        """Make sure that all are about to sum the same kind of vector, or raise ``ScriptError``, where it costs no message to know."""
        if self._made_for[0] == self._comm.generation and isinstance(self._path, SharedSum):
            self._path.check_same(span, order)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each of a few 64-bit integers, the way that sums go in this generation; see :meth:`open`."""
        is_of_now = self._made_for[0] == self._comm.generation
        if is_of_now and isinstance(self._path, SharedSum):
            result = self._path.maximum(values)
            if result is not None:
                return result
        return self._comm.maximum(values)

    def result(self, span: Span) -> torch.Tensor:
        """Return the sum that was made last, for one that failed here and is known to have completed elsewhere.

        It is whole if :attr:`in_place`; otherwise only if the sum completed here.
        """
        assert self._taken is not None, "no sum was made yet"
        return self._taken.result(span)

    @property
    def in_place(self) -> bool:
        """Whether the last sum went through memory: then it is whole at all once one has completed it."""
        return isinstance(self._taken, SharedSum | HostsSum)

    # -- setting up

    def _choose_path(self, slots: Slots, order: str) -> Path:
        path = self._path_of_generation(slots)
        if isinstance(path, HostsSum) and order != ORDER_BETWEEN_HOSTS:
            return ExchangedSum(self._comm, self._room)  # for this once
        return path

    def _path_of_generation(self, slots: Slots) -> Path:
        """Return the path, newly chosen in every generation: the memory of an older one is not used again."""
        rows = tuple(map(len, slots))
        generation, known = self._made_for
        is_old = generation != self._comm.generation
        if is_old or any(need > have for need, have in zip(rows, known, strict=True)):
            rows = rows if is_old else tuple(map(max, rows, known))
            self._path, self._taken, self._made_for = None, None, (-1, ())
            self._path, told = self._make_path(rows[self._comm.processes.index(self._comm.here)])
            self._made_for = (self._comm.generation, tuple(map(max, rows, told)))
        assert self._path is not None
        return self._path

    def _make_path(self, rows: int) -> tuple[Path, Sequence[int]]:
        """Return the path, and how many slots of each process it reaches, or 0 where that does not matter."""
        none = (0,) * len(self._comm.processes)
        self.room(max(0, rows - 1))  # one at least: who has no slice is a spare, and must not be late when it gets one
        if len(self._comm.processes) == 1:
            return sum_alone(self._comm, self._room, self._size_bytes, self._device), none
        why = f"tensors are on {self._device}"
        if self._device.type == "cpu" and self._shared_bytes:  # the same everywhere
            known = Introduction(self._comm, self._segments, self._size_bytes, self._opened)
            if not known.is_one_host and self._order != ORDER_BETWEEN_HOSTS:
                return ExchangedSum(self._comm, self._room), none  # nothing is amiss
            memory = known.open()
            if not isinstance(memory, str):
                made = SharedSum(self._comm, memory) if known.is_one_host else HostsSum(self._comm, known.hosts, memory)
                return made, [len(row.slots) for row in known.told]
            why = memory
        self._warn(why)
        return ExchangedSum(self._comm, self._room), none

    def _warn(self, why: str) -> None:
        if not self._warned and self._comm.members[0] in self._comm.here:
            self._warned = True
            warnings.warn(f"sums go by messages instead of shared memory, which is slower: {why}", stacklevel=2)

    def _more_room(self) -> torch.Tensor:
        if self._segments is not None:
            try:
                self._check_budget()
                self._segments.append(Segment(self._size_bytes))
                return self._segments[-1].bytes
            except OSError:
                self._segments = None  # said, and answered by all, when the sum is set up
        return torch.zeros(self._size_bytes, dtype=torch.uint8, device=self._device)

    def _check_budget(self) -> None:
        """Refuse more memory than there is; everybody may be about to make a slot, and one of each group the result."""
        wanted = (len(self._room) + 2) * self._size_bytes
        groups = self._comm.crowd // len(self._comm.processes)
        if 0 < self._shared_bytes < wanted or (self._comm.crowd + groups) * self._size_bytes > free_bytes():
            raise OSError(errno.ENOMEM, "too little memory to share")
