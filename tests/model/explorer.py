"""Try everything that can go wrong: an explicit-state explorer for the recovery protocol and for strategies.

It drives the real :class:`~holdfast.recovery.Protocol`, one per worker, over an abstract engine. This file holds the
search, which is every run or one at random, and the trace of what it finds. ``abstract_state`` says what there is,
``abstract_engine`` what can happen next, ``abstract_draft`` what a move changes, ``abstract_sums`` what is summed and
``abstract_work`` what a worker does by itself, these three with the promises that are checked; ``abstract_members`` who wants
to come or leave, ``abstract_memory`` what lies in shared memory, ``abstract_parts`` and ``abstract_exchanges`` how a model
is split over the workers.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import InternalError
from holdfast.recovery import Strategy
from holdfast.recovery.messages import Action, Agree, Progress, ShareProgress
from model.abstract_draft import first_state, state_after
from model.abstract_engine import Engine
from model.abstract_members import FLIP, NEW_SETTINGS, Lapse, Wish
from model.abstract_memory import Adding, AtBarrier, Rule, Violation, ranks
from model.abstract_parts import Split
from model.abstract_state import (
    Add,
    Begin,
    Complete,
    Compute,
    Decide,
    Die,
    Do,
    Doing,
    Fail,
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
)

__all__ = ["Lapse", "Result", "Rule", "Split", "World", "explore", "walk"]

_STUCK = "deadlock: somebody waits for ever"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an exploration found.

    Args:
        states: Different states that were seen.
        violation: What went wrong, its kind before the colon; None if nothing did.
        path: How to get there: each move, None before the first, with the state after it, None if that was not reached.
    """

    states: int
    violation: str | None = None
    path: tuple[tuple[Move | None, State | None], ...] = ()

    @property
    def trace(self) -> tuple[str, ...]:
        """The path in words, one move a line, each with what the workers wait for after it."""
        return tuple(_lines(self.path))

    @property
    def end(self) -> State:
        """The last state."""
        return next(state for _, state in reversed(self.path) if state is not None)

    def __str__(self) -> str:
        verdict = "no violation" if self.violation is None else self.violation
        return "\n".join([f"{verdict} ({self.states} states)", *self.trace])


def explore(strategy: Strategy, world: World, *, limit: int = 2_000_000) -> Result:
    """Try every run; return a shortest one that breaks a promise, if there is one.

    Args:
        strategy: Under test. It must be pure; all workers share it.
        world: Where it is tried.
        limit: The most states to look at.

    Raises:
        InternalError: if there are more states than ``limit``.
    """
    engine = Engine(strategy, world)
    start = first_state(engine)
    came_from: dict[State, tuple[State, Move] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moves = engine.moves(state)
        if engine.is_stuck(state, moves):
            return Result(states=len(came_from), violation=_STUCK, path=_path(came_from, state))
        for move in moves:
            try:
                after = state_after(engine, state, move)
            except Violation as found:
                path = (*_path(came_from, state), (move, None))
                return Result(states=len(came_from), violation=str(found), path=path)
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
    engine = _engine(strategy, world)
    state = first_state(engine)
    path: list[tuple[Move | None, State | None]] = [(None, state)]
    while moves := engine.moves(state):
        if engine.is_stuck(state, moves):
            break
        dying = [move for move in moves if isinstance(move, Die | Stop)]
        others = [move for move in moves if not isinstance(move, Die | Stop)]
        move = rng.choice(dying if dying and (not others or rng.random() < death_rate) else others)
        try:
            state = state_after(engine, state, move)
        except Violation as found:
            return Result(states=len(path), violation=str(found), path=(*path, (move, None)))
        path.append((move, state))
    stuck = engine.is_stuck(state, moves)
    return Result(states=len(path), violation=_STUCK if stuck else None, path=tuple(path))


@functools.lru_cache(maxsize=4)
def _engine(strategy: Strategy, world: World) -> Engine:
    """Return the rules of ``world``, with what the protocols have answered in runs before."""
    return Engine(strategy, world)


# ---------------------------------------------------------------------------------------------
# Traces: moves and states in words


def _path(came_from: dict[State, tuple[State, Move] | None], state: State) -> tuple[tuple[Move | None, State], ...]:
    path: list[tuple[Move | None, State]] = []
    while (origin := came_from[state]) is not None:
        before, move = origin
        path.append((move, state))
        state = before
    return ((None, state), *reversed(path))


def _lines(path: tuple[tuple[Move | None, State | None], ...]) -> Iterator[str]:
    for (_, before), (move, state) in zip([(None, None), *path], path, strict=False):
        done = "all start" if move is None or before is None else _describe_move(before, move)
        yield done if state is None else f"{done:<42} | {_describe_state(state)} | published {state.published}"


def _describe_move(state: State, move: Move) -> str:
    match move:
        case Die(rank) if state.wishes.waiting & 1 << rank:
            return f"{rank} dies before it is admitted"
        case Die(rank):
            return f"{rank} dies in {_show(state.workers[rank])}"
        case Complete(rank):
            return f"{rank} completes {_show(state.workers[rank])}"
        case Fail(rank):
            return f"{rank} fails in {_show(state.workers[rank])}"
        case Begin(rank):
            return f"the thread of {rank} enters the next sum"
        case Compute(rank):
            return f"{rank} has computed its step"
        case Spoil(rank):
            return f"{rank} has computed its step, and changed what is being summed"
        case Hear(rank):
            return f"{rank} hears {_show(state.workers[rank])}"
        case Do(rank):
            return f"{rank} does {_show(state.workers[rank])}"
        case Decide(yes):
            return f"decided, True at {list(ranks(yes))}"
        case Add(rank):
            return f"{rank} has added in {_show(state.workers[rank])}"
        case Stop(rank):
            return f"{rank} is stopped in {_show(state.workers[rank])}"
        case Wake(rank):
            bucket = next(late.bucket for late in state.memory.late if late.rank == rank)
            return f"{rank} wakes and finishes bucket {bucket}"
        case Read(rank):
            return f"the optimizer of {rank} has read"
        case Wish(rank) if rank == FLIP:
            return "somebody's state is corrupt, and it is found"
        case Wish(rank) if rank == NEW_SETTINGS:
            return "there are new settings"
        case Wish(rank):
            return f"{rank} waits to join" if state.wishes.unborn & 1 << rank else f"{rank} is told to leave"


def _describe_state(state: State) -> str:
    gone = {late.rank: "stopped" for late in state.memory.late} | dict.fromkeys(ranks(state.left), "left")
    gone |= dict.fromkeys(ranks(state.wishes.unborn), "to come") | dict.fromkeys(ranks(state.wishes.waiting), "waiting")
    return ", ".join(f"{rank}: {gone.get(rank) or _show(worker)}" for rank, worker in enumerate(state.workers))


def _show(worker: Worker | None) -> str:
    if worker is None:
        return "dead"
    match worker.waits:
        case Returning(event=event):
            return f"({event})"
        case Doing(orders=orders):
            return f"({', '.join(map(_show_order, orders))})"
        case order:
            return _show_order(order)


def _show_order(order: Action) -> str:
    match order:
        case ShareProgress(progress=Progress(completed=completed)):
            return f"ShareProgress({completed})"
        case Agree(flag=flag):
            return f"Agree({flag:d})"
        case AtBarrier(name=name, order=order):
            return f"{name} of {_show_order(order)}"
        case Adding(order=order):
            return f"adding of {_show_order(order)}"
        case order:
            values = ", ".join(str(getattr(order, field.name)) for field in dataclasses.fields(order))
            return f"{type(order).__name__}({values})"
