"""The abstract engine: what can happen next to workers, their communicator and their weights.

``abstract_state`` writes these down, ``explorer`` searches, ``abstract_draft`` says what each move changes. The workers are
driven by the real :class:`~holdfast.recovery.Protocol`; the engine is as nasty as its contract allows; the weights of a
body are the list of what was put into them.

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
- a worker has its new parts of a split model when their givers have begun to give; it fails and is done when it likes;
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

from holdfast.errors import InternalError, JobError
from holdfast.recovery import Protocol, Strategy
from holdfast.recovery.messages import (
    JOINING,
    Action,
    Agree,
    Event,
    Leave,
    Note,
    ProgressKnown,
    ReduceBucket,
    SendState,
    Shrink,
    VoteStep,
)
from model.abstract_members import FLIP, NEW_SETTINGS, Lapse, Wish, Wishes
from model.abstract_memory import Adding, AtBarrier, Memory, MemoryDraft, Violation, first_memory, ranks
from model.abstract_parts import ABSENT, EXCHANGES, Giving, Registry, concerned, needed_by
from model.abstract_state import (
    SUMS,
    Add,
    Begin,
    Begun,
    Complete,
    Compute,
    Computing,
    Decide,
    Die,
    Do,
    Doing,
    Fail,
    GiveUp,
    Hear,
    Move,
    Read,
    Returning,
    Spoil,
    State,
    Stop,
    Wake,
    Worker,
    World,
    living_ranks,
    lowest,
)

_JOINT = SUMS + EXCHANGES
"""What several take part in."""

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
        if world.split is not None and (world.shared or world.rooted or world.in_place):
            msg = "a split model is explored with exchanges, which are neither in shared memory nor broadcasts nor in place"
            raise InternalError(msg)
        if world.early and (world.shared or world.rooted or world.split is not None):
            msg = "sums that are begun early are explored as they are between hosts, and of a model that is not split"
            raise InternalError(msg)
        self.world = world
        self.strategies = (strategy, *world.changes)
        self.buckets = world.buckets if world.split is None else 0
        self.homes = None if world.split is None else Registry(world.split, world.lapses)
        first = world.make_protocol(strategy, self.buckets, split=world.split is not None)
        self.minds = Minds(first)
        self.no_memory = MemoryDraft(Memory(), world.without, keep_input=world.keep_input)
        self._leavers = sum(1 << rank for rank in world.leavers)
        self._is_wished_for = bool(world.newcomers or world.leavers or world.changes or world.flips)

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
            swaps=(),
            log=(),
            published=0,
            published_taken=0,
            deaths_left=self.world.deaths,
            memory=first_memory(self.world.workers, self.world.buckets) if self.world.shared else Memory(),
            wishes=Wishes(unborn=((1 << self.world.newcomers) - 1) << self.world.workers),
        )

    def newborn(self, steps: int = JOINING) -> Worker:
        """Return a worker that has done nothing, with ``steps`` in its weights."""
        parts = 0 if self.homes is None else self.homes.parts
        nothing, absent = (0,) * (self.buckets + parts), (ABSENT,) * parts
        return Worker(
            mind=0,
            waits=Leave(),
            sums=0,
            steps=steps,
            group=0,
            inputs=0,
            have=nothing,
            parts=absent,
            staged=absent,
        )

    def moves(self, state: State) -> list[Move]:
        """Return what can happen next."""
        living = living_ranks(state.workers)
        gone = state.members & ~living
        quiet = self.world.atomic and not (self.world.shared or state.deaths_left or gone or state.failed)
        wishes = self._wishes(state, living) if self._is_wished_for else []
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
            elif isinstance(worker.waits, Computing):
                moves += self._early_moves(state, rank, worker, gone)
            elif isinstance(worker.waits, _JOINT):
                if self.can_complete(state, rank, worker):
                    moves.append(Complete(rank))
                if gone or self._is_revoked(state, worker.waits):
                    moves.append(Fail(rank))
            if self.world.shared:
                moves += self._memory_moves(state, rank, worker)
            if quiet and moves:
                return [*wishes, *moves[:1]]
        moves += [*wishes, *self._decisions(state, living, gone)]
        moves += [Wake(late.rank) for late in state.memory.late]
        return moves

    def _early_moves(self, state: State, rank: int, worker: Worker, gone: int) -> list[Move]:
        """Return what may happen while ``rank`` computes: its thread has one sum after the other, until one fails."""
        moves: list[Move] = [Compute(rank)]
        if worker.thread is Begun.NOTHING and worker.uncounted < self.buckets - 1:
            moves.append(Begin(rank))
        if state.deaths_left and (worker.uncounted or worker.thread is not Begun.NOTHING):
            moves.append(Spoil(rank))
        if worker.thread is Begun.WAITS and self.can_complete(state, rank, worker):
            moves.append(Complete(rank))
        if worker.thread is Begun.WAITS and (gone or state.revokers):
            moves.append(Fail(rank))
        return moves

    def _is_revoked(self, state: State, order: Action) -> bool:
        """Return whether a revoke may reach whoever waits in ``order``."""
        reaches = not isinstance(order, EXCHANGES) or Lapse.REVOKES_HALF not in self.world.lapses
        return bool(state.revokers) and reaches

    def _wishes(self, state: State, living: int) -> list[Wish]:
        """Return what may be wished now: where somebody hears of it, and nobody knows the result yet."""
        wishes = state.wishes
        may_ask, may_flip = wishes.asked < len(self.world.changes), wishes.flips < self.world.flips
        leavers = self._leavers & living & ~wishes.told
        if not (wishes.unborn or leavers or may_ask or may_flip):
            return []
        closing = [s for s in state.sums if isinstance(s.what[0], VoteStep) and s.entered == state.members]
        if any(this.result < 0 for this in closing):
            asks = [Wish(NEW_SETTINGS)] * may_ask + [Wish(FLIP)] * (may_flip and not wishes.hidden)
            first = wishes.unborn & -wishes.unborn  # newcomers are all alike
            return [*asks, *(Wish(rank) for rank in ranks(first | leavers))]
        all_hear = any(this.result & Note.CHANGE for this in closing)
        return [Wish(rank) for rank in ranks(leavers) if all_hear or self._has_heard(state.workers[rank])]

    @staticmethod
    def _has_heard(worker: Worker | None) -> bool:
        return worker is not None and bool(worker.heard & Note.CHANGE)

    def _memory_moves(self, state: State, rank: int, worker: Worker) -> list[Move]:
        moves: list[Move] = []
        if isinstance(worker.waits, Adding):
            moves.append(Add(rank))
            if self.world.late and state.deaths_left:
                moves.append(Stop(rank))
        if state.memory.readers[rank]:
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
            case Hear() | Do() | Add() | Read() | Compute():
                return True
            case Begin() | Spoil():
                return False
            case Decide():  # who left does not answer any more
                return not state.members & state.left
            case Complete(rank) | Fail(rank) if isinstance(order := self._waits(state, rank), EXCHANGES):
                if not dead & concerned(order) and isinstance(move, Complete):
                    return True
                return self._is_revoked(state, order) or bool(dead & concerned(order) and not state.failed)
            case Complete() if not dead:
                return True
            case _:  # a revoke reaches everybody; a death is seen by one of those who wait
                return bool(state.revokers or (dead and not state.failed))

    @staticmethod
    def _waits(state: State, rank: int) -> Action:
        worker = state.workers[rank]
        assert worker is not None
        return worker.waits

    def can_complete(self, state: State, rank: int, worker: Worker) -> bool:
        """Return whether what ``rank`` waits in has all that ``rank`` needs."""
        if isinstance(order := worker.waits, EXCHANGES):
            swap = next((s for s in state.swaps if s.order == order), None)
            return swap is not None and not needed_by(rank, order) & ~swap.entered
        if self.world.lying and isinstance(worker.waits, AtBarrier) and state.members & ~living_ranks(state.workers):
            return True
        needed = self.needed(state.members, rank, worker.waits)
        this = next((s for s in state.sums if s.number == worker.sums), None)
        return not needed & ~(1 << rank if this is None else this.entered)

    def needed(self, members: int, rank: int, order: Action) -> int:
        """Return who must have entered what ``order`` says before ``rank`` can complete it."""
        if self.is_rooted(order):
            return 1 << lowest(members)
        if isinstance(order, SendState):
            newcomers = sum(1 << newcomer for newcomer in order.newcomers)
            return members & ~newcomers if newcomers & 1 << rank else 1 << rank
        if isinstance(order, Giving):
            return 1 << rank | self._givers(order, members, rank)
        return members

    def _givers(self, order: Giving, members: int, taker: int) -> int:
        assert self.homes is not None
        return sum(
            1 << giver for giver in {gift.giver for gift in self.homes.gifts(order, members) if gift.taker == taker}
        )

    def is_rooted(self, order: Action) -> bool:
        """Return whether ``order`` is a broadcast."""
        return isinstance(order, ReduceBucket) and order.bucket in self.world.rooted
