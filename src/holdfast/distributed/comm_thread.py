"""The thread that owns MPI for ``torch.distributed``, and what it does when a rank dies.

Collectives are carried out one at a time, in the order in which they were called, which must be the same at all ranks.
Each ends with a barrier. So, on one communicator, the numbers of collectives that two ranks have completed differ by at
most one; and if *anybody* has completed one, *everybody* has entered its last barrier, and has its own result.

After a death all survivors meet (R1 to R4 of the recovery protocol), tell how far each of their groups is, and know for
the collective in progress: somebody has completed it, then all have; or nobody has, then sums inside DDP are made again
over the survivors, from the inputs, which are still whole, and any other collective fails, at every survivor alike.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from holdfast.comm.allreduce.ordered import OrderedSum, Span
from holdfast.comm.base import Exchange, Message, MessageCommunicator
from holdfast.comm.subgroup import Subgroup
from holdfast.comm.ulfm import UlfmCommunicator
from holdfast.distributed.recorder import Witness
from holdfast.distributed.work import Pending
from holdfast.engine import exits
from holdfast.engine.regroup import pass_gate, regroup
from holdfast.errors import HoldfastError, PeerFailed, RanksLost, ScriptError
from holdfast.records.beacon import say_connecting

_LOOK_EVERY_S = 0.05
"""How often an idle engine looks whether others have seen a death: they cannot go on without it."""
_POLL_S = 5e-5
"""How often it looks after messages that are on their way."""
_ATTEMPTS = 4
"""A collective that fails so often although nobody dies has another reason."""
_START_WITHIN_S = 120.0
_LEAST_BYTES = 1 << 16
_SIGNATURE_BYTES = 256
_WATCH_EVERY_S = 0.5

WORLD = 1
"""The key of the group of all ranks."""


@dataclass(slots=True)
class Adder:
    """Sums of vectors of any length, in memory that grows with them: see :class:`~holdfast.comm.OrderedSum`."""

    comm: Exchange
    shared_bytes: int = -1
    size_bytes: int = 0
    sums: OrderedSum | None = None

    def up_to(self, span: Span, order: str) -> OrderedSum:
        """Return what adds vectors that end where ``span`` does; ``ScriptError`` if the members do not ask for the same."""
        size_bytes = span.end
        if self.sums is not None and size_bytes > self.size_bytes:
            self.sums.check_same(span, order)  # before somebody alone begins to set more memory up
        if self.sums is None or size_bytes > self.size_bytes:
            self.size_bytes = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
            self.sums = OrderedSum(self.comm, "wide", self.size_bytes, shared_bytes=self.shared_bytes)
        return self.sums

    def result(self, span: Span) -> torch.Tensor:
        """Return the sum that was made last; it may be read until the next one over the same bytes."""
        assert self.sums is not None, "no sum was made yet"
        return self.sums.result(span)


@dataclass(slots=True)
class Members:
    """A group of ranks, as the engine sees it.

    Args:
        key: The same number at all members, and another one for any other group.
        ranks: Global ranks, ascending, as the group was made.
        comm: Collectives among those alive.
        adder: Of collectives whose result is moved to where it belongs before the next.
        lender: Of DDP's buckets, which lie behind one another: DDP reads the results where they were added, at the end
            of its backward pass.
        completed: Collectives that are over at this rank, failed ones too.
        broken: A collective of it took too long; how far each rank is, is not known any more.
        failed: Numbers of collectives that fail at all ranks, those included that have not called them yet.
    """

    key: int
    ranks: tuple[int, ...]
    comm: Exchange
    adder: Adder
    lender: Adder
    completed: int = 0
    failed: set[int] = field(default_factory=set)
    broken: bool = False

    @property
    def alive(self) -> tuple[int, ...]:
        """Those that are left."""
        return self.comm.members

    @property
    def dead(self) -> tuple[int, ...]:
        """Those that are not."""
        alive = self.comm.members
        return tuple(rank for rank in self.ranks if rank not in alive)


@dataclass(slots=True)
class Collective:
    """Something that all members of a group do.

    Args:
        exchange: Everything that needs the others, up to and with a last barrier.
        finish: Moves the result to where it belongs; needs nobody.
        recovers: It is made again over the survivors when somebody dies.
        signature: What must be the same at all ranks.
    """

    group: Members
    what: str
    exchange: Callable[[], None]
    finish: Callable[[], None]
    recovers: bool
    work: Pending
    signature: str = ""
    begun_s: float = 0.0


@dataclass(slots=True)
class Transfer:
    """A message between two ranks: begun at once, looked after until it is through."""

    group: Members
    what: str
    begin: Callable[[], Message]
    finish: Callable[[], None]
    work: Pending
    message: Message | None = None


@dataclass(slots=True)
class _Order:
    """Something else for the thread to do."""

    do: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Engine:
    """One thread that owns MPI, for all groups of this process.

    Args:
        debug: Compare what the ranks call, before every collective.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self._debug = debug
        self._inbox: queue.SimpleQueue[Collective | Transfer | _Order | None] = queue.SimpleQueue()
        self._transfers: list[Transfer] = []
        self._groups: dict[int, Members] = {}
        self._left = False
        self._current: Collective | None = None
        self._history: list[tuple[frozenset[int], dict[int, int]]] = []
        self.witness: Witness
        self.world: MessageCommunicator
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="holdfast-dist", daemon=True).start()
        threading.Thread(target=self._watch, name="holdfast-dist-watch", daemon=True).start()
        self._call(self._connect)

    def _connect(self) -> None:
        say_connecting()
        self.world = UlfmCommunicator()
        self.witness = Witness(self.world.here[0], len(self.world.members))

    # -- for other threads

    def add_group(self, key: int, ranks: tuple[int, ...]) -> Members:
        """Return a new group, which is known to recoveries from now on."""
        # Messages of another group of all ranks must not be taken for those of the world.
        comm = self.world if key == WORLD else Subgroup(self.world, ranks, key)
        shared_bytes = self.witness.settings.shared_bytes
        group = Members(key, ranks, comm, Adder(comm, shared_bytes), Adder(comm, shared_bytes))

        def add() -> None:
            for lost, known in self._history:
                if key in known and not lost.isdisjoint(ranks):
                    group.failed.add(known[key])
            self._groups[key] = group

        self._call(add)
        return group

    def drop_group(self, group: Members) -> None:
        """Free a group's memory. How far it came is remembered: others may still have to recover in it."""

        def drop() -> None:
            group.adder.sums = group.lender.sums = None

        self._call(drop)

    def submit(self, job: Collective | Transfer) -> Pending:
        """Carry out ``job`` after all that was submitted before."""
        job.work.answer_in(self._answers)
        self._inbox.put(job)
        return job.work

    def _watch(self) -> None:
        """Answer futures, whose callbacks may wait for later collectives; give up what takes too long."""
        while True:
            try:
                self._answers.get(timeout=_WATCH_EVERY_S)()
            except queue.Empty:
                current = self._current
                if current is not None and time.monotonic() - current.begun_s > current.work.timeout_s:
                    self.give_up(current.work)

    def give_up(self, work: Pending) -> None:
        """End a collective that takes too long; its group cannot be used any more, all others can."""
        current = self._current
        if current is not None and current.work is work and not current.group.broken:
            current.group.broken = True
            self.world.revoke_from_outside()

    def leave(self) -> None:
        """Return once all survivors call this: nobody may go while others may need it to recover."""
        if not self._left:
            self._left = True
            self._call(self._pass_gate, limit_s=None)

    def _call(self, do: Callable[[], None], limit_s: float | None = _START_WITHIN_S) -> None:
        order = _Order(do)
        self._inbox.put(order)
        if not order.done.wait(limit_s):
            raise HoldfastError("the thread that owns MPI does not answer")
        if order.error is not None:
            raise order.error

    # -- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
            exits.kill_self()  # others wait for this rank; they must see that it is gone

    def _serve(self) -> None:
        while True:
            match self._next():
                case Collective() as collective:
                    self._carry_out(collective)
                case Transfer() as transfer:
                    self._begin(transfer)
                case _Order() as order:
                    order.error = _error_of(order.do)  # raised again where the order came from
                    order.done.set()
                case None:
                    self._look()

    def _next(self) -> Collective | Transfer | _Order | None:
        """Return the next thing to do; None from time to time."""
        try:
            if self._transfers:
                return self._inbox.get_nowait()
            return self._inbox.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            return None

    def _look(self) -> None:
        """Look after messages that are on their way, and for deaths that others have seen."""
        if not hasattr(self, "world"):
            return
        for transfer in self._transfers[:]:
            self._test(transfer)
        if self._transfers:
            time.sleep(_POLL_S)
        elif self.world.is_revoked():
            self._recover()

    # -- collectives

    def _carry_out(self, job: Collective) -> None:
        job.begun_s, self._current = time.monotonic(), job
        error = self._exchange(job)
        self._end(job, _error_of(job.finish) if error is None else error)

    def _exchange(self, job: Collective) -> Exception | None:
        """Have the ranks meet in a collective, after a death once more if it can be made again; return why there is no result."""
        group, failures = job.group, 0
        if group.broken:
            return HoldfastError(f"{job.what}: a collective of this group was given up, so it cannot be used")
        if group.completed in group.failed and not job.recovers:
            return self._lost(job)
        while True:
            try:
                if self._debug and job.signature:
                    self._compare(job)
                job.exchange()
            except PeerFailed as error:
                failures += 1
                before = self.world.members
                completed = self._recover()
                if group.broken:
                    return HoldfastError(f"{job.what} took too long, or failed at another rank")
                if completed.get(group.key, -1) > group.completed:
                    return None  # completed somewhere, so all have entered its last barrier, this rank too
                if self.world.members == before and failures >= _ATTEMPTS:
                    return HoldfastError(f"{job.what} failed {failures} times though nobody died: {error}")
                if group.completed in group.failed and not job.recovers:
                    return self._lost(job)
            except (RanksLost, ScriptError) as error:  # raised at all ranks alike
                return error
            except Exception as error:  # belongs to who called the collective
                group.broken = True  # the others cannot know: they are told by a recovery
                self._recover()
                return error
            else:
                return None

    def _end(self, job: Collective, error: Exception | None) -> None:
        self._current = None
        job.group.failed.discard(job.group.completed)
        job.group.completed += 1
        if error is None:
            job.work.complete()
        else:
            job.work.fail(error)

    def _lost(self, job: Collective | Transfer) -> RanksLost:
        dead, alive = job.group.dead, job.group.alive
        who = f"rank {dead[0]} has" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} have"
        if not dead:
            return RanksLost(f"{job.what} was interrupted by the recovery of another group", dead, alive)
        return RanksLost(f"{job.what} did not complete: {who} died; alive: {', '.join(map(str, alive))}", dead, alive)

    def _compare(self, job: Collective) -> None:
        """Make sure that all ranks call the same thing, or raise ``ScriptError`` with what each calls."""
        mine = job.signature.encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES)
        everybodys = torch.empty(len(job.group.comm.processes), _SIGNATURE_BYTES, dtype=torch.uint8)
        job.group.comm.allgather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), everybodys)
        said = [bytes(row.tolist()).decode(errors="replace").strip() for row in everybodys]
        if len(set(said)) > 1:
            calls = "; ".join(f"rank {rank}: {call}" for rank, call in zip(job.group.alive, said, strict=True))
            number = job.group.completed
            raise ScriptError(f"the ranks call different collectives, as number {number} of their group: {calls}")

    # -- messages between two ranks

    def _begin(self, transfer: Transfer) -> None:
        try:
            transfer.message = transfer.begin()
        except PeerFailed:
            self._recover()
            transfer.work.fail(self._lost(transfer))
        except Exception as error:  # belongs to who called it
            transfer.work.fail(error)
        else:
            self._transfers.append(transfer)
            self._test(transfer)

    def _test(self, transfer: Transfer) -> None:
        if transfer not in self._transfers:  # a recovery has ended it
            return
        assert transfer.message is not None
        try:
            source = self.world.test(transfer.message)
        except PeerFailed:
            self._recover()
            return
        if source is None:
            return
        self._transfers.remove(transfer)
        if (error := _error_of(transfer.finish)) is not None:
            transfer.work.fail(error)
        else:
            ranks = transfer.group.ranks
            transfer.work.complete(ranks.index(source) if source in ranks else -1)

    # -- recovery

    def _recover(self, *, told: bool = False) -> Mapping[int, int]:
        """Meet the survivors; return for every group how many collectives anybody alive has completed."""
        before = self.world.members
        self.witness.failure_seen()
        table = regroup(self.world, self._share_progress, told=told)
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            if transfer.message is not None:
                self.world.abandon(transfer.message)
            transfer.work.fail(self._lost(transfer))
        lost = tuple(rank for rank in before if rank not in self.world.members)
        completed = self._settle(table, lost)
        self.witness.recovered(lost, self.world.members, self.world.generation)
        return completed

    def _share_progress(self) -> list[tuple[int, int, int]]:
        """Return (group, completed, broken) of every group of every survivor."""
        mine = [(g.key, g.completed, int(g.broken)) for g in self._groups.values()]
        rows = self.world.maximum([len(mine)])[0]
        part = torch.tensor(mine + [(-1, 0, 0)] * (rows - len(mine)), dtype=torch.int64).view(rows, 3)
        whole = torch.empty(len(self.world.processes), rows, 3, dtype=torch.int64)
        self.world.allgather(part, whole)
        return [(key, completed, broken) for key, completed, broken in whole.view(-1, 3).tolist() if key >= 0]

    def _settle(self, table: list[tuple[int, int, int]], lost: tuple[int, ...]) -> Mapping[int, int]:
        top: dict[int, int] = {}
        for key, completed, broken in table:
            top[key] = max(top.get(key, 0), completed)
            if broken and key in self._groups:
                self._groups[key].broken = True
        self._history.append((frozenset(lost), dict(top)))  # for groups that this rank has yet to make
        for key, group in self._groups.items():
            # The collective that nobody has completed, or the next one if nobody is in any: each group that lost a rank
            # hears of it once. A collective of a group that lost nobody is simply made again.
            if not group.broken and not set(lost).isdisjoint(group.ranks):
                group.failed.add(top[key])
        return top

    def _pass_gate(self) -> None:
        pass_gate(self.world, lambda: self._recover(told=True))
        self.witness.finished()


def _error_of(act: Callable[[], object]) -> Exception | None:
    """Do something, and return the error that belongs to its caller."""
    try:
        act()
    except Exception as error:
        return error
    return None


_engine: Engine | None = None


def get_engine(*, debug: bool = False) -> Engine:
    """Return the engine of this process; the first call starts it."""
    global _engine
    if _engine is None:
        _engine = Engine(debug=debug)
        if not _engine.witness.is_watched:  # otherwise the watcher knows how the script ended, and lets it leave
            exits.end_job_on_errors(leave)
    return _engine


def leave() -> None:
    """Pass the gate, if there is an engine: called when the script has ended well."""
    if _engine is not None:
        _engine.leave()
