"""The thread that owns the communicator of the ``torch.distributed`` backend, and its recovery when a rank fails.

Collectives run one at a time, in the order of the calls, which must be the same on all ranks. Each ends with a barrier.
So, on one communicator, the number of collectives that two ranks have completed differs by at most one; and if *any*
rank has completed a collective, *every* rank has entered its last barrier, and has its own result.

After a failure all survivors run the recovery protocol (R1 to R4) and exchange the progress of each group. If any
survivor has completed the collective in progress, it counts as completed on all. Otherwise a collective that recovers
(:mod:`~holdfast.distributed.parts`) is retried over the survivors, from its inputs, which are intact, and any other fails
on every survivor.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.base.options import is_set
from holdfast.base.phases import Phase
from holdfast.base.side_work import run_aside
from holdfast.comm import Communicator
from holdfast.comm.allreduce.mover import FABRIC
from holdfast.comm.connecting import connect_messages
from holdfast.comm.seated import SeatedCommunicator
from holdfast.comm.subgroup import Subgroup
from holdfast.config import Settings
from holdfast.distributed.debug_mode import compare_calls
from holdfast.distributed.joining import Joining
from holdfast.distributed.long_waits import LongWaits
from holdfast.distributed.meeting import Meeting
from holdfast.distributed.members import WORLD, GroupMembers, GroupReducer
from holdfast.distributed.recorder import GroupRecorder
from holdfast.distributed.tasks import Collective, P2PTransfer, error_after, ranks_lost
from holdfast.distributed.work import COMPLETES_FUTURES, PendingWork
from holdfast.engine import exits
from holdfast.engine.endpoint import endpoint_of
from holdfast.engine.regroup import Regrouping
from holdfast.errors import ConfigError, HoldfastError, PeerFailed, RanksLost, ScriptError
from holdfast.records.beacon import publish_connecting
from holdfast.recovery.messages import Done, Progress
from holdfast.recovery.regroup import RegroupLine
from holdfast.recovery.retry import CollectiveProgress, Retry

_LOOK_EVERY_S = 0.05
"""Interval at which an idle thread checks whether peers have seen a failure: they cannot continue without this rank."""
_POLL_S = 5e-5
"""Interval at which it polls messages in flight."""
_START_WITHIN_S = Phase.TORCH_GROUP.value.fixed_s
_LATE = "the communication thread did not answer"
_WATCH_EVERY_S = 0.5


@dataclass(slots=True)
class _Order:
    """Another task for the thread."""

    do: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class CommThread(Regrouping):
    """The thread that owns the communicator, for all groups of this process.

    Args:
        debug: Compare the calls of all ranks before every collective.
        waits: Connect however late the others do; for a newcomer, whose script does not meet theirs before.
    """

    def __init__(self, *, debug: bool = False, waits: bool = False) -> None:
        self._debug = debug
        self._inbox: queue.SimpleQueue[Collective | P2PTransfer | _Order | None] = queue.SimpleQueue()
        self._transfers: list[P2PTransfer] = []
        self._groups: dict[int, GroupMembers] = {}
        self._left = False
        self._current: Collective | None = None
        self._said_waits = False
        self._is_at_gate = False
        self._history: list[tuple[frozenset[int], dict[int, int]]] = []
        self.recorder: GroupRecorder
        self.world: SeatedCommunicator
        self.joining: Joining
        self.meeting: Meeting
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="holdfast-dist", daemon=True).start()
        threading.Thread(target=self._complete_futures, name=COMPLETES_FUTURES, daemon=True).start()
        settings = Settings.from_env()
        usual_s = settings.start_timeout_s if is_set(settings, "start_timeout_s") else _START_WITHIN_S
        limit_s = None if waits or settings.run_dir or not usual_s else usual_s  # a launcher ends missing ranks
        with exits.stacks_and_exit_after(limit_s and limit_s + 1):
            self.call(self._connect, limit_s, "init_process_group has not connected all ranks")

    def _connect(self) -> None:
        publish_connecting()
        settings = Settings.from_env()
        if settings.between_hosts != FABRIC:
            raise ConfigError(
                f"between_hosts {settings.between_hosts} is for sessions, and not for the torch.distributed backend: leave it at {FABRIC}"
            )
        if settings.rounds:
            raise ConfigError(
                "wire bf16 is for sessions, and not for the torch.distributed backend, whose scripts choose the type of"
                " each collective: leave it at fp32"
            )
        base = connect_messages(settings.fabric, endpoint_of(settings))
        first = tuple(map(int, settings.ranks.split(","))) if settings.ranks else base.members
        self.world = SeatedCommunicator(base, first[: len(first) - settings.spares])
        self.recorder = GroupRecorder(settings, base.local_ranks[0], first[: len(first) - settings.spares])
        self.joining = Joining(self.world)
        self.meeting = Meeting(self, self.joining)
        if base.local_ranks[0] not in first:
            self.recover(RegroupLine.FENCE)
            self.meeting.end_if_outside()

    # -- called by other threads

    def add_group(self, key: int, ranks: tuple[int, ...]) -> GroupMembers:
        """Return a new group, which takes part in recoveries from now on."""
        # A tag separates messages of another group of all ranks from those of the world.
        comm = self.world if key == WORLD else Subgroup(self.world, ranks, key)
        shared_bytes = self.recorder.settings.shared_bytes
        group = GroupMembers(key, ranks, comm, GroupReducer(comm, shared_bytes), GroupReducer(comm, shared_bytes))

        def add() -> None:
            for lost, counts in self._history:
                if key in counts and not lost.isdisjoint(ranks):
                    group.failed.add(counts[key])
            self._groups[key] = group

        self.call(add)
        return group

    def drop_group(self, group: GroupMembers) -> None:
        """Free a group's memory. Its progress is kept, because other ranks may still have to recover in it."""

        def drop() -> None:
            group.adder.sums = group.lender.sums = None

        self.call(drop)

    def submit(self, job: Collective | P2PTransfer) -> PendingWork:
        """Queue ``job`` after everything that was submitted before."""
        job.work.answer_in(self._answers)
        self._inbox.put(job)
        return job.work

    def _complete_futures(self) -> None:
        """Complete futures, whose callbacks may wait for later collectives; publish and give up what takes too long."""
        waits = LongWaits(lambda wait, seats: self.recorder.note_wait(wait, seats))
        while True:
            with contextlib.suppress(queue.Empty):
                answer = self._answers.get(timeout=_WATCH_EVERY_S)
                run_aside("completing a future", answer, None)  # it runs what the script has chained to it
                del answer  # it holds tensors
            current = self._current  # also of a script whose futures complete all the time
            if current is not None and time.monotonic() - current.begun_s > current.work.timeout_s:
                self.give_up(current.work)
            run_aside("showing a long wait", functools.partial(waits.look, current), None)
            del current

    def give_up(self, work: PendingWork) -> None:
        """End a collective that has timed out; its group becomes unusable, all others remain usable."""
        current = self._current
        if current is not None and current.work is work and not current.group.broken:
            current.group.broken = True  # first: the revocation wakes the thread, which shares it
            self.world.base.revoke_from_outside()

    def abandon(self, works: Sequence[PendingWork]) -> None:
        """Stop polling messages that no one waits for any more: their peers may end without them."""

        def drop() -> None:
            for transfer in [each for each in self._transfers if each.work in works]:
                self._transfers.remove(transfer)
                if transfer.message is not None:
                    self.world.base.abandon(transfer.message)
            self._publish_waits()

        self.call(drop)

    def leave(self) -> None:
        """Return once all survivors call this: a rank must not exit while others may need it to recover."""
        if not self._left:
            self._left = True
            if not self.joining.is_seated:
                self.meeting.stay_outside()
            self.call(self._pass_gate, limit_s=None)

    def call(self, do: Callable[[], None], limit_s: float | None = _START_WITHIN_S, late: str = _LATE) -> None:
        """Run ``do`` in the communication thread, after what was submitted before; raise what it raises, or ``late``."""
        self._inbox.put(order := _Order(do))
        if not order.done.wait(limit_s):
            raise HoldfastError(f"{late} within {limit_s:g} s")
        if order.error is not None:
            raise order.error

    # -- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            run_aside("saying why this rank ends", functools.partial(self._say_why, error), None)
        exits.kill_self()  # peers wait for this rank and must see that it failed

    def _say_why(self, error: BaseException) -> None:
        if isinstance(error, HoldfastError):  # the store is lost, or the other ranks have continued without this one
            sys.stderr.write(f"holdfast: {error}\n")
        else:
            traceback.print_exception(error)
        if classify(error) is DeviceFailure.LOST:
            self.recorder.device_lost(error)

    def _serve(self) -> None:
        while True:
            match self._next():
                case Collective() as collective:
                    self._carry_out(collective)
                    del collective  # it holds tensors, which this idle thread does not need any more
                case P2PTransfer() as transfer:
                    self._begin(transfer)
                    del transfer
                case _Order() as order:
                    order.error = _error_of(order.do)  # raised again in the thread that queued it
                    order.done.set()
                    del order
                case None:
                    self._poll()

    def _next(self) -> Collective | P2PTransfer | _Order | None:
        """Return the next task; None periodically."""
        try:
            if self._transfers:
                return self._inbox.get_nowait()
            return self._inbox.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            return None

    def _poll(self) -> None:
        """Poll messages in flight, and check for failures that other ranks have seen."""
        if not hasattr(self, "meeting") or self.meeting.over.is_set():  # _connect makes it in this thread
            return
        for transfer in self._transfers[:]:
            self._test(transfer)
        if self._waits != self._said_waits:  # the script has begun to wait for a message
            self._publish_waits()
        if self._transfers:
            time.sleep(_POLL_S)
        elif self.world.base.is_revoked():
            self.recover()
            self.meeting.end_if_outside()

    def _publish_waits(self) -> None:
        self._said_waits = self._waits
        works = [transfer.work for transfer in self._transfers] if self._current is None else [self._current.work]
        # at the gate it is done, and the others may take as long as they like
        limit_s = math.inf if self._is_at_gate else max((work.timeout_s for work in works), default=0.0)
        run_aside("showing a wait", lambda: self.recorder.publish_waits(self._said_waits, limit_s), None)

    @property
    def _waits(self) -> bool:
        """Whether this rank waits for others. A message that was begun early is no wait yet."""
        awaits_message = any(transfer.work.is_awaited for transfer in self._transfers)
        return self._is_at_gate or self._current is not None or awaits_message

    # -- collectives

    def _carry_out(self, job: Collective) -> None:
        job.number, job.begun_s = job.group.completed, time.monotonic()
        self._current = job  # last: another thread reads its begun_s
        self._publish_waits()
        error = self._exchange(job)
        self._end(job, _error_of(job.call.finish) if error is None else error)

    def _exchange(self, job: Collective) -> Exception | None:
        """Run a collective, again after a failure if it recovers; return why there is no result, or None."""
        group, failures = job.group, 0
        if group.broken:
            return HoldfastError(f"{job.what}: the group is unusable, because one of its collectives timed out")
        if job.has_failed:
            return ranks_lost(job)
        while True:
            try:
                if self._debug and job.call.signature:
                    compare_calls(job)
                job.call.exchange()
            except PeerFailed as error:
                before = self.world.base.members
                completed = self.recover().get(group.key, -1)
                failures += self.world.base.members == before and not self.joining.has_news
                answer = CollectiveProgress(
                    completed=completed,
                    number=group.completed,
                    is_broken=group.broken,
                    has_lost=job.has_failed,
                    failures=failures,
                ).decide()
                if answer is Retry.AGAIN:
                    continue
                return error_after(answer, job, failures, error)
            except (RanksLost, ScriptError) as error:  # raised on all ranks alike
                return error
            except Exception as error:  # belongs to the caller of the collective
                if classify(error) is DeviceFailure.LOST:
                    raise  # the others continue without this rank
                group.broken = True  # a recovery tells the other ranks
                self.recover()
                return error
            else:
                return None

    def _end(self, job: Collective, error: Exception | None) -> None:
        self._current = None
        self._publish_waits()
        if isinstance(error, RanksLost):  # if the job recovers in silence, the next part that is exchanged is lost
            job.group.failed = {number for number in job.group.failed if number > job.group.completed}
        job.group.completed += 1
        if error is None:
            job.work.complete()
        else:
            job.work.fail(error)

    # -- point-to-point

    def _begin(self, transfer: P2PTransfer) -> None:
        try:
            transfer.message = transfer.begin()
        except PeerFailed:
            self.recover()
            transfer.work.fail(ranks_lost(transfer))
        except Exception as error:  # belongs to the caller
            transfer.work.fail(error)
        else:
            self._transfers.append(transfer)
            self._publish_waits()
            self._test(transfer)

    def _test(self, transfer: P2PTransfer) -> None:
        if transfer not in self._transfers:  # a recovery has ended it
            return
        assert transfer.message is not None
        try:
            source = self.world.test(transfer.message)
        except PeerFailed:
            self.recover()
            return
        if source is None:
            return
        self._transfers.remove(transfer)
        self._publish_waits()
        if (error := _error_of(transfer.finish)) is not None:
            transfer.work.fail(error)
        else:
            ranks = transfer.group.ranks
            transfer.work.complete(ranks.index(source) if source in ranks else -1)

    # -- recovery

    def recover(self, line: RegroupLine = RegroupLine.REVOKE) -> Mapping[int, int]:
        """Recover with the survivors; return for every group how many collectives any survivor has completed."""
        before, processes, joins = self.world.members, self.world.base.members, line is RegroupLine.FENCE
        self.recorder.failure_seen(is_known=bool(self.world.base.failed()))
        self.joining.begin()
        self._regroup(line, Progress(0, computed=False))  # progress is shared by group
        table, rows = self._shared
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            if transfer.message is not None:
                self.world.base.abandon(transfer.message)
            transfer.work.fail(ranks_lost(transfer))
        lost = () if joins else tuple(rank for rank in before if rank not in self.world.members)
        completed = self._settle(table, before, lost)
        was_seated = self.joining.is_seated
        self.joining.settle(rows)
        if self.joining.is_seated and not was_seated:
            for group in self._groups.values():  # it continues where all others are, which have stopped at a boundary
                group.completed = completed.get(group.key, 0)
        now = self.world.base.members
        gone, joined = (tuple(sorted({*a} - {*b})) for a, b in ((processes, now), (() if joins else now, processes)))
        seating = self.joining.seating
        self.recorder.recovered(gone, self.world, joined, seating.seated, is_news=self.joining.has_news or seating.ends)
        if not joins:
            self._publish_waits()
        return completed

    @property
    def _comm(self) -> Communicator:
        return self.world.base

    def _shrink(self) -> bool:
        self.world.shrink()
        return True

    def _share(self, _: Progress) -> Done:
        self._shared = self._share_progress(), self.joining.share()
        return Done()

    def _share_progress(self) -> list[tuple[int, int, int, int]]:
        """Return (group, completed, broken, last failed) of every group of every survivor."""
        base, is_seated = self.world.base, self.joining.is_seated
        groups = self._groups.values()
        status = [(g.key, g.completed, int(g.broken), max(g.failed, default=-1) if is_seated else -1) for g in groups]
        rows = base.maximum([len(status)])[0]
        part = torch.tensor(status + [(-1, 0, 0, -1)] * (rows - len(status)), dtype=torch.int64).view(rows, 4)
        whole = torch.empty(len(base.processes), rows, 4, dtype=torch.int64)
        base.allgather(part, whole)
        return [(key, *figures) for key, *figures in whole.view(-1, 4).tolist() if key >= 0]

    def _settle(
        self, table: list[tuple[int, int, int, int]], before: tuple[int, ...], lost: tuple[int, ...]
    ) -> Mapping[int, int]:
        top: dict[int, int] = {}
        if not self.joining.is_seated:  # what has failed before it came fails on this newcomer as on the others
            for group in self._groups.values():
                group.failed = {failed for key, *_, failed in table if key == group.key and failed >= 0}
        for key, completed, broken, _ in table:
            top[key] = max(top.get(key, 0), completed)
            if broken and key in self._groups:
                self._groups[key].broken = True
        self._history.append((frozenset(lost), dict(top)))  # for groups that this rank has not created yet
        for key, group in self._groups.items():
            if set(group.ranks) <= set(before):  # the seats that earlier failures emptied were taken again
                group.failed = {number for number in group.failed if number >= top.get(key, 0)}
            # The collective that no rank has completed, or the next one if none is in progress: each group that lost a
            # rank reports that once. A collective of a group that lost no rank is simply retried.
            if not group.broken and not set(lost).isdisjoint(group.ranks):
                group.failed.add(top[key])
        return top

    def _pass_gate(self) -> None:
        self.recorder.script_ended({group.key: group.completed for group in self._groups.values()})
        self._is_at_gate = True
        self._publish_waits()
        self._dismiss_unseated()
        while not self._agree(True):
            self.recover(RegroupLine.SHRINK)
            self._dismiss_unseated()
        self._is_at_gate = False
        self._publish_waits()
        self.recorder.finished()

    def _dismiss_unseated(self) -> None:
        """Once the script of every seat has ended, tell the workers without a seat, which then pass the gate, too."""
        while self.world.unseated and not self.joining.seating.ends:
            with contextlib.suppress(PeerFailed):
                self.world.barrier()  # a rank that passes it knows that all have come here, and its news wakes the others
                self.joining.be_at_end()
            self.recover()


def _error_of(act: Callable[[], object]) -> Exception | None:
    """Call ``act``, and return the error that belongs to its caller."""
    try:
        act()
    except Exception as error:
        return error
    return None


_engine: CommThread | None = None


def get_engine(*, debug: bool = False, waits: bool = False) -> CommThread:
    """Return the communication thread of this process; the first call starts it."""
    global _engine
    if _engine is None:
        _engine = CommThread(debug=debug, waits=waits)
        if not _engine.recorder.is_watched:  # otherwise the watcher knows how the script ended, and lets it exit
            exits.end_job_on_errors(leave)
    return _engine


def check_session() -> None:
    """Check, in a script that has made a process group, that a session can be made, too.

    Raises:
        ConfigError: if there are spares, which have a part in a session and no rank in the group.
    """
    both = 'the script has a session and init_process_group("holdfast")'
    if _engine is not None and _engine.recorder.settings.spares:
        raise ConfigError(f"--spares cannot be used, because {both}: start without it")
    if _engine is not None and not _engine.joining.is_seated:
        _engine.meeting.stay_outside(both)


def leave() -> None:
    """Pass the exit barrier, if there is a communication thread: called when the script has ended successfully."""
    if _engine is not None:
        _engine.leave()
