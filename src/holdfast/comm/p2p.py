"""Point-to-point messages within a step: activations forward, gradients backward.

Between workers of one host a message lies in the sender's shared memory (:mod:`~holdfast.comm.shm_p2p`), where the
receiver reads it: one copy, made by the sender. Between hosts, and where memory cannot be shared, the communicator
carries it: a header of fixed size, then the numbers.

Why memory can be reused safely:

- *Within a generation* a step begins after the commit vote of the previous step, which a worker enters only after it
  has read all its messages. A step is not retried within a generation: a failure ends it.
- *In a new generation* tables are new and attempts count from 1. All its members took part in the recovery, so none
  reads messages of the previous attempt; an excluded worker that wakes up late writes only to its own memory.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Collection

import torch

from holdfast.comm.allreduce.shm import DTYPES, ORDERED_STORES
from holdfast.comm.base import Communicator
from holdfast.comm.memory import OpenSegments, free_bytes, host_id
from holdfast.comm.shm_p2p import MAX_DIMS, ShmInbox, ShmOutbox
from holdfast.comm.waiting import AMONG_MANY, patience, wait_until, waiting
from holdfast.errors import InternalError, PeerFailed, ScriptError

_NO_TABLE = -1
_HEADER_WORDS = 3 + MAX_DIMS
"""Attempt, dtype, number of dimensions, shape."""


class Mailbox:
    """Messages between workers within a step, in order between each pair of workers.

    A process that runs several workers (the virtual fabric) selects the sender or receiver with ``me``. All methods
    raise :class:`~holdfast.errors.PeerFailed` if a worker failed meanwhile.

    Args:
        comm: The communicator of the workers.
        shared_bytes: Upper bound of the memory that this worker shares with its host; 0: none, -1: what is free.
    """

    def __init__(self, comm: Communicator, *, shared_bytes: int = -1) -> None:
        self._comm = comm
        self._shared_bytes = shared_bytes
        self._generation = -1
        self._attempt = 0
        self._outbox = ShmOutbox(self._may_share)
        self._opened = OpenSegments()
        self._inboxes: dict[int, ShmInbox] = {}
        self._readers: frozenset[int] = frozenset()
        self._kept: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._patience = AMONG_MANY

    def begin(self) -> None:
        """Begin an attempt of a step and discard all messages; called by all members, once per attempt.

        Sends no message unless the generation has changed. Within a generation all members must have committed the
        previous step: no step is attempted twice.
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
            to: A member, possibly this worker; or several, which read one copy if they share memory with it.
            data: At most 8 dimensions, any shape, dtype and device; ``ScriptError`` if it has more.
            me: The sending worker, if this process runs several.
        """
        ranks = (to,) if isinstance(to, int) else tuple(to)
        for rank in ranks:
            self._check(rank)
        data = data.detach()
        if data.dim() > MAX_DIMS:
            shape = tuple(data.shape)
            raise ScriptError(f"a message may have at most {MAX_DIMS} dimensions, got the shape {shape}: flatten some")
        for rank in ranks:
            if rank in self._comm.local_ranks:
                self._kept[self._local_rank(me), rank].append(data.cpu().clone())
        readers = [rank for rank in ranks if rank in self._readers]
        if readers and not self._outbox.put(readers, data):
            readers = []
        for rank in ranks:
            if rank not in self._comm.local_ranks and rank not in readers:
                self._post(rank, data)

    def receive(self, source: int, *, me: int | None = None) -> torch.Tensor:
        """Wait for the next message of this attempt from ``source``; the n-th call returns the n-th message.

        Args:
            source: A member, possibly this worker.
            me: The receiving worker, if this process runs several.

        Returns:
            A CPU tensor that must not be modified, because other workers may read the same memory. It is valid until
            this worker enters the step's commit vote.
        """
        self._check(source)
        if source in self._comm.local_ranks:
            return self._take_kept(source, self._local_rank(me))
        inbox = self._inboxes.get(source)
        if inbox is None:
            return self._take(source)
        try:
            with waiting:
                wait_until(inbox.has_next, self._comm.check_failures, self._patience)
            data = inbox.take()
        except OSError as error:
            raise PeerFailed(f"cannot open the shared memory of worker {source}: {error}") from error
        return self._take(source) if data is None else data

    def _check(self, rank: int) -> None:
        if self._generation != self._comm.generation:
            raise InternalError("a message before begin(): the generation has changed")
        if rank not in self._comm.members:
            raise InternalError(f"worker {rank} is not a member, expected one of {self._comm.members}")

    def _local_rank(self, me: int | None) -> int:
        local_ranks = self._comm.local_ranks
        if me is None and len(local_ranks) > 1:
            raise InternalError(f"this process runs the workers {local_ranks}: pass the sender or receiver as `me`")
        return local_ranks[0] if me is None else me

    def _take_kept(self, source: int, me: int) -> torch.Tensor:
        kept = self._kept[source, me]
        if not kept:
            self._comm.check_failures()
            waits = f"worker {me} waits for a message from worker {source}"
            raise InternalError(f"{waits}, which this process has not sent before")
        return kept.popleft()

    # -- over the communicator

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
            if attempt == self._attempt:  # otherwise it was never taken in the step that sent it
                return data

    # -- setup

    def _set_up(self) -> None:
        self._inboxes, self._readers = {}, frozenset()
        self._opened.forget_others()
        self._patience = patience(self._comm.num_processes)
        if len(self._comm.processes) > 1:
            self._introduce()
        self._generation, self._attempt = self._comm.generation, 0

    def _introduce(self) -> None:
        """Open the tables of workers that share memory with this one, and learn which of them have opened its own."""
        comm, count = self._comm, len(self._comm.processes)
        rows = torch.empty(count, 3, dtype=torch.int64)
        comm.allgather(torch.tensor([host_id(), os.getpid(), self._make_table()]), rows)
        for (rank, *_), (host, pid, table) in zip(comm.processes, rows.tolist(), strict=True):
            if rank not in comm.local_ranks and host == host_id() and table != _NO_TABLE:
                with contextlib.suppress(OSError):  # the second all-gather tells the owner
                    self._inboxes[rank] = ShmInbox(comm.local_ranks[0], pid, table, self._opened)
        reads = torch.tensor([rank in self._inboxes for rank, *_ in comm.processes])
        gathered = torch.empty(count, count, dtype=torch.bool)
        comm.allgather(reads, gathered)
        own_column = gathered[:, comm.processes.index(comm.local_ranks)].tolist()
        self._readers = frozenset(rank for (rank, *_), does in zip(comm.processes, own_column, strict=True) if does)

    def _make_table(self) -> int:
        if self._shared_bytes and ORDERED_STORES:
            with contextlib.suppress(OSError):  # _NO_TABLE tells the other workers
                return self._outbox.renew()
        return _NO_TABLE

    def _may_share(self, held: int, more: int) -> bool:
        is_bounded = self._shared_bytes > 0
        return not (is_bounded and held + more > self._shared_bytes) and self._comm.num_processes * more <= free_bytes()
