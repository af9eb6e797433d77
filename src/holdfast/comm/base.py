"""What a fabric must be able to do."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from holdfast.errors import InternalError
from holdfast.recovery.messages import Progress

BROADCAST_BYTES = 16 << 20
"""A broadcast goes in pieces of this size, so that it needs little memory beside the data."""

POST_TAG = 1
"""The tag of what is posted; those of swaps are others."""
NOBODYS_TAG = (1 << 30) + 1
"""A tag that no message has."""

Placed = Sequence[tuple[int, torch.Tensor]]
"""Contiguous tensors of any shape and dtype, each with the place in :attr:`Exchange.processes` that it goes to or comes from."""


class Exchange(Protocol):
    """The collectives that a sum needs, among a fixed set of workers; see :class:`Communicator` for the promises.

    Each raises :class:`~holdfast.errors.PeerFailed` if it did not complete here.
    """

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that were alive at the last shrink, ascending."""

    @property
    def here(self) -> tuple[int, ...]:
        """Members that this process plays, ascending."""

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """Members by process, in the order in which tensors are exchanged."""

    @property
    def crowd(self) -> int:
        """Number of processes that may do the same at the same time, in whichever part of the world: all of them."""

    @property
    def generation(self) -> int:
        """Number of shrinks so far."""

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        """Give row ``i`` of ``send`` to process ``i``; row ``i`` of ``out`` comes from it.

        Args:
            send: Contiguous, shape ``(len(processes), ...)``, any dtype; untouched even by a failure.
            out: Contiguous, the same shape and dtype; must not overlap ``send``. Undefined after a failure.
        """

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Collect ``part`` of every process in the rows of ``out``.

        Args:
            part: Contiguous, any shape and dtype, the same at every process.
            out: Contiguous, shape ``(len(processes), *part.shape)``.
        """

    def swap(self, send: Placed, receive: Placed) -> None:
        """Give tensors to some processes and take tensors from some; that it completed says nothing of the others.

        Args:
            send: What to give to which place.
            receive: What to overwrite by what comes from which place. The n-th that is taken from a process is the n-th
                that it gives, and has its size. After a failure it is undefined, and may still change.
        """

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each of a few 64-bit integers over all members."""

    def barrier(self) -> None:
        """Return when every member has called it."""

    def look(self) -> None:
        """Return at once; for those who wait for their peers by other means than a collective.

        Raises:
            PeerFailed: if a member is known to have died, or a peer has revoked this generation.
        """


