"""Messages between two workers inside a step: activations forward, gradients backward.

Between workers of one host they lie in the sender's memory (:mod:`~holdfast.comm.shm_p2p`), where the receiver reads them:
one copy, made by the sender, and nothing sent. Between hosts, and where memory cannot be shared, they go by the
communicator: a header of fixed size, then the numbers.

What makes it safe that memory is used again:

- *Within a generation* a step begins after the closing sum of the one before, which each worker enters when it has read
  all that it reads. There is no second attempt: a failure ends the generation.
- *In a new one* tables are fresh and attempts count from 1. All who are in it have met in the recovery, so nobody reads
  what the attempt before sent; and a worker that was shut out, and wakes up late, writes only to its own memory.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Collection

import torch

from holdfast.comm.allreduce.shm import DTYPES, ORDERED_STORES
from holdfast.comm.base import Communicator
from holdfast.comm.memory import Opened, free_bytes, host_id
from holdfast.comm.shm_p2p import MAX_DIMS, Inbox, Outbox
from holdfast.comm.waiting import AMONG_MANY, patience, wait_until, waiting
from holdfast.errors import InternalError, PeerFailed, ScriptError

_NO_TABLE = -1
_HEADER_WORDS = 3 + MAX_DIMS
"""Attempt, type, number of dimensions, shape."""


class Mail:
    """Messages between workers within a step, in order between each two of them.

    The process that plays several workers (the virtual fabric's) says in ``me`` which of them sends or receives. All
    methods raise :class:`~holdfast.errors.PeerFailed` if a worker died meanwhile.

    Args:
        comm: Whose members take part.
        shared_bytes: Most memory that this worker may share with others of its host; 0: none, -1: what is free.
    """

    def __init__(self, comm: Communicator, *, shared_bytes: int = -1) -> None:
        self._comm = comm
        self._shared_bytes = shared_bytes
        self._generation = -1
        self._attempt = 0
        self._outbox = Outbox(self._may_take)
        self._opened = Opened()
        self._inboxes: dict[int, Inbox] = {}
        self._readers: frozenset[int] = frozenset()
        self._kept: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._patience = AMONG_MANY

    def begin(self) -> None:
        """Begin an attempt of a step: forget all messages. All members together, once each attempt.

        Costs no message unless the generation has changed. In one generation all members must have closed the step
        before: a step is not begun twice in it.
        """
        if self._generation != self._comm.generation:
            self._set_up()
        self._attempt += 1
        self._outbox.begin(self._attempt)
        for inbox in self._inboxes.values():
            inbox.begin(self._attempt)
        self._kept.clear()

    def send(self, to: int | Collection[int], data: torch.Tensor, *, me: int | None = None) -> None:
        """Send a copy of ``data``; never waits for a receiver.

        Args:
            to: A member, this worker too; or some members, who read the same copy if they share memory with this worker.
            data: Any shape of at most 8 dimensions, any dtype and device; ``ScriptError`` if it has more.
            me: Who sends, among those whom this process plays.
        """
        ranks = (to,) if isinstance(to, int) else tuple(to)
        for rank in ranks:
            self._check(rank)
        data = data.detach()
        if data.dim() > MAX_DIMS:
            shape = tuple(data.shape)
            raise ScriptError(f"a message may have at most {MAX_DIMS} dimensions, got the shape {shape}: flatten some")
        for rank in ranks:
            if rank in self._comm.here:
                self._kept[self._who(me), rank].append(data.cpu().clone())
        readers = [rank for rank in ranks if rank in self._readers]
        if readers and not self._outbox.put(readers, data):
            readers = []
        for rank in ranks:
            if rank not in self._comm.here and rank not in readers:
                self._post(rank, data)

    def receive(self, source: int, *, me: int | None = None) -> torch.Tensor:
        """Wait for the next message of this attempt from ``source``; the n-th call gets the n-th message.

        Args:
            source: A member, this worker too.
            me: Who receives, among those whom this process plays.

        Returns:
            A tensor of the CPU that must not be written: others may read the same memory. It may be read until this
            worker enters the sum that closes the step.
        """
        self._check(source)
        if source in self._comm.here:
            return self._take_kept(source, self._who(me))
        inbox = self._inboxes.get(source)
        if inbox is None:
            return self._take(source)
        try:
            with waiting:
                wait_until(inbox.has_next, self._comm.look, self._patience)
            data = inbox.take()
        except OSError as error:
            raise PeerFailed(f"the memory of worker {source} cannot be opened: {error}") from error
        return self._take(source) if data is None else data

    def _check(self, rank: int) -> None:
        if self._generation != self._comm.generation:
            raise InternalError("a message before begin(): the generation has changed")
        if rank not in self._comm.members:
            raise InternalError(f"worker {rank} is no member, those are {self._comm.members}")

    def _who(self, me: int | None) -> int:
        here = self._comm.here
        if me is None and len(here) > 1:
            raise InternalError(f"this process plays the workers {here}: say in `me` which of them sends or receives")
        return here[0] if me is None else me

    def _take_kept(self, source: int, me: int) -> torch.Tensor:
        kept = self._kept[source, me]
        if not kept:
            self._comm.look()
            waits = f"worker {me} waits for a message from worker {source}"
            raise InternalError(f"{waits}, which this process has not sent before")
        return kept.popleft()

    # -- by messages

    def _post(self, to: int, data: torch.Tensor) -> None:
        shape = list(data.shape)
        words = [self._attempt, DTYPES.index(data.dtype), len(shape), *shape]
        header = torch.zeros(_HEADER_WORDS, dtype=torch.int64)
        header[: len(words)] = torch.tensor(words)
        self._comm.post(to, header)
        if data.numel():
            self._comm.post(to, torch.empty(shape, dtype=data.dtype).copy_(data))

    def _take(self, source: int) -> torch.Tensor:
        while True:
            header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
            self._comm.take(source, header)
            attempt, dtype, dims, *shape = header.tolist()
            data = torch.empty(shape[:dims], dtype=DTYPES[dtype])
            if data.numel():
                self._comm.take(source, data)
            if attempt == self._attempt:  # else nobody took it in the step that sent it
                return data

    # -- setting up

    def _set_up(self) -> None:
        self._inboxes, self._readers = {}, frozenset()
        self._opened.forget_others()
        self._patience = patience(self._comm.crowd)
        if len(self._comm.processes) > 1:
            self._introduce()
        self._generation, self._attempt = self._comm.generation, 0

    def _introduce(self) -> None:
        """Open the tables of those who share memory with this worker, and learn who has opened this one's."""
        comm, count = self._comm, len(self._comm.processes)
        told = torch.empty(count, 3, dtype=torch.int64)
        comm.allgather(torch.tensor([host_id(), os.getpid(), self._make_table()]), told)
        for (rank, *_), (host, pid, table) in zip(comm.processes, told.tolist(), strict=True):
            if rank not in comm.here and host == host_id() and table != _NO_TABLE:
                with contextlib.suppress(OSError):  # its owner hears that this worker does not read it
                    self._inboxes[rank] = Inbox(comm.here[0], pid, table, self._opened)
        reads = torch.tensor([rank in self._inboxes for rank, *_ in comm.processes])
        everybodys = torch.empty(count, count, dtype=torch.bool)
        comm.allgather(reads, everybodys)
        mine = everybodys[:, comm.processes.index(comm.here)].tolist()
        self._readers = frozenset(rank for (rank, *_), does in zip(comm.processes, mine, strict=True) if does)

    def _make_table(self) -> int:
        if self._shared_bytes and ORDERED_STORES:
            with contextlib.suppress(OSError):  # the others hear that there is nothing to read
                return self._outbox.renew()
        return _NO_TABLE

    def _may_take(self, held: int, more: int) -> bool:
        is_bounded = self._shared_bytes > 0
        return not (is_bounded and held + more > self._shared_bytes) and self._comm.crowd * more <= free_bytes()
