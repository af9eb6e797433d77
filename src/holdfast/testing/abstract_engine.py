"""The abstract engine: how workers, their communicator and their weights are written down, and what can happen next.

``explorer`` searches it, ``abstract_draft`` says what each move changes. The workers are driven by the real
:class:`~holdfast.recovery.Protocol`; the engine is as nasty as its contract allows; the weights of a body are the list
of what was put into them.

The engine:

- a worker dies at any point, also in recovery; so may the next one;
- a sum completes where it likes, once everybody has *entered* it, and fails where it likes, once a member is dead
  or the communicator is revoked. Of those who wait on a communicator with a dead member only one is sure to see
  it; the others wait until it revokes. A revoke reaches them one by one, late, and is lost if the revoker dies;
- ``Agree`` returns when all living members have called it, the same everywhere. If a member is dead it is False,
  or not: the death, and the dead one's flag, may or may not count;
- ``Shrink`` returns a group of all who were alive, so that one of them may be dead in it;
- a worker that left looks dead, or blocks those who need it;
- ``Shrink`` leaves out who wants to leave, unless all do, and admits newcomers if all the living have heard of them;
- a newcomer has the state when all have given who are no newcomers; a giver is done when it likes, and may die then;
- with shared memory: a barrier of a sum may lie and return when a member is dead; a worker may be stopped while it
  adds. To the others it is dead, but it may wake up at any time later and write where it was writing.

What is one move here although it is several in life, and why nothing is missed:

- *A worker computes, applies, revokes and enters its next operation at once.* That it has entered only allows
  others more, so the early entry comes with every run of a late one. A worker that dies before it enters is one that
  dies inside: its sum can still fail everywhere. A revoke that comes sooner only meets more.
- *Publishing and leaving are seen from outside,* so the move before them is a move of its own.
- *An agreement to which somebody said no, and a Shrink, are decided when the last one enters.* Whoever dies between
  the entry and the decision might as well have died before the entry, with the same result. An ``Agree`` to which
  all said yes is decided by a move of its own, because a death before that move may turn it.
- *A worker is back from Shrink at once,* but counts as inside it until something on the new communicator shows that
  it is back: that is how long a revoke may find it there.
- *Once no death is left and no trace of one is on the communicator,* the order of moves makes no difference: one is
  tried. Not so with shared memory, where the order of reads and writes is what is in question: all are tried.

``World(atomic=False)`` takes all of this apart, one order a move, at some cost; the verdicts are the same.
What two attempts of the same workers at the same step compute is the same to the bit, so they count as one attempt.
Steps that are in everybody's weights are forgotten: there is nobody left to disagree about them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.errors import InternalError, JobError
from holdfast.events import (
    JOINING,
    Action,
    Agree,
    CloseStep,
    Event,
    HandOver,
    Leave,
    LoadCheckpoint,
    Progress,
    ProgressKnown,
    ShareProgress,
    Shrink,
    SumBucket,
    TakeChanges,
    Welcome,
)
from holdfast.recovery import Protocol, Strategy
from holdfast.testing.abstract_members import CHANGE, NO_LAPSE, Lapse, Wish, Wishes
from holdfast.testing.abstract_memory import NO_RULE, Adding, AtBarrier, Memory, Rule, Violation, first_memory, ranks

Payload = int | Progress | tuple[int, int]
"""What one worker brings to a sum, as far as others care."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A small job and the engine under it.

    Args:
        workers: Workers at the start.
        deaths: The most workers that die.
        steps: Steps of the job.
        buckets: Buckets of a step.
        checkpoint_every: Steps between two checkpoints.
        all_publish: Whether every survivor must be told that a step is stable, not only somebody.
        lossy: Whether a step may go without the gradients of a dead worker, as with ``forward``.
        in_place: Whether a failed sum spoils its input.
        rooted: Buckets that are broadcast by the lowest worker, not summed, so that the root completes alone.
        uniform: Whether ``Agree`` returns the same everywhere although somebody died.
        atomic: Whether moves are joined where that loses nothing.
        shared: Whether buckets are summed through shared memory.
        late: Whether a worker may be stopped while it adds, and wake up late. It counts as one that dies.
        lying: Whether the barriers of a sum may return although a dead member has not entered them.
        keep_input: Whether gradients stay whole until their step is over, not only until their sum is known.
        without: Rules of the sum through shared memory that are left out.
        newcomers: Workers that may come.
        leavers: Workers that may be told to leave.
        changes: Strategies that the running job may be changed to, one after the other.
        lapses: What the engine does wrong with these.
        make_protocol: Makes one worker's protocol from a strategy and the number of buckets. Give a broken one to
            see that it is found out.
    """

    workers: int = 3
    deaths: int = 2
    steps: int = 2
    buckets: int = 2
    checkpoint_every: int = 1
    all_publish: bool = False
    lossy: bool = False
    in_place: bool = False
    rooted: frozenset[int] = frozenset()
    uniform: bool = True
    atomic: bool = True
    shared: bool = False
    late: bool = False
    lying: bool = False
    keep_input: bool = False
    without: Rule = NO_RULE
    newcomers: int = 0
    leavers: frozenset[int] = frozenset()
    changes: tuple[Strategy, ...] = ()
    lapses: Lapse = NO_LAPSE
    make_protocol: Callable[[Strategy, int], Protocol] = Protocol


# ---------------------------------------------------------------------------------------------
# What there is. Sets of workers, and of buckets, are bit masks.


@dataclass(frozen=True, slots=True)
class Returning(Action):
    """Not an order: the agreement or the shrink has been decided, and the worker is about to hear."""

    event: Event


@dataclass(frozen=True, slots=True)
class Doing(Action):
    """Not an order: the worker has orders, and is about to carry out the first of them."""

    orders: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Not an order: the protocol says that the job cannot go on."""


