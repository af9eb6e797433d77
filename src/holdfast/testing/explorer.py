"""Try everything that can go wrong: an explicit-state explorer for the recovery protocol and for strategies.

It drives the real :class:`~holdfast.recovery.Protocol`, one per worker, over a model of an engine that is as
nasty as its contract allows, and of a body whose weights are the list of what was put into them.

The engine:

- a worker dies at any point, also in recovery; so may the next one;
- a sum completes where it likes, once everybody has *entered* it, and fails where it likes, once a member is dead
  or the communicator is revoked. Of those who wait on a communicator with a dead member only one is sure to see
  it; the others wait until it revokes. A revoke reaches them one by one, late, and is lost if the revoker dies;
- ``Agree`` returns when all living members have called it, the same everywhere. If a member is dead it is False,
  or not: the death, and the dead one's flag, may or may not count;
- ``Shrink`` returns a group of all who were alive, so that one of them may be dead in it;
- a worker that left looks dead, or blocks those who need it.

Checked in every run: whoever waits is answered; nobody meets a ``Shrink`` with an ``Agree`` or a revoke; nobody adds
up gradients of different attempts; replicas are equal as far as they go and at most one step apart; what was
published is in everybody's history; everybody ends at the last step, or saves and stops. Unless
the world is lossy, nothing may be missing from a step.

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
- *Once no death is left and no trace of one is on the communicator,* the order of moves makes no difference: one is tried.

``World(atomic=False)`` takes all of this apart, one order a move, at some cost; the verdicts are the same.
What two attempts of the same workers at the same step compute is the same to the bit, so they count as one attempt.
Steps that are in everybody's weights are forgotten: there is nobody left to disagree about them.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.errors import InternalError
from holdfast.events import (
    LOADING,
    ActDone,
    Action,
    Agree,
    Agreed,
    ApplyStep,
    BucketSummed,
    CheckpointLoaded,
    CloseStep,
    Computed,
    ComputeStep,
    DiscardStep,
    Event,
    HandedOver,
    HandOver,
    Leave,
    LoadCheckpoint,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    RanOut,
    Revoke,
    Revoked,
    SaveAndStop,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    StepClosed,
    SumBucket,
)
from holdfast.recovery import Protocol, Strategy

Payload = int | Progress
"""What one worker brings to a sum, as far as others care."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an exploration found.

    Args:
        states: Different states that were seen.
        violation: What went wrong, its kind before the colon; None if nothing did.
        trace: How to get there, one move a line, each with what the workers wait for after it.
    """

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "no violation" if self.violation is None else self.violation
        return "\n".join([f"{verdict} ({self.states} states)", *self.trace])


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
    make_protocol: Callable[[Strategy, int], Protocol] = Protocol


def explore(strategy: Strategy, world: World, *, limit: int = 2_000_000) -> Result:
    """Try every run; return a shortest one that breaks a promise, if there is one.

    Args:
        strategy: Under test. It must be pure; all workers share it.
        world: Where it is tried.
        limit: The most states to look at.

    Raises:
        InternalError: if there are more states than ``limit``.
    """
    engine = _Engine(strategy, world)
    start = engine.start()
    came_from: dict[_State, tuple[_State, _Move] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moves = engine.moves(state)
        if engine.is_stuck(state, moves):
            return Result(states=len(came_from), violation=_STUCK, trace=_trace(engine, came_from, state))
        for move in moves:
            try:
                after = engine.after(state, move)
            except _Violation as found:
                trace = (*_trace(engine, came_from, state), engine.describe_move(state, move))
                return Result(states=len(came_from), violation=str(found), trace=trace)
            if after not in came_from:
                came_from[after] = (state, move)
                queue.append(after)
        if len(came_from) > limit:
            msg = f"more than {limit} states: take fewer workers, deaths, steps or buckets"
            raise InternalError(msg)
    return Result(states=len(came_from))


def walk(strategy: Strategy, world: World, rng: random.Random, *, death_rate: float = 0.02) -> Result:
    """Try one run at random, of a job that is too large to try every one.

    Args:
        strategy: Under test.
        world: Where it is tried.
        rng: Decides everything.
        death_rate: How likely the next move is a death, while there may be one.
    """
    engine = _Engine(strategy, world)
    state = engine.start()
    trace = [_line("all start", engine, state)]
    while moves := engine.moves(state):
        if engine.is_stuck(state, moves):
            break
        dying = [move for move in moves if isinstance(move, _Die)]
        others = [move for move in moves if not isinstance(move, _Die)]
        move = rng.choice(dying if dying and (not others or rng.random() < death_rate) else others)
        done = engine.describe_move(state, move)
        try:
            state = engine.after(state, move)
        except _Violation as found:
            return Result(states=len(trace), violation=str(found), trace=(*trace, done))
        trace.append(_line(done, engine, state))
    stuck = engine.is_stuck(state, moves)
    return Result(states=len(trace), violation=_STUCK if stuck else None, trace=tuple(trace))


_STUCK = "deadlock: somebody waits for ever"


class _Violation(Exception):
    """A promise is broken."""


# ---------------------------------------------------------------------------------------------
# What there is. Sets of workers, and of buckets, are bit masks.


@dataclass(frozen=True, slots=True)
class _Returning(Action):
    """Not an order: the agreement or the shrink has been decided, and the worker is about to hear."""

    event: Event


@dataclass(frozen=True, slots=True)
class _Doing(Action):
    """Not an order: the worker has orders, and is about to carry out the first of them."""

    orders: tuple[Action, ...]


class _Worker(NamedTuple):
    """A living worker.

    Args:
        mind: Its protocol, by number.
        waits: The order that it waits in.
        sums: Sums that it has entered on this communicator.
        steps: Steps in its weights, LOADING while they are being replaced.
        group: Who shared the mini-batch whose gradients it has, 0 if it has none.
        inputs: Buckets whose own gradient it still has.
        have: By bucket, whose gradients are in the sum that it holds, 0 if it holds none.
        saved: It was ordered to save and stop.
        told: Steps that it was told are stable, if that is checked.
    """

    mind: int
    waits: Action
    sums: int
    steps: int
    group: int
    inputs: int
    have: tuple[int, ...]
    saved: bool
    told: int


class _Sum(NamedTuple):
    """A sum that somebody can still complete: its number on the communicator, what it is, and who brought what."""

    number: int
    what: tuple[object, ...]
    entered: int
    brought: tuple[tuple[int, Payload], ...]


class _State(NamedTuple):
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
        deaths_left: How many may still die.
    """

    workers: tuple[_Worker | None, ...]
    left: int
    members: int
    failed: int
    revokers: int
    fenced: bool
    sums: tuple[_Sum, ...]
    log: tuple[tuple[int, ...] | None, ...]
    published: int
    deaths_left: int


