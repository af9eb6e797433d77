"""Runs one recovery of the production protocol, :class:`~holdfast.recovery.Protocol`, in the simulator, order by order.

One survivor's protocol represents all. A strategy that checks the progress of all members receives a few
representatives, which suffice to show that a member is behind, that one is new, and whether enough are left. Further
equal members would not change its decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import InternalError
from holdfast.recovery import Protocol, Strategy, make_strategy
from holdfast.recovery.messages import (
    JOINING,
    Action,
    Agree,
    Agreed,
    ApplyStep,
    BucketReduced,
    CheckpointLoaded,
    Computed,
    ComputeStep,
    DiscardStep,
    Done,
    Event,
    Leave,
    LoadCheckpoint,
    MembersChange,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    ReduceBucket,
    Reinitialise,
    Revoke,
    Revoked,
    SaveAndStop,
    SendState,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    VoteStep,
)

_ENOUGH = 4
"""Representatives for enough members; one fewer means too few. Among these, one may be behind and one may be new."""

_DECISIONS = {
    SendState: "grow",
    DiscardStep: "redo",
    LoadCheckpoint: "load",
    Reinitialise: "reinit",
    SaveAndStop: "stop",
}
"""The decision that an order implies, as in :class:`~holdfast.records.types.Recovered`."""

_RANK = {decision: rank for rank, decision in enumerate(("continue", "grow", *list(_DECISIONS.values())[1:]))}
"""Among several orders, the most severe names the decision: an application that is rebuilt also loads."""


class Rules(NamedTuple):
    """The recovery rules of a job.

    Args:
        strategy: The recovery strategy.
        buckets: All-reduces of a step besides the commit vote.
        split: Workers hold different parts of the model.
        loses_parts: A failed worker's part of the model is lost, because no other worker holds it.
    """

    strategy: Strategy
    buckets: int
    split: bool
    loses_parts: bool


def rules_of(strategy: str, *, min_workers: int, buckets: int, model: str) -> Rules:
    """Return the rules of a job.

    Raises:
        ConfigError: if the strategy is unknown.
    """
    made = make_strategy(strategy, min_workers=_ENOUGH if min_workers > 1 else 1)
    return Rules(made, buckets, model != "replicated", model == "split")


@dataclass(slots=True)
class SimulatedRecovery:
    """One recovery from a failure, or one admission of newcomers. One order at a time is open.

    Args:
        rules: The recovery rules.
        step: The step in progress.
        sums: Its completed all-reduces, at most ``rules.buckets``; None if its computation was not finished.
        some_behind: One survivor has completed one all-reduce less.
    """

    rules: Rules
    step: int
    sums: int | None = None
    some_behind: bool = False
    open: Action = field(init=False)
    """The order being executed."""
    decision: str = field(init=False, default="continue")
    """The decision so far, as in :class:`~holdfast.records.types.Recovered`."""
    orders: dict[str, int] = field(init=False, default_factory=dict)
    """How often each order was executed, by its name."""
    _protocol: Protocol = field(init=False)
    _calm: bool = field(init=False, default=False)
    _newcomers: bool = field(init=False, default=False)
    _has_begun: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._protocol = Protocol(self.rules.strategy, self.rules.buckets, split=self.rules.split)
        self._handle(Started())
        self._handle(CheckpointLoaded(self.step))
        if self.sums is not None:
            self._handle(Computed())
            for _ in range(self.sums):
                self._handle(BucketReduced())

    def peer_lost(self) -> None:
        """Report a failure, detected by an all-reduce or an agreement."""
        if self._calm:
            self._calm, self._newcomers, self.decision = False, False, "continue"
        while isinstance(self.open, Revoke | Shrink):  # these succeed nevertheless
            self.carry_out(enough=True)
        if self._has_begun:
            self._count(self.open)
        self._has_begun = True
        self._handle(Agreed(value=False) if isinstance(self.open, Agree) else PeerLost())

    def members_change(self) -> None:
        """Report newcomers: no member failed, and they are admitted before the step."""
        self._calm = self._newcomers = self._has_begun = True
        self.decision = "grow"
        self._handle(MembersChange())

    def carry_out(self, *, enough: bool, checkpoint: int = 0) -> None:
        """Execute the open order; the protocol then opens the next one.

        Args:
            enough: Whether enough members are left.
            checkpoint: The step of the checkpoint that is loaded.
        """
        self._count(self.open)
        self._handle(self._answer(self.open, enough, checkpoint))

    @property
    def is_over(self) -> bool:
        """Whether training resumes: a step is to be computed, or its all-reduces continued."""
        return isinstance(self.open, ComputeStep | ReduceBucket | VoteStep)

    @property
    def has_stopped(self) -> bool:
        """Whether all members have saved and stopped."""
        return isinstance(self.open, Leave)

    def _answer(self, order: Action, enough: bool, checkpoint: int) -> Event:
        match order:
            case Revoke():
                return Revoked()
            case Agree(flag=flag):
                return Agreed(flag)
            case Shrink():
                return Shrunk()
            case ShareProgress(progress=progress):
                return ProgressKnown(self._progress_of_all(progress, enough), self.rules.buckets)
            case LoadCheckpoint():
                return CheckpointLoaded(checkpoint)
            case ApplyStep():
                return StepApplied()
            case ComputeStep() | ReduceBucket() | VoteStep() | Leave():
                raise InternalError(f"{order} is no part of a recovery")
            case _:
                return Done()

    def _progress_of_all(self, progress: Progress, enough: bool) -> dict[int, Progress]:
        flags = Note.PLANNED.when(self._calm) | Note.LOST.when(self.rules.loses_parts and not self._calm)
        alike = Progress(progress.completed, progress.computed, flags)
        crowd = dict.fromkeys(range(_ENOUGH if enough else _ENOUGH - 1), alike)
        if self.some_behind:
            crowd[1] = Progress(progress.completed - 1, computed=True, flags=flags)
        if self._newcomers:
            crowd[len(crowd) - 1] = Progress(JOINING, computed=False, flags=flags)
        return crowd

    def _handle(self, event: Event) -> None:
        *_, self.open = self._protocol.handle(event)  # earlier actions only publish, and need no answer
        if self._has_begun and (decision := _DECISIONS.get(type(self.open), "")):
            self.decision = max(self.decision, decision, key=_RANK.__getitem__)
            self.some_behind = False  # the late member catches up first

    def _count(self, order: Action) -> None:
        name = type(order).__name__
        self.orders[name] = self.orders.get(name, 0) + 1
