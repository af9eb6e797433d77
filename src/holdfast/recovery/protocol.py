"""One worker's side of the commit and recovery protocol, as a state machine.

A step with B buckets is B sums and a closing sum, one at a time; the optimizer runs only after the closing
sum. Because sums are symmetric and blocking, survivors are at most one sum apart, so whoever is behind a
closed step already holds all of it, and no state is ever sent between survivors.

Where the model is split, a step has no buckets of the world: its parts are summed, and stages hand over, while it is
computed, among whom it concerns. Only the closing sum is everybody's, and nobody enters it who lacks anything of the
step for a part that it holds. So whoever is behind a closed step still holds all of it. It may fail while it is computed, and
then nobody can go on with it, whatever the strategy: what the dead would have computed is missing.

When a sum fails, the survivors regroup (R1 to R4, :mod:`holdfast.recovery.regroup`). Then the strategy decides (R5), and its
orders are carried out.

When somebody waits to join, or wants to leave, all hear it in a closing sum and meet before the next step: agree(0),
because a peer that missed the closing sum does the same, and on with R2. Its shrink leaves out who leaves, and admits
newcomers if all who are in it have heard of them. Those that are no newcomers are then all between the same two steps, and
there is nothing to decide: they give their state to the newcomers, agree(1), and only then the newcomers count.

Changes to the running job are heard in a closing sum too. All take them, agree(1), and only then they count: they may
change the strategy, and all must decide by the same one.

A closing sum may say that somebody's state is corrupt. Whoever hears it does not close the step, and meets the others as if
members changed: agree(0), and on with R2. With the progress it says so to those who missed the closing sum; then all load.
Where only a message was altered on its way, nobody's state is wrong: then all take the step back, and do it again.

Where the model is split, its parts then get new homes: they are given, agree(1), and only then the new homes count.
Under ``partial`` a part that nobody holds any more is restored there too, by one who gives it to the others.

And at the end the gate: agree(1), publish, agree(1), leave. Nobody may leave on anything weaker, because a
survivor that must recover would wait for those who left.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from holdfast.errors import InternalError, JobError
from holdfast.recovery.messages import (
    JOINING,
    LOADING,
    ActDone,
    Action,
    Admitted,
    Agree,
    Agreed,
    ApplyStep,
    BucketSummed,
    CatchUp,
    ChangesWait,
    CheckpointLoaded,
    CloseStep,
    Computed,
    ComputeStep,
    ContinueStep,
    CorruptionSeen,
    DiscardStep,
    Event,
    HandedOver,
    HandOver,
    Install,
    Leave,
    LoadCheckpoint,
    MakeChanges,
    MembersChange,
    Note,
    Parted,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    RanOut,
    Rehome,
    Reinitialise,
    Revoked,
    SaveAndStop,
    Settle,
    Shrunk,
    Started,
    StepApplied,
    StepClosed,
    SumBucket,
    TakeChanges,
    Welcome,
)
from holdfast.recovery.regroup import Line, line_after, order_of
from holdfast.recovery.strategy import Strategy


class State(enum.Enum):
    """What the worker is waiting for, unless it is regrouping, and then waits at a :class:`~holdfast.recovery.regroup.Line`."""

    NEW = enum.auto()
    COMPUTE = enum.auto()
    SUM = enum.auto()
    CLOSE = enum.auto()
    APPLY = enum.auto()
    ACT = enum.auto()
    TAKEN = enum.auto()
    GATE = enum.auto()
    LAST_GATE = enum.auto()
    LEFT = enum.auto()


class Protocol:
    """Turns what happened into what to do next; at any moment one order that needs an answer is open.

    Args:
        strategy: Decides in R5.
        num_buckets: Buckets of a step that all workers sum, ``>= 0``.
        split: Workers hold different parts of the model.
    """

    __slots__ = (
        "_completed",
        "_computed",
        "_known",
        "_num_buckets",
        "_orders",
        "_split",
        "_state",
        "_stopping",
        "_strategy",
    )

    def __init__(self, strategy: Strategy, num_buckets: int, *, split: bool = False) -> None:
        if num_buckets < 0 or (num_buckets == 0 and not split):
            raise InternalError(
                f"a step must have at least 1 bucket, or none where the model is split, got {num_buckets}"
            )
        self._strategy = strategy
        self._split = split
        self._num_buckets = num_buckets
        self._state: State | Line = State.NEW
        self._completed = 0
        self._computed = False
        self._stopping = False
        self._known: ProgressKnown | None = None
        self._orders: tuple[Action, ...] = ()

    def set_strategy(self, strategy: Strategy) -> None:
        """Let another strategy decide from now on; all do so in :class:`MakeChanges`, a newcomer in :class:`Install`."""
        self._strategy = strategy

    @property
    def state(self) -> State | Line:
        """What the worker is waiting for; a line of the sequence while it regroups."""
        return self._state

    @property
    def step(self) -> int:
        """The step in progress, -1 while a checkpoint is being loaded."""
        return self._completed // self._sums

    @property
    def progress(self) -> Progress:
        """How far this worker is."""
        return Progress(self._completed, self._computed)

    def key(self) -> tuple[object, ...]:
        """Return everything that decides what this worker will do: equal keys, equal futures."""
        known = None if self._known is None else tuple(sorted((r, p) for r, p in self._known.progress.items()))
        return (self._state, self._completed, self._computed, self._stopping, known, self._orders, self._strategy)

    @property
    def _sums(self) -> int:
        return self._num_buckets + 1

    def handle(self, event: Event) -> list[Action]:
        """Take one event and say what to do now. Only the last order of the list needs an answer.

        Raises:
            InternalError: if the event cannot happen in this state.
            JobError: if only newcomers are left: nobody has the state of training.
        """
        if isinstance(event, PeerLost):
            return self._recover()
        match self._state, event:
            case State.NEW, Started():
                self._state, self._orders = State.ACT, (LoadCheckpoint(),)
                return self._next_order()
            case State.NEW, Admitted():
                self._completed = JOINING
                return self._regroup(Line.FENCE)
            case State.COMPUTE, MembersChange():
                return self._regroup(Line.HEARD)  # a peer may be recovering, and meets us there
            case State.COMPUTE, ChangesWait():
                # A strategy is among them: it must not be another at those who missed them than at the others.
                self._state, self._orders = State.ACT, (TakeChanges(), Agree(flag=True), MakeChanges())
                return self._next_order()
            case State.COMPUTE, Computed():
                self._computed = not self._split  # where it is, nobody can go on without what the dead computed
                return self._sum_next()
            case State.COMPUTE, RanOut():
                return self._enter(State.GATE, Agree(flag=True))
            case State.SUM, BucketSummed():
                return self._after_bucket()
            case State.CLOSE, StepClosed():
                return [*self._publish_where_closed(), *self._enter(State.APPLY, ApplyStep(self.step))]
            case State.CLOSE, CorruptionSeen():
                return self._regroup(Line.HEARD)  # as where members change: who missed it meets us there
            case State.APPLY, StepApplied():
                self._finish_step()
                return self._compute()
            case Line() as line, _:
                return self._after_line(line, event)
            case ((State.TAKEN | State.GATE | State.LAST_GATE), Agreed(value=False)):
                return self._regroup(Line.SHRINK)  # the agreement told everybody: no need to revoke
            case State.TAKEN, Agreed():
                self._state = State.ACT
                return self._next_order()
            case State.ACT, _:
                return self._after_act(event)
            case State.GATE, Agreed():
                return [Publish(self.step - 1), *self._enter(State.LAST_GATE, Agree(flag=True))]
            case State.LAST_GATE, Agreed():
                return self._enter(State.LEFT, Leave())
            case _:
                raise InternalError(self._cannot_happen(event))

    def _enter(self, state: State, action: Action) -> list[Action]:
        self._state = state
        return [action]

    def _cannot_happen(self, event: Event) -> str:
        return f"{event} cannot happen in state {self._state.name}"

    # -- a step

    def _compute(self) -> list[Action]:
        return self._enter(State.COMPUTE, ComputeStep(self.step))

    def _sum_next(self) -> list[Action]:
        step, position = divmod(self._completed, self._sums)
        if position == self._num_buckets:
            return self._enter(State.CLOSE, CloseStep(step))
        return self._enter(State.SUM, SumBucket(step, position))

    def _after_bucket(self) -> list[Action]:
        self._completed += 1
        return [*self._publish_before(), *self._sum_next()]

    def _publish_before(self) -> list[Action]:
        """Return the order to publish the step before, once the first sum of this one is known.

        Everybody entered that sum, so everybody has applied the step before: it cannot be taken back.
        """
        step, position = divmod(self._completed, self._sums)
        return [Publish(step - 1)] if position == 1 else []

    def _publish_where_closed(self) -> list[Action]:
        """Return the order to publish the step before, if the closing sum is the first sum of a step."""
        return [Publish(self.step - 1)] if self._num_buckets == 0 else []

    def _finish_step(self) -> None:
        self._completed = (self.step + 1) * self._sums
        self._computed = False

    # -- recovery

    def _recover(self) -> list[Action]:
        waits = self._state in (State.SUM, State.CLOSE, Line.SHARE, State.ACT)
        if not waits and not (self._split and self._state is State.COMPUTE):  # there, stages wait for each other
            raise InternalError(f"no sum can fail in state {self._state.name}")
        self._known, self._orders = None, ()
        return self._regroup(Line.REVOKE)

    def _regroup(self, line: Line) -> list[Action]:
        """Go on with the sequence at ``line``."""
        self._state = line
        return [order_of(line, self.progress)]

    def _after_line(self, line: Line, event: Event) -> list[Action]:
        match line, event:
            case Line.SHRINK, Parted():
                return self._enter(State.LEFT, Leave())
            case Line.SHARE, ProgressKnown():
                self._known = event
            case (Line.REVOKE, Revoked()) | (Line.SHRINK, Shrunk()):
                pass
            case ((Line.HEARD | Line.FENCE | Line.CONFIRM), Agreed()):
                pass
            case _:
                raise InternalError(self._cannot_happen(event))
        following = line_after(line, succeeded=event != Agreed(value=False))
        return self._decide() if following is None else self._regroup(following)

    def _decide(self) -> list[Action]:
        assert self._known is not None
        newcomers = tuple(sorted(r for r, p in self._known.progress.items() if p.completed == JOINING))
        orders = self._welcome(newcomers) if newcomers else tuple(self._strategy.handle(self._known))
        self._orders = self._with_new_homes(orders) if self._split else orders
        self._known = None
        self._state = State.ACT
        return self._next_order()

    def _welcome(self, newcomers: tuple[int, ...]) -> tuple[Action, ...]:
        """Return the orders that make the newcomers as good as the others; with too few of both, all stop then."""
        assert self._known is not None
        step = self._common_step(newcomers)
        together = Progress(step * self._sums, computed=False, flags=Note.CALM | Note.LOST.when(self._is_lost()))
        known = ProgressKnown(dict.fromkeys(self._known.progress, together), self._num_buckets)
        return Welcome(step, newcomers), Agree(flag=True), Install(step), *self._strategy.handle(known)

    def _is_lost(self) -> bool:
        assert self._known is not None
        return any(p.flags & Note.LOST for p in self._known.progress.values())

    def _with_new_homes(self, orders: tuple[Action, ...]) -> tuple[Action, ...]:
        """Return the orders with those that give each part of the model a home.

        Loading does so by itself, and who stops needs none, if all that is to be saved is there.
        """
        lost = self._is_lost()
        stops = tuple(order for order in orders if isinstance(order, SaveAndStop))
        if any(isinstance(order, LoadCheckpoint) for order in orders) or (stops and not lost):
            return orders
        others = (order for order in orders if order not in stops)
        return *others, Rehome(restores=lost), Agree(flag=True), Settle(), *stops

    def _common_step(self, newcomers: Collection[int]) -> int:
        """Return the step before which all are that are no newcomers.

        They admitted the newcomers only because all had closed the step before, and began no other since.
        """
        assert self._known is not None
        others = {p.completed for r, p in self._known.progress.items() if r not in newcomers}
        if not others:
            raise JobError(
                f"only newcomers are left, {list(newcomers)}: nobody has the state of training, but as it was saved"
            )
        if len(others) != 1 or min(others) < 0 or min(others) % self._sums:
            raise InternalError(
                f"newcomers {list(newcomers)} were admitted by workers that were not all between the same steps: {self._known}"
            )
        return min(others) // self._sums

    def _next_order(self) -> list[Action]:
        while self._orders:
            order, self._orders = self._orders[0], self._orders[1:]
            match order:
                case CatchUp(step=step):
                    if self._completed == (step + 1) * self._sums - 1:
                        return [*self._publish_where_closed(), ApplyStep(step)]
                case DiscardStep(step=step):
                    self._completed, self._computed = step * self._sums, False
                    return [order]
                case LoadCheckpoint() | Reinitialise():
                    # Said before the first message of loading: from here on everybody loads, whoever dies,
                    # though some may have loaded by then, and be many sums behind the others.
                    self._completed, self._computed = LOADING, False
                    return [order]
                case SaveAndStop():
                    self._stopping = True
                    return [order]
                case HandOver() | Welcome() | TakeChanges() | MakeChanges() | Rehome() | Settle():
                    return [order]
                case Agree():
                    return self._enter(State.TAKEN, order)
                case Install(step=step):
                    self._completed, self._computed = step * self._sums, False
                    return [order]
                case ContinueStep():
                    return self._sum_next()
                case _:
                    raise InternalError(f"a strategy may not order {order}")
        return self._enter(State.GATE, Agree(flag=True)) if self._stopping else self._compute()

    def _after_act(self, event: Event) -> list[Action]:
        match event:
            case StepApplied():
                self._finish_step()
            case HandedOver(step=step, bucket=bucket):
                self._completed = step * self._sums + bucket + 1
                return [*self._publish_before(), *self._next_order()]
            case CheckpointLoaded(step=step):
                self._completed = step * self._sums
            case ActDone():
                pass
            case _:
                raise InternalError(f"{event} does not answer an order of the strategy")
        return self._next_order()
