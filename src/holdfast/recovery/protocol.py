"""One worker's side of the commit and recovery protocol, as a state machine.

A step with B buckets is B all-reduces and a commit vote, one at a time; the optimizer runs only after the commit vote.
These collectives are symmetric and blocking, so survivors are at most one apart. A survivor that missed the commit vote
of a step therefore already holds all of its buckets, and no state is ever sent between survivors.

In a split model a step has no buckets that all workers reduce: parts are all-reduced, and stages hand over activations,
among the workers concerned while the step is computed. Only the commit vote involves every worker, and none enters it
before it has everything of the step for its parts. So a survivor that missed the vote still holds the whole step. A
step can also fail while it is computed; then no strategy can continue it, as the failed worker's results are lost.

When a collective fails, the survivors regroup (R1 to R4, :mod:`holdfast.recovery.regroup`). Then the strategy decides
(R5), and its actions are carried out.

When a worker waits to join or wants to leave, the commit vote says so, and all regroup before the next step: agree(0),
because a peer that missed the vote does the same, and then R2. Its shrink excludes leaving workers, and admits
newcomers if all members know of them. All other workers are then between the same two steps, so there is nothing to
decide: they send their state to the newcomers, agree(1), and only then the newcomers are members.

Changes to the running job are announced in a commit vote too. All workers fetch them, agree(1), and only then they take
effect: they may change the strategy, and all workers must decide by the same one.

A commit vote may report that a worker's state is corrupt. A worker that receives this does not commit the step, and
regroups as for a membership change: agree(0), then R2. Its shared progress informs those that missed the vote; then all
load. If only a message was corrupted in transit, no state is wrong: then all workers roll the step back and retry it.

A split model then gets a new placement: parts are sent, agree(1), and only then the placement takes effect. Under
``partial`` a part without a surviving holder is restored at that point too, by one of its new holders.

A worker whose script has left the loop takes part in the next step with nothing to add, and says so in the commit vote.
No worker commits that step, and all enter the gate. The step is dropped only when all have left: a peer that missed the
vote recovers in it, the step is rolled back or completed, and the vote is held again.

At the end comes the gate: agree(1), publish, agree(1), leave. A worker may not leave on anything weaker, because a
survivor that must recover would wait for the workers that left.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from holdfast.errors import InternalError, JobError
from holdfast.recovery.messages import (
    JOINING,
    LOADING,
    Action,
    Admitted,
    AdoptPlacement,
    AdoptState,
    Agree,
    Agreed,
    ApplyConfig,
    ApplyStep,
    BucketReduced,
    CatchUp,
    ChangesWait,
    CheckpointLoaded,
    Computed,
    ComputeStep,
    ContinueStep,
    CorruptionSeen,
    DataExhausted,
    DiscardStep,
    Done,
    Event,
    FetchConfig,
    HandedOver,
    HandOver,
    Leave,
    LeftGroup,
    LoadCheckpoint,
    LoopLeft,
    MembersChange,
    MoveParts,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    ReduceBucket,
    Reinitialise,
    Revoked,
    SaveAndStop,
    SendState,
    Shrunk,
    Started,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast.recovery.regroup import RegroupLine, line_after, order_of
from holdfast.recovery.strategy import Strategy


class ProtocolState(enum.Enum):
    """The state in which the worker waits; while it regroups, a :class:`~holdfast.recovery.regroup.RegroupLine`."""

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
    """Turns events into actions. At any moment one action is pending that must be answered by an event.

    Args:
        strategy: Decides in R5.
        num_buckets: Buckets of a step that all workers reduce, ``>= 0``.
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
            raise InternalError(f"num_buckets must be at least 1, or 0 for a model that is split, got {num_buckets}")
        self._strategy = strategy
        self._split = split
        self._num_buckets = num_buckets
        self._state: ProtocolState | RegroupLine = ProtocolState.NEW
        self._completed = 0
        self._computed = False
        self._stopping = False
        self._known: ProgressKnown | None = None
        self._orders: tuple[Action, ...] = ()

    def set_strategy(self, strategy: Strategy) -> None:
        """Switch to another strategy; all workers do so in :class:`ApplyConfig`, a newcomer in :class:`AdoptState`."""
        self._strategy = strategy

    @property
    def state(self) -> ProtocolState | RegroupLine:
        """The state in which the worker waits; a line of the sequence while it regroups."""
        return self._state

    @property
    def step(self) -> int:
        """The step in progress, -1 while a checkpoint is loaded."""
        return self._completed // self._sums

    @property
    def progress(self) -> Progress:
        """The progress of this worker."""
        return Progress(self._completed, self._computed)

    def key(self) -> tuple[object, ...]:
        """Return everything that determines this worker's future actions: equal keys, equal futures."""
        progress = None if self._known is None else tuple(sorted((r, p) for r, p in self._known.progress.items()))
        return (self._state, self._completed, self._computed, self._stopping, progress, self._orders, self._strategy)

    @property
    def _sums(self) -> int:
        return self._num_buckets + 1

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return the actions that follow. Only the last of them needs an answer.

        Raises:
            InternalError: if the event cannot happen in this state.
            JobError: if only newcomers are alive: no worker holds the training state.
        """
        if isinstance(event, PeerLost):
            return self._recover()
        match self._state, event:
            case ProtocolState.NEW, Started():
                self._state, self._orders = ProtocolState.ACT, (LoadCheckpoint(),)
                return self._next_order()
            case ProtocolState.NEW, Admitted():
                self._completed = JOINING
                return self._regroup(RegroupLine.FENCE)
            case ProtocolState.COMPUTE, MembersChange():
                return self._regroup(RegroupLine.HEARD)  # a recovering peer reaches the same agreement
            case ProtocolState.COMPUTE, ChangesWait():
                # Changes can include the strategy, which must be the same at workers that missed the requests.
                self._state, self._orders = ProtocolState.ACT, (FetchConfig(), Agree(flag=True), ApplyConfig())
                return self._next_order()
            case ProtocolState.COMPUTE, Computed():
                self._computed = not self._split  # if split, a failed worker's results are needed to continue
                return self._sum_next()
            case ProtocolState.COMPUTE, DataExhausted():
                return self._enter(ProtocolState.GATE, Agree(flag=True))
            case ProtocolState.SUM, BucketReduced():
                return self._after_bucket()
            case ProtocolState.CLOSE, StepVoted():
                return [*self._publish_where_closed(), *self._enter(ProtocolState.APPLY, ApplyStep(self.step))]
            case ProtocolState.CLOSE, CorruptionSeen():
                return self._regroup(
                    RegroupLine.HEARD
                )  # as for a membership change: a peer that missed the vote joins here
            case ProtocolState.CLOSE, LoopLeft():
                # the step stays as it is: a peer that missed the vote recovers in it, and it is then voted on again
                return self._enter(ProtocolState.GATE, Agree(flag=True))
            case ProtocolState.APPLY, StepApplied():
                self._finish_step()
                return self._compute()
            case RegroupLine() as line, _:
                return self._after_line(line, event)
            case ((ProtocolState.TAKEN | ProtocolState.GATE | ProtocolState.LAST_GATE), Agreed(value=False)):
                return self._regroup(RegroupLine.SHRINK)  # every survivor knows from the agreement: no need to revoke
            case ProtocolState.TAKEN, Agreed():
                self._state = ProtocolState.ACT
                return self._next_order()
            case ProtocolState.ACT, _:
                return self._after_act(event)
            case ProtocolState.GATE, Agreed():
                return [Publish(self.step - 1), *self._enter(ProtocolState.LAST_GATE, Agree(flag=True))]
            case ProtocolState.LAST_GATE, Agreed():
                return self._enter(ProtocolState.LEFT, Leave())
            case _:
                raise InternalError(self._cannot_happen(event))

    def _enter(self, state: ProtocolState, action: Action) -> list[Action]:
        self._state = state
        return [action]

    def _cannot_happen(self, event: Event) -> str:
        return f"{event} cannot happen in state {self._state.name}"

    # -- a step

    def _compute(self) -> list[Action]:
        return self._enter(ProtocolState.COMPUTE, ComputeStep(self.step))

    def _sum_next(self) -> list[Action]:
        step, position = divmod(self._completed, self._sums)
        if position == self._num_buckets:
            return self._enter(ProtocolState.CLOSE, VoteStep(step))
        return self._enter(ProtocolState.SUM, ReduceBucket(step, position))

    def _after_bucket(self) -> list[Action]:
        self._completed += 1
        return [*self._publish_before(), *self._sum_next()]

    def _publish_before(self) -> list[Action]:
        """Return the action that publishes the previous step, once the first collective of this step has completed.

        Every worker entered that collective after applying the previous step, so that step cannot be rolled back.
        """
        step, position = divmod(self._completed, self._sums)
        return [Publish(step - 1)] if position == 1 else []

    def _publish_where_closed(self) -> list[Action]:
        """Return the action that publishes the previous step, if the commit vote is a step's first collective."""
        return [Publish(self.step - 1)] if self._num_buckets == 0 else []

    def _finish_step(self) -> None:
        self._completed = (self.step + 1) * self._sums
        self._computed = False

    # -- recovery

    def _recover(self) -> list[Action]:
        waits = self._state in (ProtocolState.SUM, ProtocolState.CLOSE, RegroupLine.SHARE, ProtocolState.ACT)
        if not waits and not (
            self._split and self._state is ProtocolState.COMPUTE
        ):  # in a split model, stages wait for each other
            raise InternalError(f"no collective can fail in state {self._state.name}")
        self._known, self._orders = None, ()
        return self._regroup(RegroupLine.REVOKE)

    def _regroup(self, line: RegroupLine) -> list[Action]:
        """Continue the sequence at ``line``."""
        self._state = line
        return [order_of(line, self.progress)]

    def _after_line(self, line: RegroupLine, event: Event) -> list[Action]:
        match line, event:
            case RegroupLine.SHRINK, LeftGroup():
                return self._enter(ProtocolState.LEFT, Leave())
            case RegroupLine.SHARE, ProgressKnown():
                self._known = event
            case (RegroupLine.REVOKE, Revoked()) | (RegroupLine.SHRINK, Shrunk()):
                pass
            case ((RegroupLine.HEARD | RegroupLine.FENCE | RegroupLine.CONFIRM), Agreed()):
                pass
            case _:
                raise InternalError(self._cannot_happen(event))
        following = line_after(line, succeeded=event != Agreed(value=False))
        return self._decide() if following is None else self._regroup(following)

    def _decide(self) -> list[Action]:
        assert self._known is not None
        newcomers = tuple(sorted(r for r, p in self._known.progress.items() if p.completed == JOINING))
        orders = self._admit(newcomers) if newcomers else tuple(self._strategy.handle(self._known))
        self._orders = self._with_placement(orders) if self._split else orders
        self._known = None
        self._state = ProtocolState.ACT
        return self._next_order()

    def _admit(self, newcomers: tuple[int, ...]) -> tuple[Action, ...]:
        """Return the actions that make the newcomers full members; with too few workers in total, all stop then."""
        assert self._known is not None
        step = self._common_step(newcomers)
        together = Progress(step * self._sums, computed=False, flags=Note.PLANNED | Note.LOST.when(self._is_lost()))
        event = ProgressKnown(dict.fromkeys(self._known.progress, together), self._num_buckets)
        return SendState(step, newcomers), Agree(flag=True), AdoptState(step), *self._strategy.handle(event)

    def _is_lost(self) -> bool:
        assert self._known is not None
        return any(p.flags & Note.LOST for p in self._known.progress.values())

    def _with_placement(self, orders: tuple[Action, ...]) -> tuple[Action, ...]:
        """Return the actions, extended by those that place each part of the model.

        Loading includes a placement. Stopping needs none if every part that must be saved has a holder.
        """
        lost = self._is_lost()
        stops = tuple(order for order in orders if isinstance(order, SaveAndStop))
        if any(isinstance(order, LoadCheckpoint) for order in orders) or (stops and not lost):
            return orders
        rest = (order for order in orders if order not in stops)
        return *rest, MoveParts(restores=lost), Agree(flag=True), AdoptPlacement(), *stops

    def _common_step(self, newcomers: Collection[int]) -> int:
        """Return the step before which all workers stand that are not newcomers.

        They admitted the newcomers only because all had committed the previous step, and have begun no step since.
        """
        assert self._known is not None
        counts = {p.completed for r, p in self._known.progress.items() if r not in newcomers}
        if not counts:
            raise JobError(
                f"only newcomers are alive, {list(newcomers)}: no worker holds the training state, so it must be loaded from a checkpoint"
            )
        if len(counts) != 1 or min(counts) < 0 or min(counts) % self._sums:
            raise InternalError(
                f"newcomers {list(newcomers)} were admitted by workers that were not all between the same two steps: {self._known}"
            )
        return min(counts) // self._sums

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
                    # Set before the first message of loading: from here on all workers load, whichever of them die,
                    # though some may have loaded by then and be many collectives apart from other workers.
                    self._completed, self._computed = LOADING, False
                    return [order]
                case SaveAndStop():
                    self._stopping = True
                    return [order]
                case HandOver() | SendState() | FetchConfig() | ApplyConfig() | MoveParts() | AdoptPlacement():
                    return [order]
                case Agree():
                    return self._enter(ProtocolState.TAKEN, order)
                case AdoptState(step=step):
                    self._completed, self._computed = step * self._sums, False
                    return [order]
                case ContinueStep():
                    return self._sum_next()
                case _:
                    raise InternalError(f"a strategy may not order the action {order}")
        return self._enter(ProtocolState.GATE, Agree(flag=True)) if self._stopping else self._compute()

    def _after_act(self, event: Event) -> list[Action]:
        match event:
            case StepApplied():
                self._finish_step()
            case HandedOver(step=step, bucket=bucket):
                self._completed = step * self._sums + bucket + 1
                return [*self._publish_before(), *self._next_order()]
            case CheckpointLoaded(step=step):
                self._completed = step * self._sums
            case Done():
                pass
            case _:
                raise InternalError(f"{event} does not answer an action of the strategy")
        return self._next_order()
