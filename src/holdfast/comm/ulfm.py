"""Real processes over Open MPI's User-Level Failure Mitigation, through mpi4py.

Why each rule is kept was measured on Open MPI 5.0.11: only buffer collectives whose results are known to be
right or refused (``Allreduce``, ``Allgather``, ``Alltoall``; ``Allgatherv`` returned wrong data after deaths),
one blocking call at a time, from one thread; no heartbeat detector; never through ``MPI_Finalize``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from holdfast.comm.base import BROADCAST_BYTES, NOBODYS_TAG, POST_TAG, FixedMembership, Message, OneWorker, Placed
from holdfast.comm.memory import as_bytes
from holdfast.comm.waiting import waiting
from holdfast.errors import ConfigError, PeerFailed
from holdfast.recovery.messages import Note, Progress

if TYPE_CHECKING:
    from mpi4py import MPI

_SECOND_DEATH_WITHIN_S = 0.5
_QUIET_S = 0.03
"""Deaths a few milliseconds apart can crash ``MPI_Comm_shrink``; a short quiet time before a second one prevents most of it."""

_LOOK_EVERY_S = 1e-3
"""How often a worker that waits for another one looks for deaths of third ones."""


def under_mpirun() -> bool:
    """Return whether Open MPI's launcher started this process."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ


def _load_mpi() -> Any:
    if not under_mpirun():
        raise ConfigError(
            "the ulfm fabric needs Open MPI's launcher: start with `holdfast run -n 4 SCRIPT` or `mpirun --with-ft ulfm -n 4 python SCRIPT`"
        )
    if os.environ.get("OMPI_MCA_mpi_ft_enable") != "1":  # noqa: SIM112 - Open MPI's spelling
        raise ConfigError(
            "mpirun was started without fault tolerance, so any death would end the job: add `--with-ft ulfm`"
        )
    try:
        import mpi4py
    except ImportError as error:
        raise ConfigError("the ulfm fabric needs mpi4py and Open MPI 5: pip install 'holdfast[mpi]'") from error
    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "multiple"  # a session and a torch.distributed group may each have a thread
    from mpi4py import MPI

    return MPI


