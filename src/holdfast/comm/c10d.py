"""Real processes over PyTorch's own process groups (Gloo), rebuilt among the survivors after a failure.

Gloo has neither an agreement nor a shrink, and says nothing of a death to those who are not neighbours of the dead in its
ring. Both come from :class:`~holdfast.membership.Roster`, whose store no worker hosts, and which hears of deaths from the
launchers. Gloo only moves bytes: one group a generation, and nobody waits for it without looking at the roster.
"""

from __future__ import annotations

import base64
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import InternalError, PeerFailed, StoreLost
from holdfast.events import Progress
from holdfast.membership import Roster, Store

_BROADCAST_BYTES = 16 << 20
"""A broadcast goes in pieces of this size, so that it needs little memory beside the data."""

_NAP_S = 5e-5
_PATIENCE = 20
"""How often an operation is looked at before the thread naps."""

_SWAP_TAG = 0


class _Meeting(dist.Store):  # type: ignore[name-defined,misc]  # torch has no stubs for it
    """Where the processes of a generation find each other: keys of the store that membership is kept in.

    Args:
        roster: Of this member; a death ends every wait.
        timeout_s: Of every wait.
    """

    def __init__(self, roster: Roster, timeout_s: float) -> None:
        super().__init__()
        self._roster = roster
        self._prefix = f"g/{roster.generation}/c10d/"
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else value
        self._roster.store.put(self._prefix + key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """Return a value, as soon as there is one."""
        self.wait([key])
        value = self._roster.store.get(self._prefix + key)
        assert value is not None
        return base64.b64decode(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have values.

        Raises:
            PeerFailed: if a member died, or they did not come in time.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()

        def ready() -> bool | None:
            self._roster.check()
            return all(self._roster.store.get(self._prefix + key) is not None for key in keys) or None

        if self._roster.store.wait(ready, limit_s) is None:
            msg = f"not everybody came to generation {self._roster.generation} within {limit_s:g} s"
            raise PeerFailed(msg)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return all(self._roster.store.get(self._prefix + key) is not None for key in keys)

    def has_extended_api(self) -> bool:
        """Return that there is nothing more."""
        return False


class C10dCommunicator:
    """Workers that meet in a store; the thread that makes it makes all calls.

    Args:
        store: Where membership is kept.
        rank: This worker.
        world: The workers that the job starts with; None for one who comes later, see :meth:`join`.
        timeout_s: After so long an operation of the group fails, though nobody is known to be dead.
    """

    def __init__(self, store: Store, rank: int, world: Sequence[int] | None, *, timeout_s: float = 60.0) -> None:
        self._store = store
        self._roster = Roster(store, rank, world)
        self._me = rank
        self._timeout_s = timeout_s
        self._group: Any = None
        self._group_failed = ""
        self._waiting: tuple[int, ...] = ()
        self._looked_at = -1
        self._owner = threading.get_ident()

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that were alive at the last shrink, ascending."""
        return self._roster.members

    @property
    def here(self) -> tuple[int, ...]:
        """The one worker that this process is."""
        return (self._me,)

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """One process a member."""
        return tuple((rank,) for rank in self.members)

    @property
    def generation(self) -> int:
        """Number of shrinks so far."""
        return self._roster.generation

    # -- collectives

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        """Exchange rows; see :meth:`Communicator.alltoall`."""
        if len(self.members) == 1:
            out.copy_(send)
            return
        self._run(lambda group: group.alltoall_base(_bytes(out), _bytes(send), [], []))

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Collect rows; see :meth:`Communicator.allgather`."""
        if len(self.members) == 1:
            out[0].copy_(part)
            return
        rows = list(_bytes(out).view(len(self.members), -1).unbind())
        self._run(lambda group: group.allgather([rows], [_bytes(part)]))

    def swap(self, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Exchange tensors with some; see :meth:`Communicator.swap`."""
        me = self.members.index(self._me)
        for taken, given in zip(
            *([data for place, data in side if place == me] for side in (receive, send)), strict=True
        ):
            taken.copy_(given)  # Gloo has no way to oneself
        takes = [(_bytes(data), place) for place, data in receive if place != me]
        gives = [(_bytes(data), place) for place, data in send if place != me]

        def begin(group: Any) -> _Messages:
            works = [group.recv([data], place, _SWAP_TAG) for data, place in takes]
            return _Messages(works + [group.send([data], place, _SWAP_TAG) for data, place in gives])

        if takes or gives:
            self._run(begin)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each integer; see :meth:`Communicator.maximum`."""
        data = torch.tensor(values, dtype=torch.int64)
        self._reduce(data, dist.ReduceOp.MAX)
        return [int(value) for value in data]

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Take the maximum of bytes of which all but the root's are zero; see :meth:`Communicator.broadcast`."""
        whole = _bytes(data)
        result = torch.empty_like(whole)
        for start in range(0, whole.numel(), _BROADCAST_BYTES):
            piece = result[start : start + _BROADCAST_BYTES]
            if root == self._me:
                piece.copy_(whole[start : start + _BROADCAST_BYTES])
            else:
                piece.zero_()
            self._reduce(piece, dist.ReduceOp.MAX)
        whole.copy_(result)

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Collect everybody's progress; see :meth:`Communicator.share_progress`."""
        mine = torch.tensor([progress.completed, progress.computed, progress.flags], dtype=torch.int64)
        everybodys = torch.empty(len(self.members), 3, dtype=torch.int64)
        self.allgather(mine, everybodys)
        return {
            rank: Progress(completed, bool(computed), flags)
            for rank, (completed, computed, flags) in zip(self.members, everybodys.tolist(), strict=True)
        }

    def barrier(self) -> None:
        """Return when every member has called it."""
        self._reduce(torch.zeros(1, dtype=torch.uint8), dist.ReduceOp.MAX)

    def look(self) -> None:
        """Look at what the store has told; see :meth:`Exchange.look`."""
        self._roster.check()

    # -- membership

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; see :meth:`Communicator.agree`.

        Without a store nobody can go on after a failure, so all that is left to agree on is how to stop; the group does.
        """
        self._check_thread()
        try:
            return self._roster.agree(flag)
        except StoreLost:
            return self._agree_alone(flag)

    def _agree_alone(self, flag: bool) -> bool:
        try:
            data = torch.tensor([int(flag)], dtype=torch.uint8)
            self._reduce(data, dist.ReduceOp.MIN)
        except PeerFailed:
            return False
        return bool(data)

    def revoke(self) -> None:
        """Wake everybody who waits in this generation.

        Raises:
            StoreLost: if there is no store any more.
        """
        self._check_thread()
        self._roster.revoke()

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Go on with the living; see :meth:`Communicator.shrink`.

        Raises:
            StoreLost: if there is no store any more.
            VotedOut: if the others went on without this worker.
        """
        self._check_thread()
        self._roster.shrink(admits=admits, leaves=leaves)
        self._drop_group()
        return self._me in self.members

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Return who waits to join a training loop."""
        version = self._store.version
        if version != self._looked_at:
            self._waiting = self._roster.newcomers(loop)
            self._looked_at = version
        return self._waiting

    def announce(self, loop: int) -> None:
        """Say which training loop goes on, if this is the lowest member."""
        if self._me == self.members[0] and not self._store.lost:
            self._store.put("loop", str(loop))

    @property
    def is_stranded(self) -> bool:
        """Whether the store is lost; see :attr:`Communicator.is_stranded`."""
        return bool(self._store.lost)

    def join(self, loop: int) -> bool:
        """Wait to be let into a training loop, for a worker that the job did not start with.

        Returns:
            False if a later one goes on by now.

        Raises:
            StoreLost: if the store is.
        """
        return self._roster.join(loop, lambda: int(self._store.get("loop") or 0) > loop)

    def failed(self) -> tuple[int, ...]:
        """Return the members that are known to be dead."""
        return self._roster.dead()

    # -- the group

    def _reduce(self, data: torch.Tensor, how: Any) -> None:
        if len(self.members) == 1:
            self._roster.check()
            return
        options = dist.AllreduceOptions()
        options.reduceOp = how
        self._run(lambda group: group.allreduce([data], options))

    def _run(self, begin: Callable[[Any], Any]) -> None:
        """Begin an operation of the group and wait for it.

        Raises:
            PeerFailed: if it did not complete here.
        """
        self._check_thread()
        self._roster.check()
        group = self._connected()
        try:
            self._wait(begin(group))
        except PeerFailed:
            self._group_failed = "an operation was given up"
            raise
        except RuntimeError as error:  # whatever Gloo says: closed, reset, timed out
            self._group_failed = str(error)
            raise PeerFailed(str(error)) from error

    def _wait(self, work: Any) -> None:
        """Wait, and look for deaths meanwhile: Gloo itself tells of them to the neighbours of the dead only."""
        patience = _PATIENCE
        while not work.is_completed():
            patience -= 1
            if patience < 0:
                time.sleep(_NAP_S)
                self._roster.check()
        work.wait()

    def _connected(self) -> Any:
        if self._group_failed:
            msg = f"this generation is broken: {self._group_failed}"
            raise PeerFailed(msg)
        if self._group is None:
            try:
                self._group = self._connect()
            except (PeerFailed, RuntimeError) as error:
                self._group_failed = str(error)
                raise PeerFailed(str(error)) from error
        return self._group

    def _connect(self) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = 2
        if "GLOO_SOCKET_IFNAME" in os.environ:
            interface = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
            options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        else:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._store.own_address)]
        meeting = _Meeting(self._roster, self._timeout_s)
        return dist.ProcessGroupGloo(meeting, self.members.index(self._me), len(self.members), options)

    def _drop_group(self) -> None:
        """Forget the group; to end it waits for its operations, which may be stuck, so somebody else does it."""
        group, self._group, self._group_failed = self._group, None, ""
        if group is not None:
            threading.Thread(target=_bury, args=([group],), name="holdfast-bury", daemon=True).start()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            msg = "the communicator was called from another thread than the one that owns it"
            raise InternalError(msg)


class _Messages:
    """Messages that are on their way: Gloo knows whether they have arrived only while somebody waits for them."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._wait, name="holdfast-messages", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Complain, once they are over, if one did not arrive."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error


def _bury(groups: list[Any]) -> None:
    group = groups.pop()
    try:
        group.abort()
        group.shutdown()
    except RuntimeError as error:
        sys.stderr.write(f"holdfast: an old process group did not end well: {error}\n")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous CPU tensor without copying."""
    # A tensor of one element counts as contiguous whatever its stride is, and could then not be seen as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