class _Die(NamedTuple):
    rank: int


class _Complete(NamedTuple):
    rank: int


class _Fail(NamedTuple):
    rank: int


class _Hear(NamedTuple):
    rank: int


class _Do(NamedTuple):
    rank: int


class _Decide(NamedTuple):
    """The agreement, or the shrink, is decided; those in ``yes`` hear True."""

    yes: int


_Move = _Die | _Complete | _Fail | _Hear | _Do | _Decide

_SUMS = (SumBucket, CloseStep, HandOver, ShareProgress, LoadCheckpoint)


def _ranks(mask: int) -> Iterator[int]:
    rank = 0
    while mask:
        if mask & 1:
            yield rank
        mask >>= 1
        rank += 1


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _living(state: _State) -> int:
    return sum(1 << rank for rank, worker in enumerate(state.workers) if worker is not None)


# ---------------------------------------------------------------------------------------------
# The protocols of all workers, each kept once


class _Minds:
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
                raise _Violation(msg) from error
            number = self._number.setdefault(protocol.key(), len(self._protocols))
            if number == len(self._protocols):
                self._protocols.append(protocol)
            self._answers[key] = (number, orders)
        return self._answers[key]


# ---------------------------------------------------------------------------------------------
# The engine: which moves there are, and what they do


class _Engine:
    def __init__(self, strategy: Strategy, world: World) -> None:
        self.world = world
        self.minds = _Minds(world.make_protocol(strategy, world.buckets))

    def start(self) -> _State:
        """Return the state in which everybody has started."""
        everybody = (1 << self.world.workers) - 1
        newborn = _Worker(
            mind=0,
            waits=Leave(),
            sums=0,
            steps=0,
            group=0,
            inputs=0,
            have=(0,) * self.world.buckets,
            saved=False,
            told=0,
        )
        state = _State(
            workers=(newborn,) * self.world.workers,
            left=0,
            members=everybody,
            failed=0,
            revokers=0,
            fenced=True,
            sums=(),
            log=(),
            published=0,
            deaths_left=self.world.deaths,
        )
        draft = _Draft(self, state)
        for rank in range(self.world.workers):
            draft.tell(rank, Started())
        return draft.finish()

    def moves(self, state: _State) -> list[_Move]:
        """Return what can happen next."""
        living = _living(state)
        gone = state.members & ~living
        quiet = self.world.atomic and not (state.deaths_left or gone or state.failed)
        moves: list[_Move] = []
        for rank in _ranks(living):
            if state.deaths_left:
                moves.append(_Die(rank))
            worker = state.workers[rank]
            assert worker is not None
            if isinstance(worker.waits, _Returning):
                moves.append(_Hear(rank))
            elif isinstance(worker.waits, _Doing):
                moves.append(_Do(rank))
            elif isinstance(worker.waits, _SUMS):
                if self.can_complete(state, rank, worker):
                    moves.append(_Complete(rank))
                if gone or state.revokers:
                    moves.append(_Fail(rank))
            if quiet and moves:
                return moves[:1]
        moves += self._decisions(state, living, gone)
        return moves

    def _decisions(self, state: _State, living: int, gone: int) -> list[_Move]:
        waits = [worker.waits for worker in state.workers if worker is not None]
        if waits and all(isinstance(order, Shrink) for order in waits):
            return [_Decide(0)]
        if not waits or not all(isinstance(order, Agree) for order in waits):
            return []
        all_say_yes = all(isinstance(order, Agree) and order.flag for order in waits)
        decisions: list[_Move] = [_Decide(living)] if all_say_yes else [_Decide(0)]
        if all_say_yes and gone:
            decisions.append(_Decide(0))
            if not self.world.uniform:
                decisions += [_Decide(living & ~(1 << rank)) for rank in _ranks(living)]
        return decisions

    def is_stuck(self, state: _State, moves: list[_Move]) -> bool:
        """Return whether somebody is left for whom nothing is *sure* to happen."""
        living = _living(state)
        return bool(living) and not any(self._is_sure(state, living, move) for move in moves)

    def _is_sure(self, state: _State, living: int, move: _Move) -> bool:
        dead = state.members & ~living & ~state.left
        match move:
            case _Die():
                return False
            case _Hear() | _Do():
                return True
            case _Decide():  # who left does not answer any more
                return not state.members & state.left
            case _Complete() if not dead:
                return True
            case _:  # a revoke reaches everybody; a death is seen by one of those who wait
                return bool(state.revokers or (dead and not state.failed))

    def can_complete(self, state: _State, rank: int, worker: _Worker) -> bool:
        """Return whether the sum that ``rank`` waits in has all that ``rank`` needs."""
        this = next((s for s in state.sums if s.number == worker.sums), None)
        if this is None:
            return False
        if self.is_rooted(worker.waits):
            root = _lowest(state.members)
            return rank == root or bool(this.entered & 1 << root)
        return this.entered == state.members

    def is_rooted(self, order: Action) -> bool:
        """Return whether ``order`` is a broadcast."""
        return isinstance(order, SumBucket) and order.bucket in self.world.rooted

    def after(self, state: _State, move: _Move) -> _State:
        """Return the state after ``move``."""
        draft = _Draft(self, state)
        match move:
            case _Die(rank):
                draft.die(rank)
            case _Complete(rank):
                draft.complete(rank)
            case _Fail(rank):
                draft.fail(rank)
            case _Hear(rank):
                draft.hear(rank)
            case _Do(rank):
                draft.do(rank)
            case _Decide(yes):
                draft.decide(yes)
        return draft.finish()

    def describe_move(self, state: _State, move: _Move) -> str:
        """Return ``move`` in words."""
        match move:
            case _Die(rank):
                return f"{rank} dies in {_show(state.workers[rank])}"
            case _Complete(rank):
                return f"{rank} completes {_show(state.workers[rank])}"
            case _Fail(rank):
                return f"{rank} fails in {_show(state.workers[rank])}"
            case _Hear(rank):
                return f"{rank} hears {_show(state.workers[rank])}"
            case _Do(rank):
                return f"{rank} does {_show(state.workers[rank])}"
            case _Decide(yes):
                return f"decided, True at {list(_ranks(yes))}"

    def describe_state(self, state: _State) -> str:
        """Return what everybody waits for."""
        return ", ".join(
            f"{rank}: {'left' if state.left & 1 << rank else _show(worker)}"
            for rank, worker in enumerate(state.workers)
        )