class UlfmCommunicator(FixedMembership, OneWorker):
    """The workers that ``mpirun --with-ft ulfm`` started, numbered by ``ranks``, or from 0; the thread that makes it owns MPI.

    ``ConfigError`` if this process was not started by mpirun with fault tolerance, or mpi4py is missing.
    """

    _owned = "MPI"
    members: tuple[int, ...] = ()
    generation: int = 0

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._mpi = _load_mpi()
        self._mpi.COMM_WORLD.Set_errhandler(self._mpi.ERRORS_RETURN)
        try:
            self._comm: MPI.Comm = self._mpi.COMM_WORLD.Dup()
        except self._mpi.Exception as error:
            _give_up(f"Open MPI failed in MPI_Comm_dup: {error}")
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        world = tuple(range(self._comm.size)) if ranks is None else tuple(ranks)
        if len(world) != self._comm.size:
            raise ConfigError(f"{len(world)} worker numbers were given for {self._comm.size} processes: {world}")
        self._world = self.members = world
        self._be(world[self._comm.rank])
        self._shrunk_s = -_SECOND_DEATH_WITHIN_S
        self._abandoned: list[Message] = []  # memory that MPI may still use
        self._posted: list[Message] = []

    @property
    def first_size(self) -> int:
        """Number of workers that the job was started with."""
        return len(self._world)

    def _alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        self._collective(self._comm.Alltoall, _bytes(send), _bytes(out))

    def _allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        self._collective(self._comm.Allgather, _bytes(part), _bytes(out))

    def swap(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        """Exchange tensors with some; see :meth:`Communicator.swap`."""
        self._check_thread()
        self._clear_away()
        self._exchange([(self._comm.Irecv, receive), (self._comm.Isend, send)], tag)

    def _exchange(self, sides: Sequence[tuple[Callable[..., MPI.Request], Placed]], tag: int) -> None:
        begun: list[Message] = []
        try:
            for call, items in sides:
                for place, data in items:
                    begun.append(self._start(call, data, place, tag))
            for message in begun:  # one by one: Waitall was seen to hang after a death
                self._finish(message)
        except PeerFailed:
            self._abandoned.extend(begun)
            raise

    def post(self, rank: int, data: torch.Tensor) -> None:
        """Begin to give; see :meth:`Communicator.post`."""
        self._clear_away()
        self._posted.append(self._start(self._comm.Isend, data, self._place(rank), POST_TAG))

    def take(self, rank: int, data: torch.Tensor) -> None:
        """Wait for what was posted; see :meth:`Communicator.take`."""
        self._exchange([(self._comm.Irecv, [(self._place(rank), data)])], POST_TAG)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each integer; see :meth:`Communicator.maximum`."""
        mine = np.array(values, dtype=np.int64)
        result = np.empty_like(mine)
        self._collective(self._comm.Allreduce, mine, result, self._mpi.MAX)
        return [int(value) for value in result]

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Sum bytes of which all but the root's are zero; see :meth:`Communicator.broadcast`."""
        whole = _bytes(data)
        result = np.empty_like(whole)
        zeros = np.zeros(min(BROADCAST_BYTES, whole.size), dtype=np.uint8)
        for start in range(0, whole.size, BROADCAST_BYTES):
            piece = slice(start, min(start + BROADCAST_BYTES, whole.size))
            mine = whole[piece] if root == self._me else zeros[: piece.stop - start]
            self._collective(self._comm.Allreduce, mine, result[piece], self._mpi.BOR)
        whole[:] = result

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Sum a vector with one slot a worker of the first world; see :meth:`Communicator.share_progress`."""
        mine = np.zeros((len(self._world), 5), dtype=np.int64)
        mine[self._world.index(self._me)] = (1, progress.completed, progress.computed, progress.flags, progress.heard)
        result = np.empty_like(mine)
        self._collective(self._comm.Allreduce, mine, result, self._mpi.SUM)
        return {
            rank: Progress(int(completed), bool(computed), Note(int(flags)), int(heard))
            for rank, (alive, completed, computed, flags, heard) in zip(self._world, result, strict=True)
            if alive
        }

    def barrier(self) -> None:
        """Return when every member has called it."""
        self._collective(self._comm.Barrier)

    def look(self) -> None:
        """Let MPI look at what has arrived; see :meth:`Exchange.look`."""
        # Once a member has died, MPI refuses to look for a message from anybody.
        self._collective(self._comm.Iprobe, self._mpi.ANY_SOURCE, NOBODYS_TAG)

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; an agreement that reports a death counts as False."""
        self._check_thread()
        try:
            with waiting:
                return self._comm.Agree(int(flag)) == 1
        except self._mpi.Exception:
            return False

    def revoke(self) -> None:
        """Revoke the communicator."""
        self._check_thread()
        self._comm.Revoke()

    def revoke_from_outside(self) -> None:
        """Revoke; see :meth:`MessageCommunicator.revoke_from_outside`."""
        self._comm.Revoke()

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Go on with the living. If MPI fails at it, this process ends: the launcher starts the job again.

        Nobody can join. Who leaves must end soon: MPI finds that it is gone, and the others wait until then.
        """
        self._check_thread()
        if leaves:
            return False
        now_s = time.monotonic()
        if now_s - self._shrunk_s < _SECOND_DEATH_WITHIN_S:
            time.sleep(_QUIET_S)
        try:
            with waiting:
                comm = self._comm.Shrink()
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
            members = self._ranks_in(comm.group)
        except self._mpi.Exception as error:
            _give_up(f"worker {self._me}: Open MPI failed in MPI_Comm_shrink: {error}")
        self._abandoned.extend(self._posted)
        self._posted.clear()
        self._comm = comm
        self.members = members
        self.generation += 1
        self._shrunk_s = time.monotonic()
        return True

    def failed(self) -> tuple[int, ...]:
        """Return the members that MPI has reported dead to this process."""
        self._check_thread()
        return self._ranks_in(self._comm.Get_failed())

    def _ranks_in(self, group: MPI.Group) -> tuple[int, ...]:
        places = self._mpi.Group.Translate_ranks(group, None, self._mpi.COMM_WORLD.group)
        return tuple(sorted(self._world[place] for place in places))

    # -- between two workers

    def _finish(self, message: Message) -> None:
        """Wait until ``message`` is through, and look meanwhile: MPI tells only of deaths at its other end."""
        with waiting:
            looked_s = time.monotonic()
            while not self._is_through(message):
                time.sleep(0)
                now_s = time.monotonic()
                if now_s - looked_s > _LOOK_EVERY_S:
                    self.look()
                    looked_s = now_s

    def _is_through(self, message: Message) -> bool:
        try:
            return bool(message.request.Test())
        except self._mpi.Exception as error:
            raise PeerFailed(str(error)) from error

    def _clear_away(self) -> None:
        """Forget messages that MPI has done with."""
        self._abandoned = [message for message in self._abandoned if not self._is_over(message)]
        self._posted = [message for message in self._posted if not self._is_over(message)]

    def _is_over(self, message: Message) -> bool:
        """Return whether MPI has done with a message that was given up; one that was revoked ends with an error."""
        try:
            return self._is_through(message)
        except PeerFailed:
            return True

    def start_send(self, data: torch.Tensor, rank: int, tag: int) -> Message:
        """Begin to give; see :meth:`MessageCommunicator.start_send`."""
        return self._start(self._comm.Issend, data, self._place(rank), tag)

    def start_receive(self, data: torch.Tensor, rank: int | None, tag: int) -> Message:
        """Begin to take; see :meth:`MessageCommunicator.start_receive`."""
        return self._start(self._comm.Irecv, data, self._mpi.ANY_SOURCE if rank is None else self._place(rank), tag)

    def _start(self, call: Callable[..., MPI.Request], data: torch.Tensor, place: int, tag: int) -> Message:
        self._check_thread()
        try:
            return Message(call(_bytes(data), place, tag), data)
        except self._mpi.Exception as error:
            raise PeerFailed(str(error)) from error

    def abandon(self, message: Message) -> None:
        """Keep its memory; see :meth:`MessageCommunicator.abandon`."""
        self._abandoned.append(message)

    def test(self, message: Message) -> int | None:
        """Look after a message; see :meth:`MessageCommunicator.test`."""
        self._check_thread()
        status = self._mpi.Status()
        try:
            if not message.request.Test(status):
                return None
        except self._mpi.Exception as error:
            self._abandoned.append(message)
            raise PeerFailed(str(error)) from error
        return self.members[status.source] if 0 <= status.source < len(self.members) else -1

    def is_revoked(self) -> bool:
        """Return whether a peer has revoked this generation; lets MPI look at what has arrived."""
        self._check_thread()
        try:
            self._comm.Iprobe(self._mpi.ANY_SOURCE, NOBODYS_TAG)
        except self._mpi.Exception:
            return bool(self._comm.Is_revoked())
        return False

    def _collective(self, call: Callable[..., object], *args: Any) -> None:
        self._check_thread()
        try:
            with waiting:
                call(*args)
        except self._mpi.Exception as error:  # any error: besides "failed" and "revoked" there is MPI_ERR_OTHER
            raise PeerFailed(str(error)) from error


def _give_up(why: str) -> NoReturn:
    """Abort this process, which can no longer communicate; the launcher starts the job again."""
    sys.stderr.write(f"holdfast: {why}\n")
    sys.stderr.flush()
    os.abort()


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seen: np.ndarray[Any, np.dtype[np.uint8]] = as_bytes(tensor).numpy()
    return seen