class Worker(NamedTuple):
    """A living worker.

    Args:
        mind: Its protocol, by number.
        waits: The order that it waits in.
        sums: Sums that it has entered on this communicator.
        steps: Steps in its weights, LOADING while they are being replaced, JOINING if it has not got the others' yet.
        group: Who shared the mini-batch whose gradients it has, 0 if it has none.
        inputs: Buckets whose own gradient it still has.
        have: By bucket, whose gradients are in the sum that it holds, 0 if it holds none.
        saved: It was ordered to save and stop.
        told: Steps that it was told are stable, if that is checked.
        heard: Of CHANGE, ASK and LEAVE, what it has heard in closing sums and nothing was done about.
        calm: It is about to meet the others because members change, and has seen no failure.
        taken: How often its settings were changed.
        used: The same, when it applied the newest of its steps.
        aside: The same, of those that it has been given; 0 if there are none that do not count yet.
        given: Steps in the state that it has been given as a newcomer, and ``taken``; None if there is none.
    """

    mind: int
    waits: Action
    sums: int
    steps: int
    group: int
    inputs: int
    have: tuple[int, ...]
    saved: bool = False
    told: int = 0
    heard: int = 0
    calm: bool = False
    taken: int = 0
    used: int = 0
    aside: int = 0
    given: tuple[int, int] | None = None

    def without_gradients(self) -> Worker:
        """Return the worker with nothing of a step in its hands."""
        return self._replace(group=0, inputs=0, have=(0,) * len(self.have))


class Sum(NamedTuple):
    """A sum that somebody can still complete: its number on the communicator, what it is, and who brought what.

    ``result`` is what a closing sum says, or how many changes are taken; -1 as long as nobody knows it.
    """

    number: int
    what: tuple[object, ...]
    entered: int
    brought: tuple[tuple[int, Payload], ...]
    result: int = -1


class State(NamedTuple):
    """Everything.

    Args:
        workers: By rank; None if dead or left.
        left: Those who left.
        members: The group of the communicator.
        failed: Living members who saw a sum fail on it.
        revokers: Living members who revoked it.
        fenced: Everybody is known to have left the shrink that made it.
        sums: Those in progress.
        log: By step, what was put into the weights; None once everybody alive has it.
        published: Steps in the newest published state.
        published_taken: How often the settings had been changed when that was made: they are a part of it.
        deaths_left: How many may still die.
        memory: What is shared, empty if nothing is.
        wishes: Who wants to come or leave.
    """

    workers: tuple[Worker | None, ...]
    left: int
    members: int
    failed: int
    revokers: int
    fenced: bool
    sums: tuple[Sum, ...]
    log: tuple[tuple[int, ...] | None, ...]
    published: int
    published_taken: int
    deaths_left: int
    memory: Memory
    wishes: Wishes


class Die(NamedTuple):
    """``rank`` dies."""

    rank: int


class Complete(NamedTuple):
    """``rank`` has the result of the sum that it waits in."""

    rank: int


class Fail(NamedTuple):
    """The sum that ``rank`` waits in fails there."""

    rank: int


class Hear(NamedTuple):
    """``rank`` returns from what was decided."""

    rank: int


class Do(NamedTuple):
    """``rank`` carries out its next order."""

    rank: int


class Decide(NamedTuple):
    """The agreement, or the shrink, is decided; those in ``yes`` hear True."""

    yes: int


