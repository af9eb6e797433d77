"""The recovery protocol of production in the simulator: one recovery, order by order, as :class:`~holdfast.recovery.Protocol` gives them.

One survivor's protocol stands for those of all. A strategy that looks at the progress of all members is shown a few of them: it can
tell that one is behind, that one is new, and whether enough are left. Of many members that are alike it could tell no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import InternalError
from holdfast.recovery import Protocol, Strategy, make_strategy
from holdfast.recovery.messages import (
    JOINING,
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
    Leave,
    LoadCheckpoint,
    MembersChange,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    Reinitialise,
    Revoke,
    Revoked,
    SaveAndStop,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    SumBucket,
    Welcome,
)

_ENOUGH = 4
"""Stand-ins for enough members; one less stands for too few. Among so many one may be behind and one new."""

_DECISIONS = {
    Welcome: "grow",
    DiscardStep: "redo",
    LoadCheckpoint: "load",
    Reinitialise: "reinit",
    SaveAndStop: "stop",
}
"""What an order says of what was decided, as :class:`~holdfast.records.types.Recovered` has it."""

_RANK = {decision: rank for rank, decision in enumerate(("continue", "grow", *list(_DECISIONS.values())[1:]))}
"""Of several orders the one that goes farther names the decision: an application that is built again loads, too."""


class Rules(NamedTuple):
    """By what a job recovers.

    Args:
        strategy: Decides.
        buckets: Sums of a step beside the closing one.
        split: Workers hold different parts of the model.
        loses_parts: A worker that dies takes a part of the model with it that no other worker holds.
    """

    strategy: Strategy
    buckets: int
    split: bool
    loses_parts: bool


def rules_of(strategy: str, *, min_workers: int, buckets: int, model: str) -> Rules:
    """Return the rules of a job.

    Raises:
        ConfigError: if there is no such strategy.
    """
    made = make_strategy(strategy, min_workers=_ENOUGH if min_workers > 1 else 1)
    return Rules(made, buckets, model != "replicated", model == "split")


@dataclass(slots=True)
class Recovery:
    """One recovery from a failure, or one admission of newcomers. One order at a time is open.

    Args:
        rules: By what they decide.
        step: The step in progress.
        sums: How many of its sums are done, at most ``rules.buckets``; None if it was not computed to its end.
        some_behind: One survivor has completed one sum less.
    """

    rules: Rules
    step: int
    sums: int | None = None
    some_behind: bool = False
    open: Action = field(init=False)
    """What is being done."""
    decision: str = field(init=False, default="continue")
    """What was decided so far, as :class:`~holdfast.records.types.Recovered` has it."""
    orders: dict[str, int] = field(init=False, default_factory=dict)
    """How often each order was carried out, by its name."""
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
                self._handle(BucketSummed())

    def peer_lost(self) -> None:
        """Report a death: by a sum that failed, or by an agreement."""
        if self._calm:
            self._calm, self._newcomers, self.decision = False, False, "continue"
        while isinstance(self.open, Revoke | Shrink):  # these succeed all the same
            self.carry_out(enough=True)
        if self._has_begun:
            self._count(self.open)
        self._has_begun = True
        self._handle(Agreed(value=False) if isinstance(self.open, Agree) else PeerLost())

    def members_change(self) -> None:
        """Report newcomers: no member died, they are admitted before the step."""
        self._calm = self._newcomers = self._has_begun = True
        self.decision = "grow"
        self._handle(MembersChange())

    def carry_out(self, *, enough: bool, checkpoint: int = 0) -> None:
        """Carry the open order out; then another is open.

        Args:
            enough: As many members are left as are needed.
            checkpoint: The step that a checkpoint is loaded of.
        """
        self._count(self.open)
        self._handle(self._answer(self.open, enough, checkpoint))

    @property
    def is_over(self) -> bool:
        """Whether training resumes: a step is to be computed, or its sums continued."""
        return isinstance(self.open, ComputeStep | SumBucket | CloseStep)

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
            case ComputeStep() | SumBucket() | CloseStep() | Leave():
                raise InternalError(f"{order} is no part of a recovery")
            case _:
                return ActDone()

    def _progress_of_all(self, progress: Progress, enough: bool) -> dict[int, Progress]:
        flags = Note.CALM.when(self._calm) | Note.LOST.when(self.rules.loses_parts and not self._calm)
        alike = Progress(progress.completed, progress.computed, flags)
        crowd = dict.fromkeys(range(_ENOUGH if enough else _ENOUGH - 1), alike)
        if self.some_behind:
            crowd[1] = Progress(progress.completed - 1, computed=True, flags=flags)
        if self._newcomers:
            crowd[len(crowd) - 1] = Progress(JOINING, computed=False, flags=flags)
        return crowd

    def _handle(self, event: Event) -> None:
        *_, self.open = self._protocol.handle(event)  # what comes before the last needs no answer: it is published
        if self._has_begun and (decision := _DECISIONS.get(type(self.open), "")):
            self.decision = max(self.decision, decision, key=_RANK.__getitem__)
            self.some_behind = False  # they catch up first

    def _count(self, order: Action) -> None:
        name = type(order).__name__
        self.orders[name] = self.orders.get(name, 0) + 1
