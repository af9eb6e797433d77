"""Real processes over PyTorch's process groups (Gloo), rebuilt among the survivors after a failure.

Gloo provides neither an agreement nor a shrink, and reports a failure only to the failed rank's neighbours in its ring.
:class:`~holdfast.membership.Roster` provides both. Its store is hosted by no worker, and the launchers report failures
to it. Gloo only moves bytes: there is at most one process group per generation, and every wait on it also polls the
roster. It connects every member with every other one, so a generation makes it when the first large tensor is moved.
Maxima, barriers and small all-gathers take :class:`~holdfast.comm.links.Links`, and a recovery needs no more.

An abandoned operation may still read and write its tensors until its process group is destroyed. So an output buffer
belongs to one generation only, and an input must not change before all members have answered the recovery;
:mod:`~holdfast.comm.allreduce.ordered` ensures both.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.base.phases import Phase
from holdfast.base.torch_private import gather_flat
from holdfast.comm.base import BROADCAST_BYTES, POST_TAG, Placed, Round, SingleRankCommunicator
from holdfast.comm.groups import (
    FOREVER,
    AddressExchange,
    GroupWork,
    PendingSends,
    ThreadedWork,
    as_peer_failure,
    bury,
    bury_made,
    make_gloo,
    wait,
)
from holdfast.comm.links import Links
from holdfast.comm.memory import as_bytes
from holdfast.comm.rounds import GlooRounds
from holdfast.comm.small_reduce import maximum_over
from holdfast.comm.storeless_agreement import Messages, StorelessAgreement
from holdfast.comm.waiting import waiting
from holdfast.errors import PeerFailed, StoreLost
from holdfast.membership import Roster, Store
from holdfast.recovery.messages import Note, Progress

_GROUP_S = Phase.GROUP.value.fixed_s
_PATIENCE_ALONE_S = 5.0
_NEW_WAIT_S = 1.0
"""A worker that has not polled for longer than this was not waiting."""

_MAXIMUM_TAG, _STORELESS_TAG = 0, 1
"""Tags of the messages over links: the rounds of a maximum; and those between members that have lost their store."""
_SMALL_BYTES = 64 << 10
"""The result of an all-gather up to this size takes links, which need fewer connections than the process group."""


class C10dCommunicator(SingleRankCommunicator):
    """Workers whose membership is kept in a store; without it, what changes the membership raises ``StoreLost``.

    Args:
        store: The membership store.
        rank: This worker.
        first_members: The workers that the job starts with; None for a worker that joins later, see :meth:`join`.
        timeout_s: A member that is alive but cannot be connected to within this time counts as failed.
    """

    def __init__(
        self, store: Store, rank: int, first_members: Sequence[int] | None, *, timeout_s: float = _GROUP_S
    ) -> None:
        self._store = store
        self._roster = Roster(store, rank, first_members)
        self._be(rank)
        self._timeout_s = timeout_s
        self._links: Links | None = None
        self._has_told = False
        self._asked: dict[str, Callable[[], object]] = {}
        self._group: Any = None
        self._making_lock = threading.Lock()
        self._making: tuple[ThreadedWork, AddressExchange] | None = None
        """The process group of this generation while a thread makes it."""
        self._sending: PendingSends | None = None
        self._storeless_agreement: StorelessAgreement | None = None
        self._broken = ""
        self._waiting: tuple[int, ...] = ()
        self._looked_at = -1
        self._looked_s = self._waits_since_s = 0.0
        if first_members is not None:
            self._begin_generation()

    @property
    def members(self) -> tuple[int, ...]:
        return self._roster.members

    @property
    def generation(self) -> int:
        return self._roster.generation

    def change_thread(self, thread: threading.Thread) -> None:
        assert thread.ident is not None, "the thread has not started"
        self._owner = thread.ident

    # -- collectives

    def _alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        if send.numel():
            self._run(lambda group: group.alltoall_base(as_bytes(out), as_bytes(send), [], []))
        else:
            self.barrier()

    def _allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        if 0 < out.nbytes <= _SMALL_BYTES:
            payload = as_bytes(part).numpy().tobytes()
            words = np.frombuffer(payload + bytes(-len(payload) % 8), dtype=np.int64).tolist()
            rows = np.array(self._gather_integers(words)).view(np.uint8)[:, : len(payload)]
            as_bytes(out).copy_(torch.from_numpy(rows.reshape(-1)))
        elif part.numel():
            self._run(lambda group: gather_flat(group, as_bytes(out), as_bytes(part)))
        else:
            self.barrier()

    def sendrecv(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        me = self._index(self._me)
        own = ([data for place, data in side if place == me] for side in (receive, send))
        for target, source in zip(*own, strict=True):
            target.copy_(source)  # Gloo cannot send to its own rank
        takes, gives = (
            [(as_bytes(data), place) for place, data in side if place != me and data.numel()]
            for side in (receive, send)
        )

        def begin(group: Any) -> GroupWork:
            works = [group.recv([data], place, tag) for data, place in takes]
            works += [group.send([data], place, tag) for data, place in gives]
            # Gloo reports the arrival of a message only to a thread that waits for it.
            return ThreadedWork(lambda: [work.wait() for work in works], keep=(takes, gives))

        if takes or gives:
            self._run(begin)

    def sendrecv_rounds(self, rounds: Sequence[Round], add: Callable[[int], None]) -> None:
        self._with_group(lambda group: GlooRounds(group, rounds).run(add, self.check_failures))

    def post(self, rank: int, data: torch.Tensor) -> None:
        place = self._index(rank)

        def begin(group: Any) -> None:
            if self._sending is None:
                self._sending = PendingSends()
            self._sending.add(group.send([as_bytes(data)], place, POST_TAG), data)

        self._with_group(begin)

    def take(self, rank: int, data: torch.Tensor) -> None:
        place = self._index(rank)
        self._run(lambda group: ThreadedWork(group.recv([as_bytes(data)], place, POST_TAG).wait, keep=data))

    def maximum(self, values: Sequence[int]) -> list[int]:
        if len(self.members) == 1:
            self._roster.check()
            return list(values)
        largest: list[int] = []

        def take_maximum() -> None:
            links = self._connected_links()
            exchange = functools.partial(links.exchange, tag=_MAXIMUM_TAG, check=self.check_failures)
            largest[:] = maximum_over(exchange, self.members, self._me, values, few_messages=links.are_of_one_machine)

        self._guarded(take_maximum)
        return largest

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Reduce with MAX over bytes that are zero everywhere but on the root; see :meth:`Communicator.broadcast`."""
        whole = as_bytes(data)
        result = torch.empty_like(whole)
        for start in range(0, whole.numel(), BROADCAST_BYTES):
            piece = result[start : start + BROADCAST_BYTES]
            if root == self._me:
                piece.copy_(whole[start : start + BROADCAST_BYTES])
            else:
                piece.zero_()
            self._reduce(piece, dist.ReduceOp.MAX)
        whole.copy_(result)

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        values = [progress.completed, progress.computed, progress.flags, progress.heard]
        return {
            rank: Progress(completed, bool(computed), Note(flags), digest)
            for rank, (completed, computed, flags, digest) in zip(
                self.members, self._gather_integers([int(number) for number in values]), strict=True
            )
        }

    def _gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every member: a maximum with a slot for each."""
        slots = np.full((len(self.members), len(values)), np.iinfo(np.int64).min)
        slots[self._index(self._me)] = values
        rows: list[list[int]] = np.array(self.maximum(slots.reshape(-1).tolist())).reshape(slots.shape).tolist()
        return rows

    def barrier(self) -> None:
        self.maximum([0])

    def check_failures(self) -> None:
        """Poll the store for failures; see :meth:`Collectives.check_failures`.

        Without a store no failure is reported: a wait longer than 5 s then counts as one. The peers that this worker
        waits for may first need the outcome of the last agreement, which this call sends them.
        """
        self._roster.check()
        if not self._store.lost:
            return
        self._storeless()
        now_s = time.monotonic()
        if now_s - self._looked_s > _NEW_WAIT_S:
            self._waits_since_s = now_s
        self._looked_s = now_s
        if now_s - self._waits_since_s > _PATIENCE_ALONE_S:
            message = f"not every member arrived within {_PATIENCE_ALONE_S:g} s, and the membership store is lost"
            raise PeerFailed(message)

    # -- membership

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; see :meth:`Communicator.agree`.

        Without a store training cannot continue after a failure: the members can only agree on how to stop.
        """
        self._check_thread()
        try:
            with waiting:
                return self._roster.agree(flag)
        except StoreLost:
            try:
                return self._storeless().agree(self._roster.act, flag)
            except PeerFailed:
                return False

    def _storeless(self) -> StorelessAgreement:
        """Return this generation's storeless agreement; the first call tells the other members of the loss."""
        if self._storeless_agreement is None:
            peers = [rank for rank in self.members if rank != self._me]
            self._storeless_agreement = StorelessAgreement(
                peers, self._post_storeless, self._sendrecv_storeless, self._roster.heard
            )
        return self._storeless_agreement

    def _post_storeless(self, rank: int, data: torch.Tensor) -> None:
        self._guarded(lambda: self._connected_links().post(rank, _packed(data), _STORELESS_TAG))

    def _sendrecv_storeless(self, outbox: Messages, inbox: Messages) -> None:
        def exchange() -> None:
            links = self._connected_links()
            send, sources = [(rank, _packed(data)) for rank, data in outbox], [rank for rank, _ in inbox]
            replies = links.exchange(send, sources, _STORELESS_TAG, self.check_failures)
            for (_, data), reply in zip(inbox, replies, strict=True):
                as_bytes(data).copy_(torch.frombuffer(bytearray(reply), dtype=torch.uint8))

        self._guarded(exchange)

    def revoke(self) -> None:
        self._check_thread()
        with self._hanging_up_without_store():
            self._roster.revoke()

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Start a new generation; see :meth:`Communicator.shrink` and :class:`~holdfast.membership.roster.Roster`."""
        self._check_thread()
        with waiting, self._hanging_up_without_store():  # a revocation that was sent may not have arrived
            self._roster.shrink(admits=admits, leaves=leaves)
        self._drop_group()  # first: _begin_generation may already make the new group
        self._begin_generation()
        return self._me in self.members

    def newcomers(self, loop: int) -> tuple[int, ...]:
        version = self._store.version  # before the keys, as in Roster.check
        if version != self._looked_at:
            self._waiting = self._roster.newcomers(loop)
            self._looked_at = version
        return self._waiting

    def announce(self, loop: int, kind: str) -> None:
        if self._me == self.members[0] and not self._store.lost:
            self._store.put("loop", str(loop))
            self._store.put("kind", kind)

    def wanted_platform(self) -> str:
        with waiting:
            return self._store.wait(lambda: self._store.get("kind")) or ""

    has_store = has_atomic_shrink = can_grow = True  # the store decides

    @property
    def has_lost_store(self) -> bool:
        return bool(self._store.lost)

    def join(self, loop: int) -> bool:
        with waiting:
            has_joined = self._roster.join(loop, lambda: int(self._store.get("loop") or 0) > loop)
        self._begin_generation()
        return has_joined

    def failed(self) -> tuple[int, ...]:
        return self._roster.dead()

    # -- groups

    def _reduce(self, data: torch.Tensor, how: Any) -> None:
        if len(self.members) == 1:
            self._roster.check()
            return
        options = dist.AllreduceOptions()
        options.reduceOp = how
        self._run(lambda group: group.allreduce([data], options))

    def _run(self, begin: Callable[[Any], GroupWork]) -> None:
        """Start an operation of the process group, and wait for it."""
        self._with_group(lambda group: wait(begin(group), self.check_failures))

    def _with_group(self, act: Callable[[Any], Any]) -> None:
        self._guarded(lambda: act(self._group or self._connect_all()))

    def _guarded(self, act: Callable[[], Any]) -> None:
        self._check_thread()
        self._roster.check()
        if self._broken:
            raise PeerFailed(f"this generation is broken: {self._broken}")
        try:
            with waiting, as_peer_failure():
                act()
        except PeerFailed as error:
            self._broken = str(error)
            raise

    def _begin_generation(self) -> None:
        """Begin a generation: let threads answer members that ask for this one's address, or for the process group.

        This member may compute meanwhile, or wait in an agreement that the other one enters only after its messages.
        """
        for key in self._asked:
            self._store.on_key(key, None)
        self._asked = {}
        with self._making_lock:
            self._has_told = False
            if self._links is not None:
                self._links.begin(self.generation, self.members)
        if self._me not in self.members:
            return
        tell = _weakly(self._tell_address, self.generation)
        self._asked = {
            f"g/{self.generation}/links": lambda: ThreadedWork(tell),
            f"g/{self.generation}/group": _weakly(self._start_making, self.generation, self.members),
        }
        for key, answer in self._asked.items():
            self._store.on_key(key, answer)

    def _ask(self, what: str) -> None:
        if self._store.get(key := f"g/{self.generation}/{what}") is None:
            self._store.post_new(key, str(self._me))

    def _tell_address(self, generation: int) -> None:
        """Tell the other members the address of this one's links, once in a generation."""
        # Not under the lock: that of the store comes first, and a thread that holds it may wait for this one.
        wake_fd, address = self._store.signal_fd, self._store.own_address
        with self._making_lock:
            if self._links is None:
                self._links = Links(self._me, address, wake_fd, self._timeout_s, self._store.key_for)
                self._links.begin(self.generation, self.members)
            if self._has_told or generation != self.generation:
                return
            self._has_told = True
        self._roster.tell(generation, "links", self._links.own_address)

    def _connected_links(self) -> Links:
        """Return the links; the first call in a job, and after newcomers were admitted, asks all members for theirs."""
        if self._links is None or not self._links.know(self.members):
            self._ask("links")
            self._tell_address(self.generation)
            texts = self._roster.gather("links", None)
            assert self._links is not None
            self._links.meet(texts)
        return self._links

    def _start_making(self, generation: int, members: tuple[int, ...]) -> None:
        with self._making_lock:
            if self._making is not None or generation != self._roster.generation or self._me not in members:
                return
            prefix = f"g/{generation}/act/addresses/"
            exchange = AddressExchange(self._store, prefix, self._me, FOREVER.total_seconds())
            place, size, store, timeout_s = members.index(self._me), len(members), self._store, self._timeout_s
            # The address may take a look-up of names, which must not hold up the thread that notes changes of the store.
            made = ThreadedWork(lambda: make_gloo(exchange, place, size, store.own_address, timeout_s))
            self._making = made, exchange

    def _connect_all(self) -> Any:
        """Return the process group of this generation, which all members make together as soon as one needs it."""
        if self._making is None:
            self._ask("group")
            self._start_making(self.generation, self.members)
        assert self._making is not None
        self._group = wait(self._making[0], self._roster.check)
        return self._group

    @contextmanager
    def _hanging_up_without_store(self) -> Iterator[None]:
        """On ``StoreLost``, close all connections: the only signal to the other members that is left."""
        try:
            yield
        except StoreLost:
            self._close_links()
            self._drop_group()
            raise

    def _close_links(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None

    def _drop_group(self) -> None:
        """Discard the process group of the previous generation."""
        if self._sending is not None:
            self._sending.end()
            self._sending = None
        self._storeless_agreement = None
        with self._making_lock:
            group, self._group = self._group, None
            making, self._making = self._making, None
        if group is not None:
            bury(group)
        elif making is not None:
            making[1].give_up()
            bury_made(making[0])  # it may have been made all the same, because another member asked for it
        self._broken = ""


def _weakly(method: Callable[..., object], *arguments: object) -> Callable[[], object]:
    """Return a call of a method that does not keep its object: a store outlives the communicators that use it."""
    reference = weakref.WeakMethod(method)

    def act() -> object:
        bound = reference()
        return None if bound is None else bound(*arguments)

    return act


def _packed(data: torch.Tensor) -> bytes:
    return as_bytes(data).numpy().tobytes()