class Add(NamedTuple):
    """``rank`` has added its share, and enters barrier B."""

    rank: int


class Stop(NamedTuple):
    """``rank`` is stopped while it adds; everybody takes it for dead."""

    rank: int


class Wake(NamedTuple):
    """``rank`` wakes up, adds its share where it was doing so, and enters barrier B."""

    rank: int


class Read(NamedTuple):
    """The optimizer of ``rank`` has read the results."""

    rank: int


Move = Die | Complete | Fail | Hear | Do | Decide | Add | Stop | Wake | Read | Wish

SUMS = (SumBucket, AtBarrier, CloseStep, HandOver, ShareProgress, LoadCheckpoint, TakeChanges, Welcome)
"""What is carried out on the communicator, and may fail: a sum, but for :class:`Welcome`."""


def lowest(mask: int) -> int:
    """Return the lowest rank in ``mask``."""
    return (mask & -mask).bit_length() - 1


def living_ranks(workers: Sequence[Worker | None]) -> int:
    """Return the ranks in ``workers`` that are alive."""
    return sum(1 << rank for rank, worker in enumerate(workers) if worker is not None)


# ---------------------------------------------------------------------------------------------
# The protocols of all workers, each kept once


class Minds:
    """Protocols by number, equal ones only once, and what each answers to what."""

    def __init__(self, first: Protocol) -> None:
        self._protocols = [first]
        self._number: dict[tuple[object, ...], int] = {first.key(): 0}
        self._answers: dict[tuple[int, object], tuple[int, list[Action]]] = {}

    def handle(self, mind: int, event: Event) -> tuple[int, list[Action]]:
        """Return the number of the protocol after ``event``, and its orders."""
        known = tuple(sorted(event.progress.items())) if isinstance(event, ProgressKnown) else None
        key = (mind, event if known is None else known)
        if key not in self._answers:
            protocol = copy.copy(self._protocols[mind])
            try:
                orders = protocol.handle(event)
            except InternalError as error:
                msg = f"internal error: {error}"
                raise Violation(msg) from error
            except JobError:
                orders = [GiveUp()]
            self._answers[key] = (self._number_of(protocol), orders)
        return self._answers[key]

    def set_strategy(self, mind: int, strategy: Strategy) -> int:
        """Return the number of the protocol that decides by ``strategy`` from now on."""
        protocol = copy.copy(self._protocols[mind])
        protocol.set_strategy(strategy)
        return self._number_of(protocol)

    def _number_of(self, protocol: Protocol) -> int:
        number = self._number.setdefault(protocol.key(), len(self._protocols))
        if number == len(self._protocols):
            self._protocols.append(protocol)
        return number


# ---------------------------------------------------------------------------------------------
# Which moves there are


