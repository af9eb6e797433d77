"""The interface that a fabric implements: collectives, point-to-point messages and membership."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from holdfast.errors import InternalError
from holdfast.recovery.messages import Progress

BROADCAST_BYTES = 16 << 20
"""Bytes of one chunk of a broadcast; chunking bounds the extra memory."""

POST_TAG = 1
"""Tag of posted messages; sendrecv uses other tags."""
NOBODYS_TAG = (1 << 30) + 1
"""A tag that no message uses."""

Placed = Sequence[tuple[int, torch.Tensor]]
"""Contiguous tensors of any shape and dtype, each with the index in :attr:`Collectives.processes` of its peer."""


class Collectives(Protocol):
    """The collectives that an all-reduce needs, among a fixed set of workers; guarantees: see :class:`Communicator`.

    Each raises :class:`~holdfast.errors.PeerFailed` if it did not complete on this process.
    """

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that were alive at the last shrink, ascending."""

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Members that run in this process, ascending."""

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The members of each process, in the order in which tensors are exchanged."""

    @property
    def num_processes(self) -> int:
        """Number of processes in the world, all of which may run the same operation at the same time."""

    @property
    def generation(self) -> int:
        """Number of shrinks so far."""

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        """Send row ``i`` of ``send`` to process ``i``; row ``i`` of ``out`` is received from it.

        Args:
            send: Contiguous, shape ``(len(processes), ...)``, any dtype; never modified, even on failure.
            out: Contiguous, the same shape and dtype; must not overlap ``send``. Undefined after a failure.
        """

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Gather ``part`` from every process into the rows of ``out``.

        Args:
            part: Contiguous, any shape and dtype, the same on every process.
            out: Contiguous, shape ``(len(processes), *part.shape)``.
        """

    def sendrecv(self, send: Placed, receive: Placed) -> None:
        """Send to some processes and receive from some. Completion here implies nothing about other processes.

        Args:
            send: Tensors to send, each with its destination.
            receive: Buffers to receive into, each with its source. The n-th receive from a process matches its n-th
                send, and has the same size. After a failure the contents are undefined, and may still change.
        """

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of a few 64-bit integers over all members."""

    def barrier(self) -> None:
        """Block until every member has called it."""

    def check_failures(self) -> None:
        """Check for failures without blocking; for callers that wait for their peers by other means than a collective.

        Raises:
            PeerFailed: if a member is known to have failed, or a peer has revoked this generation.
        """


