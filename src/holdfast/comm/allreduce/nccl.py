"""NCCL as a mover of bytes between hosts. **It has never run on a GPU**, let alone on several.

Holdfast still adds, in its own order, in host memory; NCCL carries sums and results over a network that TCP cannot use
well. Each rail (:func:`~holdfast.comm.allreduce.hierarchical.rails`) has a communicator of its own, through ``nccl4py``.

What keeps a death from hanging the survivors:

- Communicators are non-blocking, and the host polls them, so that no thread is inside NCCL when they are aborted.
- Barriers and failure detection are the fabric's. A failure aborts all communicators of the process as one group, one
  after another could wait for each other. They are never destroyed: that is a collective, which the dead cannot join.
- The abort runs in a thread and has a deadline. A process that misses it ends by SIGKILL, and counts as dead.
- Torch's own watchdogs would end the survivors, so the variables that enable them are overwritten (:data:`FORCED`).

This module is tested with a library in CPU memory in place of :mod:`~holdfast.comm.allreduce.nccl_library`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from holdfast.base.side_work import say
from holdfast.comm.allreduce.hierarchical import rails
from holdfast.comm.allreduce.mover import Copies
from holdfast.comm.base import Collectives, Placed
from holdfast.comm.groups import as_peer_failure
from holdfast.comm.memory import as_bytes
from holdfast.comm.waiting import patience, wait_until, waiting
from holdfast.errors import JobError, PeerFailed

FORCED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables, set whatever they were: the watchdogs of a script's own process groups end a process whose
peer has died, and communicators that use NVLink's multicast cannot be aborted reliably."""

ABORT_S = 5.0
"""Time for the abort of all communicators, seconds."""
CONNECT_S = 120.0
"""Time for a rail to connect, seconds. If it runs out no worker is at fault, so the job ends and says why."""
_ID_BYTES = 128
_OLDEST = (2, 27, 0)
_CRASHES = ((2, 28, 3), (2, 28, 8))
"""First and last of the versions that crash when a communicator is aborted."""


def refuse_version(version: tuple[int, int, int]) -> str:
    """Return why a version of NCCL cannot be used, "" if it can."""
    named = ".".join(map(str, version))
    if version < _OLDEST:
        return f"NCCL {named} is too old: install {'.'.join(map(str, _OLDEST))} or newer"
    if _CRASHES[0] <= version <= _CRASHES[1]:
        return f"NCCL {named} crashes when a communicator is aborted: install 2.28.9 or newer"
    return ""


class Library(Protocol):
    """The part of NCCL that the mover uses, on one device. No method waits for another process."""

    def make_id(self) -> bytes:
        """Return what the members of a communicator must share to connect."""

    def connect(self, size: int, place: int, identity: bytes, generation: int) -> Any:
        """Return a communicator of a generation that begins to connect to ``size - 1`` others."""

    def is_ready(self, communicator: Any) -> bool:
        """Return whether its last operation has been accepted; ``RuntimeError`` if the communicator has failed."""

    def move(self, communicator: Any, send: Copies, receive: Placed) -> Iterator[None]:
        """Move tensors in host memory, by place in the communicator; yields while waiting, ends when all are there."""

    def abort(self, generation: int) -> None:
        """Abort all communicators of this process, up to a generation, as one group; the only method that may block."""


class NcclMover:
    """Moves bytes on one rail; see :class:`~holdfast.comm.allreduce.mover.Mover`. Its constructor is a collective.

    Args:
        comm: The members; their barriers and failure detection are used.
        hosts: The host of each process.
        library: NCCL on the device of this process.
        abort_s: Deadline of an abort, seconds.
        connect_s: Time to connect, seconds.
        end: Ends this process at once.

    Raises:
        PeerFailed: if a member failed meanwhile.
        JobError: if the rail did not connect in time.
    """

    def __init__(
        self,
        comm: Collectives,
        hosts: Sequence[int],
        library: Library,
        *,
        abort_s: float = ABORT_S,
        connect_s: float = CONNECT_S,
        end: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._comm, self._library, self._generation = comm, library, comm.generation
        self._abort_s, self._end = abort_s, end
        self._is_aborted = False
        self._patience = patience(-(-comm.num_processes // (max(hosts) + 1)))
        me = comm.processes.index(comm.local_ranks)
        self._rail = next(rail for rail in rails(hosts) if me in rail)
        place, identity = self._rail.index(me), self._share_id(me)
        self._communicator = library.connect(len(self._rail), place, identity, comm.generation)
        ends_s = time.monotonic() + connect_s

        def is_connected() -> bool:
            if time.monotonic() > ends_s:
                raise JobError(f"NCCL did not connect processes {list(self._rail)} within {connect_s:g} s")
            return library.is_ready(self._communicator)

        self._poll(is_connected)

    def exchange(self, send: Placed, receive: Placed) -> None:
        self.gather([((place,), data) for place, data in send], receive)

    def gather(self, send: Copies, receive: Placed) -> None:
        """See :meth:`Mover.gather`; each tensor is copied to the device once."""
        if self._is_aborted:
            raise PeerFailed("the communicators of this generation are aborted")
        gives = [([self._rail.index(place) for place in places], as_bytes(data)) for places, data in send]
        takes = [(self._rail.index(place), as_bytes(data)) for place, data in receive]
        moving = self._library.move(self._communicator, gives, takes)
        self._poll(lambda: next(moving, self) is self)

    def abort(self) -> None:
        """Abort the communicators of this process, up to this generation; does not return after the deadline."""
        if not self._is_aborted:
            self._is_aborted = True
            abort_within(lambda: self._library.abort(self._generation), self._abort_s, self._end)

    def _share_id(self, me: int) -> bytes:
        """Return the id that the rail's first process has made."""
        first, *peers = self._rail
        identity = torch.zeros(_ID_BYTES, dtype=torch.uint8)
        if me == first:
            identity.copy_(torch.frombuffer(bytearray(self._library.make_id()), dtype=torch.uint8))
            self._comm.sendrecv([(process, identity) for process in peers], [])
        else:
            self._comm.sendrecv([], [(first, identity)])
        return identity.numpy().tobytes()

    def _poll(self, is_so: Callable[[], bool]) -> None:
        """Wait; if that fails, abort, because nothing else ends what the device waits for."""
        try:
            with waiting, as_peer_failure():
                wait_until(is_so, self._comm.check_failures, self._patience)
        except BaseException:
            self.abort()
            raise


def abort_within(abort: Callable[[], None], deadline_s: float, end: Callable[[], object]) -> None:
    """Run ``abort`` in a thread. If it fails, or has not returned after ``deadline_s``, call ``end``."""
    failed: list[str] = [f"it took longer than {deadline_s:g} s"]

    def run() -> None:
        try:
            abort()
            failed.clear()
        except Exception as error:  # whatever it is, memory may still be written by others
            failed[:] = [str(error)]

    thread = threading.Thread(target=run, name="holdfast-abort", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failed:
        say(f"cannot abort NCCL, so this process ends: {failed[0]}")
        end()