class Communicator(Exchange, Protocol):
    """The living workers, and the collectives among them.

    A worker is known by its rank in the first world, for life. A process may play several workers (the virtual
    fabric plays all of them), so collectives that move tensors are between *processes*.

    Promises of every implementation:

    - Collectives are blocking and *symmetric*: no result exists anywhere without the input of all. (A broadcast is
      therefore a sum of bytes in which all but the root give zeros.)
    - When a member has died, a collective either completes with the right result or raises
      :class:`~holdfast.errors.PeerFailed`; some members may see the one and some the other.
    - ``agree`` and ``shrink`` are uniform over the living, and return only when every living member has called.
    - One thread makes all calls, one call at a time.
    - What goes between two processes (``swap``, ``post``) goes by connections that the first collective of a generation
      makes, with all members; so one of those comes before.
    """

    def swap(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        """Exchange tensors with some; see :meth:`Exchange.swap`. It fails, too, if any member is known to have died.

        ``tag``, ``>= 0`` and below ``2**30`` but not 1, tells them from other messages between the same two.
        """

    def post(self, rank: int, data: torch.Tensor) -> None:
        """Begin to give ``data`` to the process that plays ``rank``, and return; it never waits for that one.

        What has not been taken when the generation ends, or this process, is lost.

        Args:
            rank: A member that another process plays; the virtual fabric, which has no other, takes any.
            data: CPU, contiguous, any shape and dtype, not empty. It is not written any more.

        Raises:
            PeerFailed: if it cannot be begun.
        """

    def take(self, rank: int, data: torch.Tensor) -> None:
        """Wait for what the process that plays ``rank`` posted; the n-th that is taken is the n-th that it posted here.

        Args:
            rank: A member that another process plays.
            data: CPU, contiguous, of the size of what was posted; overwritten.

        Raises:
            PeerFailed: if it did not arrive; ``data`` is undefined then, and may still change.
        """

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Overwrite ``data`` everywhere with that of the process that plays the member ``root``.

        It is contiguous, of the same shape and dtype at every process. After a failure it is whole, the old or the new.
        """

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Return the progress of every member, by rank."""

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; False too if a member is found dead. Uniform over the living."""

    def revoke(self) -> None:
        """Make every collective of this generation fail at every member that waits in one, soon."""

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Go on with the living: :attr:`members` is new, :attr:`generation` has grown.

        Args:
            admits: Let those in who wait to join this training loop; they come in if all members say the same.
            leaves: This worker wants to be left out.

        Returns:
            Whether this process goes on. If not, it must make no other call.
        """

    @property
    def is_stranded(self) -> bool:
        """Whether this member can continue only with the current members: without the store no agreement is possible after a failure."""

    def join(self, loop: int) -> bool:
        """Wait to be let into a training loop, as a worker that the job did not start with; False if a later loop goes on by now."""

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Return the workers that, as far as this process knows, wait to join a training loop; costs next to nothing."""

    def announce(self, loop: int, kind: str) -> None:
        """Tell later workers, as the lowest member, which training loop goes on, and what :meth:`wanted_kind` returns to them."""

    def wanted_kind(self) -> str:
        """Return, to a worker that has not joined yet, of what kind the members are; wait until they say it."""

    def failed(self) -> tuple[int, ...]:
        """Return the members that this process knows to be dead."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message between two workers that is on its way: what the fabric knows it by, and its memory, in use until it is through."""

    request: Any
    data: torch.Tensor


class MessageCommunicator(Communicator, Protocol):
    """A communicator for the ``torch.distributed`` backend: messages are begun and looked after, and a thread may give up.

    All calls come from the thread that owns it, :meth:`revoke_from_outside` alone from any other.
    """

    @property
    def first_size(self) -> int:
        """Number of workers that the job was started with."""

    def start_send(self, data: torch.Tensor, rank: int, tag: int) -> Message:
        """Begin to give ``data`` to the member ``rank``; the message is through when that has taken it.

        Args:
            data: CPU, contiguous, any shape and dtype; not written until the message is through.
            rank: A member.
            tag: As that of :meth:`swap`.

        Raises:
            PeerFailed: if it cannot be begun.
        """

    def start_receive(self, data: torch.Tensor, rank: int | None, tag: int) -> Message:
        """Begin to overwrite ``data``, of the size of what is given, by what ``rank`` gives, or by what any member gives first; see :meth:`start_send`."""

    def test(self, message: Message) -> int | None:
        """Return the rank at the other end once ``message`` is through (-1 for one that was sent), None before.

        Raises:
            PeerFailed: if it did not arrive.
        """

    def abandon(self, message: Message) -> None:
        """Keep the memory of a message whose end is of no interest any more, until the fabric is done with it."""

    def is_revoked(self) -> bool:
        """Return at once whether a peer has revoked this generation."""

    def revoke_from_outside(self) -> None:
        """Revoke, from another thread than the owner, which waits in a collective that will not complete."""


class FixedMembership:
    """What a communicator answers that no worker can join later, and whose agreements need no store."""

    is_stranded = False

    def join(self, loop: int) -> bool:
        """Refuse: all workers are here from the beginning."""
        raise InternalError(f"a worker cannot join a training loop that it is in, loop {loop}")

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Return none."""
        return ()

    def announce(self, loop: int, kind: str) -> None:
        """Do nothing: no worker comes later."""

    def wanted_kind(self) -> str:
        """Return nothing: no worker comes later."""
        return ""


class OneWorker(Communicator, Protocol):
    """A communicator whose process is one worker. The thread that makes it makes all calls."""

    _me: int
    _owner: int
    _owned: ClassVar[str] = "the communicator"

    def _be(self, rank: int) -> None:
        self._me, self._owner = rank, threading.get_ident()

    @property
    def here(self) -> tuple[int, ...]:
        """The one worker that this process is."""
        return (self._me,)

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """One process a member."""
        return tuple((rank,) for rank in self.members)

    @property
    def crowd(self) -> int:
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

    def _place(self, rank: int) -> int:
        return self.members.index(rank)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise InternalError(f"{self._owned} was called from another thread than the one that owns it")


def share_bytes(comm: Communicator, mine: bytes, root: int) -> bytes:
    """Return everywhere the bytes of the process that plays ``root``; a collective."""
    is_root = root in comm.here
    (length,) = comm.maximum([len(mine) if is_root else 0])
    if not length:
        return b""
    data = torch.frombuffer(bytearray(mine if is_root else length), dtype=torch.uint8)
    comm.broadcast(data, root)
    return data.numpy().tobytes()