def _show(worker: _Worker | None) -> str:
    if worker is None:
        return "dead"
    match worker.waits:
        case _Returning(event=event):
            return f"({event})"
        case _Doing(orders=orders):
            return f"({', '.join(map(_show_order, orders))})"
        case order:
            return _show_order(order)


def _show_order(order: Action) -> str:
    match order:
        case ShareProgress(progress=Progress(completed=completed)):
            return f"ShareProgress({completed})"
        case Agree(flag=flag):
            return f"Agree({flag:d})"
        case order:
            values = ", ".join(str(getattr(order, field.name)) for field in dataclasses.fields(order))
            return f"{type(order).__name__}({values})"


def _line(move: str, engine: _Engine, state: _State) -> str:
    return f"{move:<42} | {engine.describe_state(state)} | published {state.published}"


def _trace(engine: _Engine, came_from: dict[_State, tuple[_State, _Move] | None], state: _State) -> tuple[str, ...]:
    lines: list[str] = []
    while (origin := came_from[state]) is not None:
        before, move = origin
        lines.append(_line(engine.describe_move(before, move), engine, state))
        state = before
    lines.append(_line("all start", engine, state))
    return tuple(reversed(lines))


class _Draft:
    """A state that is being changed by one move."""

    def __init__(self, engine: _Engine, state: _State) -> None:
        self._engine = engine
        self._workers = list(state.workers)
        self._left = state.left
        self._members = state.members
        self._failed = state.failed
        self._revokers = state.revokers
        self._fenced = state.fenced
        self._sums = {s.number: s for s in state.sums}
        self._log = list(state.log)
        self._published = state.published
        self._deaths_left = state.deaths_left

    # -- moves

    def die(self, rank: int) -> None:
        """Stop ``rank``."""
        self._workers[rank] = None
        self._failed &= ~(1 << rank)
        self._revokers &= ~(1 << rank)
        self._deaths_left -= 1

    def complete(self, rank: int) -> None:
        """Let ``rank`` have the result of the sum that it waits in."""
        worker = self._worker(rank)
        this = self._sums[worker.sums]
        if not self._engine.is_rooted(worker.waits):
            self._fenced = True  # everybody has entered it, so everybody is back from the shrink
        match worker.waits:
            case SumBucket(bucket=bucket):
                self._hold(rank, bucket, self._members)
                self.tell(rank, BucketSummed())
            case CloseStep():
                self.tell(rank, StepClosed())
            case HandOver(step=step, bucket=bucket):
                self._hold(rank, bucket, _number(this.brought[0]))
                self.tell(rank, HandedOver(step, bucket))
            case ShareProgress():
                everybody = {who: _progress(payload) for who, payload in this.brought}
                self.tell(rank, ProgressKnown(everybody, self._engine.world.buckets))
            case LoadCheckpoint():
                self._load(rank, _number(this.brought[0]))

    def fail(self, rank: int) -> None:
        """Let the sum that ``rank`` waits in fail there."""
        worker = self._worker(rank)
        self._failed |= 1 << rank
        if self._engine.world.in_place and isinstance(worker.waits, SumBucket):
            self._set(rank, inputs=worker.inputs & ~(1 << worker.waits.bucket))
        self.tell(rank, PeerLost())

    def hear(self, rank: int) -> None:
        """Let ``rank`` return from what was decided."""
        returning = self._worker(rank).waits
        assert isinstance(returning, _Returning)
        self.tell(rank, returning.event)

    def decide(self, yes: int) -> None:
        """Decide the agreement or the shrink that all the living wait in."""
        living = self._living()
        shrinking = isinstance(self._worker(_lowest(living)).waits, Shrink)
        if shrinking:
            self._members, self._failed, self._revokers, self._sums, self._fenced = living, 0, 0, {}, False
        else:
            self._fenced = True
        for rank in _ranks(living):
            event = Shrunk() if shrinking else Agreed(bool(yes & 1 << rank))
            if shrinking:
                self._set(rank, sums=0)
            if self._engine.world.atomic and not self._is_seen_outside(rank, event):
                self.tell(rank, event)
            else:
                self._set(rank, waits=_Returning(event))

    def _is_seen_outside(self, rank: int, event: Event) -> bool:
        _, orders = self._engine.minds.handle(self._worker(rank).mind, event)
        return any(isinstance(order, Publish | Leave) for order in orders)

    # -- what a worker does

    def tell(self, rank: int, event: Event) -> None:
        """Let ``rank`` hear ``event`` and do what its protocol says, up to the next thing that it waits for."""
        mind, orders = self._engine.minds.handle(self._worker(rank).mind, event)
        self._set(rank, mind=mind, waits=_Doing(tuple(orders)))
        while self._engine.world.atomic and self._is_doing(rank):
            self.do(rank)

    def do(self, rank: int) -> None:
        """Let ``rank`` carry out its next order."""
        doing = self._worker(rank).waits
        assert isinstance(doing, _Doing)
        order, *rest = doing.orders
        self._set(rank, waits=_Doing(tuple(rest)))
        answer = self._carry_out(rank, order)
        if answer is not None:
            self.tell(rank, answer)

    def _is_doing(self, rank: int) -> bool:
        worker = self._workers[rank]
        return worker is not None and isinstance(worker.waits, _Doing)

    def _carry_out(self, rank: int, order: Action) -> Event | None:
        match order:
            case Publish(step=step):
                self._publish(rank, step)
            case ComputeStep(step=step):
                return self._compute(rank, step)
            case ApplyStep(step=step):
                return self._apply(rank, step)
            case DiscardStep(step=step):
                return self._discard(rank, step)
            case SaveAndStop():
                self._set(rank, saved=True)
                return ActDone()
            case Revoke():
                return self._revoke(rank)
            case Agree() | Shrink():
                self._set(rank, waits=order)
            case Leave():
                self._leave(rank)
            case _:
                self._enter(rank, order)
        return None

    def _compute(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "computes")
        if step >= self._engine.world.steps:
            return RanOut()
        everything = (1 << self._engine.world.buckets) - 1
        self._set(rank, group=self._members, inputs=everything, have=(0,) * self._engine.world.buckets)
        return Computed()

    def _discard(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "discards")
        self._set(rank, group=0, inputs=0, have=(0,) * self._engine.world.buckets)
        return ActDone()

    def _apply(self, rank: int, step: int) -> Event:
        self._check_step(rank, step, "applies")
        worker = self._worker(rank)
        self._check_have(rank, worker, "applies")
        for bucket, whose in enumerate(worker.have):
            must_be_in = self._living() if self._engine.world.lossy else worker.group
            if whose & ~worker.group or must_be_in & ~whose:
                msg = (
                    f"gradients are missing: {rank} applies step {step}, bucket {bucket}, of {list(_ranks(whose))} only"
                )
                raise _Violation(msg)
        self._write(rank, step, (worker.group, *worker.have))
        self._set(rank, steps=step + 1, group=0, inputs=0, have=(0,) * self._engine.world.buckets)
        for other in self._workers:
            if other is not None and other.steps != LOADING and abs(other.steps - (step + 1)) > 1:
                msg = f"more than one apart: {rank} has {step + 1} steps, somebody has {other.steps}"
                raise _Violation(msg)
        return StepApplied()

    def _write(self, rank: int, step: int, what: tuple[int, ...]) -> None:
        if len(self._log) == step:
            self._log.append(what)
        elif self._log[step] != what:
            kind = "published state is not in the history" if step < self._published else "replicas differ"
            msg = f"{kind}: {rank} puts something else into step {step}"
            raise _Violation(msg)

    def _publish(self, rank: int, step: int) -> None:
        if self._worker(rank).steps <= step:
            msg = f"published state is not in the history: {rank} publishes step {step} and does not have it"
            raise _Violation(msg)
        if self._engine.world.all_publish:
            self._set(rank, told=max(self._worker(rank).told, step + 1))
        if (step + 1) % self._engine.world.checkpoint_every == 0:
            self._published = max(self._published, step + 1)

    def _revoke(self, rank: int) -> Event:
        if not self._fenced and self._living() != 1 << rank:
            msg = f"revoke meets shrink: {rank} revokes what others may still be building"
            raise _Violation(msg)
        self._revokers |= 1 << rank
        return Revoked()

    def _leave(self, rank: int) -> None:
        worker = self._worker(rank)
        if worker.steps != self._engine.world.steps and not worker.saved:
            msg = f"left too early: {rank} leaves after {worker.steps} steps of {self._engine.world.steps}"
            raise _Violation(msg)
        if worker.steps < self._published:
            msg = f"published state is not in the history: {rank} leaves without it"
            raise _Violation(msg)
        self._published = worker.steps  # its result is out
        self._workers[rank] = None
        self._failed &= ~(1 << rank)
        self._revokers &= ~(1 << rank)
        self._left |= 1 << rank

    def _load(self, rank: int, steps: int) -> None:
        if steps < self._published:
            msg = f"published state is not in the history: {rank} loads step {steps}"
            raise _Violation(msg)
        self._set(rank, steps=steps, group=0, inputs=0, have=(0,) * self._engine.world.buckets)
        self.tell(rank, CheckpointLoaded(steps))

    def _hold(self, rank: int, bucket: int, whose: int) -> None:
        worker = self._worker(rank)
        have = (*worker.have[:bucket], whose, *worker.have[bucket + 1 :])
        self._set(rank, have=have, inputs=worker.inputs & ~(1 << bucket))  # known, so its input is dropped

    # -- sums

    def _enter(self, rank: int, order: Action) -> None:
        worker = self._worker(rank)
        brought: Payload | None = None
        match order:
            case SumBucket(bucket=bucket):
                if not worker.inputs & 1 << bucket:
                    msg = f"rubbish is summed: {rank} has no gradient of bucket {bucket} any more"
                    raise _Violation(msg)
            case CloseStep(step=step):
                if step < self._engine.world.steps:
                    self._check_have(rank, worker, "closes")
                if self._engine.world.all_publish and worker.told < step:
                    msg = f"never published: {rank} closes step {step}, and has not published all before"
                    raise _Violation(msg)
            case HandOver(bucket=bucket, source=source):
                brought = worker.have[bucket] if source == rank else None
                if brought == 0:
                    msg = f"bucket missing: {rank} hands over bucket {bucket} and does not hold it"
                    raise _Violation(msg)
            case ShareProgress(progress=progress):
                brought = progress
            case LoadCheckpoint():
                brought = self._published if rank == _lowest(self._members) else None
                worker = worker._replace(steps=LOADING, group=0, inputs=0, have=(0,) * self._engine.world.buckets)
        # What is added up must be gradients of the same attempt of the same step on the same weights.
        what = (type(order),) if isinstance(order, ShareProgress) else (order, worker.steps, worker.group)
        number = worker.sums + 1
        this = self._sums.get(number) or _Sum(number, what, 0, ())
        if this.what != what:
            msg = f"rubbish is summed: {rank} enters {what}, others are in {this.what}"
            raise _Violation(msg)
        mine = () if brought is None else ((rank, brought),)
        self._sums[number] = this._replace(entered=this.entered | 1 << rank, brought=(*this.brought, *mine))
        self._workers[rank] = worker._replace(waits=order, sums=number)

    def _is_of_use(self, this: _Sum) -> bool:
        """Return whether anybody can still complete ``this``."""
        never_again = self._members & ~self._living() | self._failed
        needed = self._members
        for rank in _ranks(self._living() & ~self._failed):
            worker = self._worker(rank)
            if worker.sums == this.number and self._engine.is_rooted(worker.waits):
                needed = 1 << _lowest(self._members)
        if needed & ~this.entered & never_again:
            return False
        for rank in _ranks(self._living() & ~self._failed):
            worker = self._worker(rank)
            waits_in_it = worker.sums == this.number and isinstance(worker.waits, _SUMS)
            if worker.sums < this.number or waits_in_it:
                return True
        return False

    # -- the end of a move

    def finish(self) -> _State:
        """Let everything happen that the move makes happen at once; forget what makes no difference any more."""
        while (living := self._living()) and self._decides_at_once(living):
            self.decide(0)
        in_weights = [worker.steps for worker in self._workers if worker is not None]
        kept = max([self._published, *in_weights])
        everybody_has = min(in_weights, default=0)
        log = [None if step < everybody_has else what for step, what in enumerate(self._log[:kept])]
        sums = (this for this in sorted(self._sums.values()) if self._is_of_use(this))
        return _State(
            workers=tuple(self._workers),
            left=self._left,
            members=self._members,
            failed=self._failed,
            revokers=self._revokers,
            fenced=self._fenced,
            sums=tuple(this._replace(brought=tuple(sorted(this.brought, key=lambda b: b[0]))) for this in sums),
            log=tuple(log),
            published=self._published,
            deaths_left=self._deaths_left,
        )

    def _decides_at_once(self, living: int) -> bool:
        waits = [self._worker(rank).waits for rank in _ranks(living)]
        shrinking = [isinstance(order, Shrink) for order in waits]
        if any(shrinking) and any(isinstance(order, Agree) for order in waits):
            msg = f"agree meets shrink: {waits}"
            raise _Violation(msg)
        if not self._engine.world.atomic or self._members & self._left:
            return False
        if all(shrinking):
            return True
        return all(isinstance(order, Agree) for order in waits) and Agree(flag=False) in waits

    # -- looking things up

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers[rank]
        assert worker is not None
        return worker

    def _set(self, rank: int, **fields: Any) -> None:
        self._workers[rank] = self._worker(rank)._replace(**fields)

    def _living(self) -> int:
        return sum(1 << rank for rank, worker in enumerate(self._workers) if worker is not None)

    def _check_step(self, rank: int, step: int, does: str) -> None:
        steps = self._worker(rank).steps
        if steps != step:
            msg = f"wrong step: {rank} {does} step {step} with {steps} steps in its weights"
            raise _Violation(msg)

    def _check_have(self, rank: int, worker: _Worker, does: str) -> None:
        if 0 in worker.have:
            msg = f"bucket missing: {rank} {does} step {worker.steps} without bucket {worker.have.index(0)}"
            raise _Violation(msg)


def _number(brought: tuple[int, Payload]) -> int:
    payload = brought[1]
    assert isinstance(payload, int)
    return payload


def _progress(payload: Payload) -> Progress:
    assert isinstance(payload, Progress)
    return payload