class Engine:
    """The rules of one world: which moves there are, and who may wait for ever."""

    def __init__(self, strategy: Strategy, world: World) -> None:
        if world.shared and (world.newcomers or world.changes):
            msg = "the sum through shared memory is explored among the same workers with the same settings"
            raise InternalError(msg)
        self.world = world
        self.strategies = (strategy, *world.changes)
        self.minds = Minds(world.make_protocol(strategy, world.buckets))

    def blank_state(self) -> State:
        """Return the state before anybody has started."""
        return State(
            workers=(self.newborn(0),) * self.world.workers + (None,) * self.world.newcomers,
            left=0,
            members=(1 << self.world.workers) - 1,
            failed=0,
            revokers=0,
            fenced=True,
            sums=(),
            log=(),
            published=0,
            published_taken=0,
            deaths_left=self.world.deaths,
            memory=first_memory(self.world.workers, self.world.buckets) if self.world.shared else Memory(),
            wishes=Wishes(unborn=((1 << self.world.newcomers) - 1) << self.world.workers),
        )

    def newborn(self, steps: int = JOINING) -> Worker:
        """Return a worker that has done nothing, with ``steps`` in its weights."""
        nothing = (0,) * self.world.buckets
        return Worker(mind=0, waits=Leave(), sums=0, steps=steps, group=0, inputs=0, have=nothing)

    def moves(self, state: State) -> list[Move]:
        """Return what can happen next."""
        living = living_ranks(state.workers)
        gone = state.members & ~living
        quiet = self.world.atomic and not (self.world.shared or state.deaths_left or gone or state.failed)
        wishes = self._wishes(state, living)
        moves: list[Move] = [Die(rank) for rank in ranks(state.wishes.waiting) if state.deaths_left]
        for rank in ranks(living):
            if state.deaths_left:
                moves.append(Die(rank))
            worker = state.workers[rank]
            assert worker is not None
            if isinstance(worker.waits, Returning):
                moves.append(Hear(rank))
            elif isinstance(worker.waits, Doing):
                moves.append(Do(rank))
            elif isinstance(worker.waits, SUMS):
                if self.can_complete(state, rank, worker):
                    moves.append(Complete(rank))
                if gone or state.revokers:
                    moves.append(Fail(rank))
            moves += self._memory_moves(state, rank, worker)
            if quiet and moves:
                return [*wishes, *moves[:1]]
        moves += [*wishes, *self._decisions(state, living, gone)]
        moves += [Wake(late.rank) for late in state.memory.late]
        return moves

    def _wishes(self, state: State, living: int) -> list[Wish]:
        """Return what may be wished now: where somebody hears of it, and nobody knows the result yet."""
        wishes = state.wishes
        may_ask = wishes.asked < len(self.world.changes)
        leavers = sum(1 << rank for rank in self.world.leavers) & living & ~wishes.told
        if not (wishes.unborn or leavers or may_ask):
            return []
        closing = [s for s in state.sums if isinstance(s.what[0], CloseStep) and s.entered == state.members]
        if any(this.result < 0 for this in closing):
            asks = [Wish(-1)] if may_ask else []
            first = wishes.unborn & -wishes.unborn  # newcomers are all alike
            return [*asks, *(Wish(rank) for rank in ranks(first | leavers))]
        all_hear = any(this.result & CHANGE for this in closing)
        return [Wish(rank) for rank in ranks(leavers) if all_hear or self._has_heard(state.workers[rank])]

    @staticmethod
    def _has_heard(worker: Worker | None) -> bool:
        return worker is not None and bool(worker.heard & CHANGE)

    def _memory_moves(self, state: State, rank: int, worker: Worker) -> list[Move]:
        moves: list[Move] = []
        if isinstance(worker.waits, Adding):
            moves.append(Add(rank))
            if self.world.late and state.deaths_left:
                moves.append(Stop(rank))
        if self.world.shared and state.memory.readers[rank]:
            moves.append(Read(rank))
        return moves

    def _decisions(self, state: State, living: int, gone: int) -> list[Move]:
        waits = [worker.waits for worker in state.workers if worker is not None]
        if waits and all(isinstance(order, Shrink) for order in waits):
            return [Decide(0)]
        if not waits or not all(isinstance(order, Agree) for order in waits):
            return []
        all_say_yes = all(isinstance(order, Agree) and order.flag for order in waits)
        decisions: list[Move] = [Decide(living)] if all_say_yes else [Decide(0)]
        if all_say_yes and gone:
            decisions.append(Decide(0))
            if not self.world.uniform:
                decisions += [Decide(living & ~(1 << rank)) for rank in ranks(living)]
        return decisions

    def is_stuck(self, state: State, moves: list[Move]) -> bool:
        """Return whether somebody is left for whom nothing is *sure* to happen."""
        living = living_ranks(state.workers)
        return bool(living) and not any(self._is_sure(state, living, move) for move in moves)

    def _is_sure(self, state: State, living: int, move: Move) -> bool:
        dead = state.members & ~living & ~state.left
        match move:
            case Die() | Stop() | Wake() | Wish():
                return False
            case Hear() | Do() | Add() | Read():
                return True
            case Decide():  # who left does not answer any more
                return not state.members & state.left
            case Complete() if not dead:
                return True
            case _:  # a revoke reaches everybody; a death is seen by one of those who wait
                return bool(state.revokers or (dead and not state.failed))

    def can_complete(self, state: State, rank: int, worker: Worker) -> bool:
        """Return whether the sum that ``rank`` waits in has all that ``rank`` needs."""
        if self.world.lying and isinstance(worker.waits, AtBarrier) and state.members & ~living_ranks(state.workers):
            return True
        needed = self.needed(state.members, rank, worker.waits)
        this = next((s for s in state.sums if s.number == worker.sums), None)
        return not needed & ~(1 << rank if this is None else this.entered)

    def needed(self, members: int, rank: int, order: Action) -> int:
        """Return who must have entered what ``order`` says before ``rank`` can complete it."""
        if self.is_rooted(order):
            return 1 << lowest(members)
        if isinstance(order, Welcome):
            newcomers = sum(1 << newcomer for newcomer in order.newcomers)
            return members & ~newcomers if newcomers & 1 << rank else 1 << rank
        return members

    def is_rooted(self, order: Action) -> bool:
        """Return whether ``order`` is a broadcast."""
        return isinstance(order, SumBucket) and order.bucket in self.world.rooted
