"""Real processes over Open MPI's User-Level Failure Mitigation (ULFM), through mpi4py.

Each rule below was derived from measurements on Open MPI 5.0.11. Only buffer collectives that return a right result or
an error are used (``Allreduce``, ``Allgather``, ``Alltoall``; ``Allgatherv`` returned wrong data after failures). One
thread makes blocking calls, one at a time. The heartbeat detector is off. ``MPI_Finalize`` is never called.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from holdfast.base.side_work import say
from holdfast.comm.base import (
    BROADCAST_BYTES,
    NOBODYS_TAG,
    POST_TAG,
    FixedMembership,
    Message,
    Placed,
    SingleRankCommunicator,
)
from holdfast.comm.busy_cores import BusyCores
from holdfast.comm.launchers import has_ulfm, under_mpirun
from holdfast.comm.memory import as_bytes
from holdfast.comm.pmix import report_ended
from holdfast.comm.waiting import waiting
from holdfast.errors import ConfigError, PeerFailed
from holdfast.recovery.messages import Note, Progress

if TYPE_CHECKING:
    from mpi4py import MPI

    from holdfast.comm.claims import GenerationClaims
    from holdfast.comm.fabrics.base import EndNotes

_SECOND_DEATH_WITHIN_S = 0.5
_QUIET_S = 0.03
"""Failures a few milliseconds apart can crash ``MPI_Comm_shrink``; a pause before a second prevents most crashes."""

_LOOK_EVERY_S = 1e-3
"""Interval at which a worker that waits for a peer checks for failures of other workers."""

_PROBES = 64
"""Probes after MPI was told of a failure; it handles events in every eighth call, so it knows by then."""


def _load_mpi() -> Any:
    if not under_mpirun():
        raise ConfigError(
            "the ulfm fabric needs Open MPI's launcher: start with `holdfast run -n 4 SCRIPT` or"
            " `mpirun --with-ft ulfm -n 4 python SCRIPT`"
        )
    if not has_ulfm():
        raise ConfigError(
            "mpirun was started without fault tolerance, so any failure would end the job: add `--with-ft ulfm`"
        )
    try:
        import mpi4py
    except ImportError as error:
        raise ConfigError("the ulfm fabric needs mpi4py and Open MPI 5: pip install 'holdfast[mpi]'") from error
    mpi4py.rc.finalize = False  # MPI_Finalize can hang after a failure
    mpi4py.rc.thread_level = "multiple"  # a session and a torch.distributed group may each have a thread
    # Only now, as the import calls MPI_Init.
    with _session_in_run_folder():
        from mpi4py import MPI

    started = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    if started != MPI.COMM_WORLD.size:
        _give_up(f"mpirun started {started} processes, and MPI_Init found {MPI.COMM_WORLD.size}: mpirun has ended")
    return MPI


@contextlib.contextmanager
def _session_in_run_folder() -> Iterator[None]:
    """Have MPI_Init put its session directory into the run folder, which the launcher removes, and not into ``TMPDIR``.

    It has one of its own only if mpirun, whose directory it would use, has just been killed.
    """
    run_dir, tmpdir = os.environ.get("HOLDFAST_RUN_DIR"), os.environ.get("TMPDIR")
    if run_dir:
        os.environ["TMPDIR"] = run_dir
    try:
        yield
    finally:
        if run_dir and tmpdir is None:
            del os.environ["TMPDIR"]
        elif run_dir and tmpdir is not None:
            os.environ["TMPDIR"] = tmpdir


class UlfmCommunicator(FixedMembership, SingleRankCommunicator):
    """The workers that ``mpirun --with-ft ulfm`` started; the creating thread owns MPI.

    Args:
        ranks: Their ranks, ascending; None: 0, 1, 2, ...
        end_notes: Says whether and where a process of this host ends, before MPI knows; see :class:`Endpoint`.
        claims: Decides which group continues if hosts lose contact. None: all workers are on one host.

    Raises:
        ConfigError: if this process was not started by mpirun with fault tolerance, or mpi4py is missing.
    """

    _owned = "MPI"
    members: tuple[int, ...] = ()
    generation: int = 0

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        end_notes: EndNotes | None = None,
        claims: GenerationClaims | None = None,
    ) -> None:
        self._mpi = _load_mpi()
        self._mpi.COMM_WORLD.Set_errhandler(self._mpi.ERRORS_RETURN)
        try:
            self._comm: MPI.Comm = self._mpi.COMM_WORLD.Dup()
        except self._mpi.Exception as error:
            _give_up(f"Open MPI failed in MPI_Comm_dup: {error}")
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        world = tuple(range(self._comm.size)) if ranks is None else tuple(ranks)
        if len(world) != self._comm.size:
            raise ConfigError(f"got {len(world)} ranks {world} for {self._comm.size} MPI processes: give each one")
        self._world = self.members = world
        self._be(world[self._comm.rank])
        self._end_notes = end_notes
        self._claims = claims
        peers = [rank for rank in world if rank != self._me]
        self._peers = [] if end_notes is None else end_notes.on_this_host(peers)  # MPI was not told of their end
        self._busy_cores = BusyCores()
        self._shrunk_s = -_SECOND_DEATH_WITHIN_S
        self._abandoned: list[Message] = []  # MPI may still use their memory
        self._posted: list[Message] = []

    def _alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        self._collective(self._comm.Alltoall, _bytes(send), _bytes(out))

    def _allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        self._collective(self._comm.Allgather, _bytes(part), _bytes(out))

    def sendrecv(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        self._check_thread()
        self._clear_away()
        self._exchange([(self._comm.Irecv, receive), (self._comm.Isend, send)], tag)

    def _exchange(self, sides: Sequence[tuple[Callable[..., MPI.Request], Placed]], tag: int) -> None:
        begun: list[Message] = []
        try:
            for call, items in sides:
                for place, data in items:
                    begun.append(self._start(call, data, place, tag))
            for message in begun:  # one by one: Waitall can hang after a failure
                self._finish(message)
        except PeerFailed:
            self._abandoned.extend(begun)
            raise

    def post(self, rank: int, data: torch.Tensor) -> None:
        self._clear_away()
        self._posted.append(self._start(self._comm.Isend, data, self._index(rank), POST_TAG))

    def take(self, rank: int, data: torch.Tensor) -> None:
        self._exchange([(self._comm.Irecv, [(self._index(rank), data)])], POST_TAG)

    def maximum(self, values: Sequence[int]) -> list[int]:
        own_values = np.array(values, dtype=np.int64)
        result = np.empty_like(own_values)
        self._collective(self._comm.Allreduce, own_values, result, self._mpi.MAX)
        return [int(value) for value in result]

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """All-reduce bytes that are zero everywhere but on the root; see :meth:`Communicator.broadcast`."""
        whole = _bytes(data)
        result = np.empty_like(whole)
        zeros = np.zeros(min(BROADCAST_BYTES, whole.size), dtype=np.uint8)
        for start in range(0, whole.size, BROADCAST_BYTES):
            piece = slice(start, min(start + BROADCAST_BYTES, whole.size))
            own_piece = whole[piece] if root == self._me else zeros[: piece.stop - start]
            self._collective(self._comm.Allreduce, own_piece, result[piece], self._mpi.BOR)
        whole[:] = result

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        table = np.zeros((len(self._world), 5), dtype=np.int64)
        table[self._world.index(self._me)] = (1, progress.completed, progress.computed, progress.flags, progress.heard)
        result = np.empty_like(table)
        with self._busy_cores:
            self._collective(self._comm.Allreduce, table, result, self._mpi.SUM)
        return {
            rank: Progress(int(completed), bool(computed), Note(int(flags)), int(digest))
            for rank, (alive, completed, computed, flags, digest) in zip(self._world, result, strict=True)
            if alive
        }

    def barrier(self) -> None:
        self._collective(self._comm.Barrier)

    def check_failures(self) -> None:
        """Let MPI progress and check for failures; see :meth:`Collectives.check_failures`."""
        # Once a member has failed, MPI returns an error for a probe from any source.
        if self._report_ended():
            with self._busy_cores:
                for _ in range(_PROBES):
                    self._probe()
        self._probe()

    def _probe(self) -> None:
        self._collective(self._comm.Iprobe, self._mpi.ANY_SOURCE, NOBODYS_TAG)

    def _report_ended(self) -> bool:
        """Tell MPI which members have ended, before mpirun does: agree and shrink wait until it knows.

        A notice makes MPI itself report a failure, so it must be true. The member is a process of this host, in whose life
        lock the kernel has noted its end, and ``/proc`` says the same.

        Returns:
            Whether MPI was told of any.
        """
        if self._end_notes is None:
            return False
        cores = {rank: core for rank in self._peers if (core := self._end_notes.core_of_end(rank)) is not None}
        if not cores:
            return False
        self._peers = [rank for rank in self._peers if rank not in cores]
        self._busy_cores.note((core for core in cores.values() if core >= 0), len(self.members))
        reports = [report_ended(self._world.index(rank)) for rank in cores]
        return any(reports)

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; an agreement that reports a failure counts as False."""
        self._check_thread()
        self._report_ended()
        try:
            with waiting, self._busy_cores:
                return self._comm.Agree(int(flag)) == 1
        except self._mpi.Exception:
            return False

    def revoke(self) -> None:
        self._check_thread()
        self._comm.Revoke()

    def revoke_from_outside(self) -> None:
        self._comm.Revoke()

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Start a new generation with the survivors. If MPI fails, this process aborts; the launcher restarts the job.

        No worker can join. A worker that leaves must exit soon: the survivors wait until MPI detects that.
        """
        self._check_thread()
        if leaves:
            return False
        now_s = time.monotonic()
        if now_s - self._shrunk_s < _SECOND_DEATH_WITHIN_S:
            time.sleep(_QUIET_S)
        self._report_ended()
        try:
            with waiting, self._busy_cores:
                comm = self._comm.Shrink()
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
            members = self._ranks_in(comm.group)
        except self._mpi.Exception as error:
            _give_up(f"worker {self._me}: Open MPI failed in MPI_Comm_shrink: {error}")
        self._claim(self.generation + 1, members)
        self._abandoned.extend(self._posted)
        self._posted.clear()
        self._comm = comm
        self.members = members
        self._peers = [rank for rank in self._peers if rank in members]
        self.generation += 1
        self._shrunk_s = time.monotonic()
        return True

    def _claim(self, generation: int, members: Sequence[int]) -> None:
        """Abort this process unless its group is the one that continues."""
        if self._claims is None:
            return
        try:
            if self._claims.claim(generation, members):
                return
            why = "other workers, out of its reach, continue without it"
        except OSError as error:
            why = f"the folder of the run does not say which group of workers continues: {error}"
        _give_up(f"worker {self._me}: {why}")

    def failed(self) -> tuple[int, ...]:
        self._check_thread()
        return self._ranks_in(self._comm.Get_failed())

    def _ranks_in(self, group: MPI.Group) -> tuple[int, ...]:
        places = self._mpi.Group.Translate_ranks(group, None, self._mpi.COMM_WORLD.group)
        return tuple(sorted(self._world[place] for place in places))

    # -- point-to-point

    def _finish(self, message: Message) -> None:
        """Wait until ``message`` is complete, checking for failures: MPI only reports those at its other end."""
        with waiting:
            looked_s = time.monotonic()
            while not self._is_through(message):
                time.sleep(0)
                now_s = time.monotonic()
                if now_s - looked_s > _LOOK_EVERY_S:
                    self.check_failures()
                    looked_s = now_s

    def _is_through(self, message: Message) -> bool:
        try:
            return bool(message.request.Test())
        except self._mpi.Exception as error:
            raise PeerFailed(str(error)) from error

    def _clear_away(self) -> None:
        """Drop messages that MPI has completed."""
        self._abandoned = [message for message in self._abandoned if not self._is_over(message)]
        self._posted = [message for message in self._posted if not self._is_over(message)]

    def _is_over(self, message: Message) -> bool:
        """Return whether MPI has completed an abandoned message; a revoked one completes with an error."""
        try:
            return self._is_through(message)
        except PeerFailed:
            return True

    def start_send(self, data: torch.Tensor, rank: int, tag: int) -> Message:
        return self._start(self._comm.Issend, data, self._index(rank), tag)

    def start_receive(self, data: torch.Tensor, rank: int | None, tag: int) -> Message:
        return self._start(self._comm.Irecv, data, self._mpi.ANY_SOURCE if rank is None else self._index(rank), tag)

    def _start(self, call: Callable[..., MPI.Request], data: torch.Tensor, place: int, tag: int) -> Message:
        self._check_thread()
        try:
            return Message(call(_bytes(data), place, tag), data)
        except self._mpi.Exception as error:
            raise PeerFailed(str(error)) from error

    def abandon(self, message: Message) -> None:
        self._abandoned.append(message)

    def test(self, message: Message) -> int | None:
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
        self._check_thread()
        self._report_ended()
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
        except self._mpi.Exception as error:  # any error: besides "failed" and "revoked" MPI returns MPI_ERR_OTHER
            raise PeerFailed(str(error)) from error


def _give_up(why: str) -> NoReturn:
    """Abort this process, which can no longer communicate; the launcher restarts the job."""
    say(why)
    os.abort()


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seen: np.ndarray[Any, np.dtype[np.uint8]] = as_bytes(tensor).numpy()
    return seen