class Communicator(Collectives, Protocol):
    """The surviving workers, and the collectives among them.

    A worker keeps its initial rank for life. One process may run several workers (the virtual fabric runs all of them),
    so collectives that move tensors are between *processes*.

    Every implementation guarantees:

    - Collectives are blocking and *symmetric*: no process has a result without the input of all. (A broadcast is
      therefore a reduction of bytes to which all but the root contribute zeros.)
    - After a member has failed, a collective either completes with the right result or raises
      :class:`~holdfast.errors.PeerFailed`; the outcome may differ between members.
    - ``agree`` and ``shrink`` are uniform over the survivors, and return only when every survivor has called.
    - One thread makes all calls, one call at a time; see :class:`ThreadChange`.
    - Messages between two processes (``sendrecv``, ``post``) use connections that the first collective of a generation
      establishes, with all members; such a collective must come first.
    """

    def sendrecv(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        """Exchange tensors; see :meth:`Collectives.sendrecv`. Also fails if any member is known to have failed.

        ``tag``, ``>= 0`` and below ``2**30`` but not 1, separates these messages from others.
        """

    def post(self, rank: int, data: torch.Tensor) -> None:
        """Start sending ``data`` to the process that runs ``rank``, and return; never waits for the receiver.

        A message that was not taken before the generation, or this process, ends is lost.

        Args:
            rank: A member in another process; the virtual fabric, which has only one process, takes any.
            data: CPU, contiguous, any shape and dtype, not empty. The caller must not modify it afterwards.

        Raises:
            PeerFailed: if the send cannot be started.
        """

    def take(self, rank: int, data: torch.Tensor) -> None:
        """Receive a message posted by the process that runs ``rank``; messages arrive in the order of posting.

        Args:
            rank: A member in another process.
            data: CPU, contiguous, as many bytes as were posted; overwritten.

        Raises:
            PeerFailed: if the message did not arrive; ``data`` is then undefined, and may still change.
        """

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Overwrite ``data`` on every process with the data of the process that runs the member ``root``.

        It is contiguous, and has the same shape and dtype on every process. After a failure it is entirely old or new.
        """

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Return the progress of every member, by rank."""

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags, or False if a member is found to have failed. Uniform over the survivors."""

    def revoke(self) -> None:
        """Make every collective of this generation fail soon, on every member that waits in one."""

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Start a new generation with the survivors: updates :attr:`members` and increments :attr:`generation`.

        Args:
            admits: Admit the workers that wait to join this training loop, if all members pass the same loop.
            leaves: Leave this worker out of the new generation.

        Returns:
            Whether this process is a member of the new generation. If not, it must make no further call.
        """

    @property
    def has_atomic_shrink(self) -> bool:
        """Whether a new generation exists for all members at once, so that a revoke of it cannot disturb their shrink."""

    @property
    def has_store(self) -> bool:
        """Whether members are agreed on in a store outside the workers."""

    @property
    def has_lost_store(self) -> bool:
        """Whether the store is lost: after a failure no agreement is possible, so training cannot continue past one."""

    def join(self, loop: int) -> bool:
        """Wait to be admitted to a training loop that is already running; False if a later loop is running by now."""

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Return the workers known to this process that wait to join a training loop; takes next to no time."""

    def announce(self, loop: int, kind: str) -> None:
        """On the lowest member: publish the running training loop, and the value that :meth:`wanted_platform` returns."""

    def wanted_platform(self) -> str:
        """Return, on a worker that has not joined yet, the platform of the members; wait until it is published."""

    def failed(self) -> tuple[int, ...]:
        """Return the members that this process knows to have failed."""

    @property
    def can_grow(self) -> bool:
        """Whether workers may join later."""


class Round(NamedTuple):
    """Messages of one round of :meth:`RoundMessages.sendrecv_rounds`: terms and then results, sent and received."""

    give: Placed
    take: Placed
    give_results: Placed
    take_results: Placed


@runtime_checkable
class RoundMessages(Protocol):
    """A communicator that exchanges terms and results in rounds, of which several are on their way at a time."""

    def sendrecv_rounds(self, rounds: Sequence[Round], add: Callable[[int], None]) -> None:
        """Exchange all tensors, as :meth:`Collectives.sendrecv` does.

        Args:
            rounds: The n-th receive of terms from a process matches its n-th send of them over all rounds; so do results.
            add: Called with the number of each round, ascending, once its terms have arrived; its results may be sent then.
        """


@runtime_checkable
class ThreadChange(Protocol):
    """A communicator that another thread may own for a while."""

    def change_thread(self, thread: threading.Thread) -> None:
        """From now on ``thread``, which has started, makes all calls; no call is in progress."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message in flight between two workers: the fabric's request, and the memory that it uses until it completes."""

    request: Any
    data: torch.Tensor


class MessageCommunicator(Communicator, Protocol):
    """A communicator for the ``torch.distributed`` backend, with non-blocking messages and a revoke from other threads.

    All calls come from the owning thread, except :meth:`revoke_from_outside`, which comes from any other.
    """

    def start_send(self, data: torch.Tensor, rank: int, tag: int) -> Message:
        """Start sending ``data`` to the member ``rank``; the message completes when the receiver has it.

        Args:
            data: CPU, contiguous, any shape and dtype; must not be modified until the message completes.
            rank: A member.
            tag: As in :meth:`sendrecv`.

        Raises:
            PeerFailed: if the send cannot be started.
        """

    def start_receive(self, data: torch.Tensor, rank: int | None, tag: int) -> Message:
        """Start receiving into ``data``, of the sent size, from ``rank`` (None: any); see :meth:`start_send`."""

    def test(self, message: Message) -> int | None:
        """Return the peer's rank once ``message`` is complete (-1 for one that was sent), None before.

        Raises:
            PeerFailed: if the message did not arrive.
        """

    def abandon(self, message: Message) -> None:
        """Ignore the outcome of a message, but keep its memory until the fabric no longer uses it."""

    def is_revoked(self) -> bool:
        """Return, without blocking, whether a peer has revoked this generation."""

    def revoke_from_outside(self) -> None:
        """Revoke from a thread other than the owner, which waits in a collective that will not complete."""


class FixedMembership:
    """Membership methods of a communicator that no worker can join later, and whose agreements need no store."""

    has_store = has_lost_store = False
    has_atomic_shrink = False
    can_grow = False

    def join(self, loop: int) -> bool:
        """Raise ``InternalError``: all workers are members from the start."""
        raise InternalError(f"a worker cannot join a training loop that it is in, loop {loop}")

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Return an empty tuple."""
        return ()

    def announce(self, loop: int, kind: str) -> None:
        """Do nothing: no worker joins later."""

    def wanted_platform(self) -> str:
        """Return an empty string: no worker joins later."""
        return ""


class SingleRankCommunicator(Communicator, Protocol):
    """A communicator whose process is one worker. The thread that creates it makes all calls."""

    _me: int
    _owner: int
    _owned: ClassVar[str] = "the communicator"

    def _be(self, rank: int) -> None:
        self._me, self._owner = rank, threading.get_ident()

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The one worker that this process runs."""
        return (self._me,)

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """One process per member."""
        return tuple((rank,) for rank in self.members)

    @property
    def num_processes(self) -> int:
        """Number of members."""
        return len(self.members)

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        """Exchange rows; a single worker copies them."""
        if len(self.members) == 1:
            out.copy_(send)
        else:
            self._alltoall(send, out)

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Collect rows; a single worker copies its own."""
        if len(self.members) == 1:
            out[0].copy_(part)
        else:
            self._allgather(part, out)

    def _alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None: ...

    def _allgather(self, part: torch.Tensor, out: torch.Tensor) -> None: ...

    def _index(self, rank: int) -> int:
        return self.members.index(rank)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise InternalError(f"{self._owned} was called from another thread than the one that owns it")


def broadcast_bytes(comm: Communicator, payload: bytes, root: int) -> bytes:
    """Return on every process the bytes of the process that runs ``root``; a collective."""
    is_root = root in comm.local_ranks
    (length,) = comm.maximum([len(payload) if is_root else 0])
    if not length:
        return b""
    data = torch.frombuffer(bytearray(payload if is_root else length), dtype=torch.uint8)
    comm.broadcast(data, root)
    return data.numpy().tobytes()
