"""The state of many histories: declared arrays with one entry per history. Times are nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.decision_table import RecoveryStage
from holdfast_lab.simulate.fleet import Calendar
from holdfast_lab.simulate.outcome import PARTS

Ticks = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEVER_ADMITTED = -1
"""An admission before all others, when no worker was ready yet."""


class Phase:
    """The phase of a history, as plain integers: arrays compare with them five times faster than with enum members.

    ``RUN``: the members train. ``DETECT``: a member has failed, and not all survivors know. ``RECOVER``: the members
    regroup and execute a decision, or admit newcomers. ``START``: the launcher restarts the job. ``WAIT``: too few
    workers are up to start it. ``OVER``: the job is done, or the horizon is reached.
    """

    RUN: Final = 0
    DETECT: Final = 1
    RECOVER: Final = 2
    START: Final = 3
    WAIT: Final = 4
    OVER: Final = 5


@dataclass(slots=True)
class Clocks:
    """The time of each history, and its next events.

    Args:
        next_down: The outage that begins next, as an index of the calendar.
        next_ready: The outage after which a new worker is ready next, as an index of the calendar's ``by_ready``.
        phase: One of :class:`Phase`.
        since: Time up to here is already assigned to a part.
        wake: The scheduled end of the phase.
        at_once: The phase has no duration: it ends before any other event at the same time.
        ends: When training ends if undisturbed.
    """

    next_down: Ticks
    next_ready: Ticks
    phase: Ticks
    since: Ticks
    wake: Ticks
    at_once: Flags
    ends: Ticks

    @classmethod
    def at_start(cls, calendar: Calendar) -> Clocks:
        """Return the clocks of histories in which no worker has been started yet."""
        number = len(calendar.begin)
        return cls(
            next_down=calendar.begin.copy(),
            next_ready=calendar.begin.copy(),
            phase=np.full(number, Phase.WAIT, dtype=np.int64),
            since=_zeros(number),
            wake=_zeros(number),
            at_once=_flags(number),
            ends=_zeros(number),
        )


@dataclass(slots=True)
class WorkerStates:
    """Available workers and members.

    Args:
        available: Number of workers that are up.
        members: Number of these that are members.
        members_since: Time of the last change of ``members``.
        member_ns: Members, integrated over time until then.
        admitted: Time of the last admission.
        admitting: Begin of the current admission of newcomers, :data:`NEVER_ADMITTED` without one.
        newcomers: Number of workers being admitted.
        killed: Members that failed since training last resumed.
    """

    available: Ticks
    members: Ticks
    members_since: Ticks
    member_ns: npt.NDArray[np.float64]
    admitted: Ticks
    admitting: Ticks
    newcomers: Ticks
    killed: Ticks

    @classmethod
    def at_start(cls, number: int, total: int) -> WorkerStates:
        """Return the workers of histories in which all are up and none is a member."""
        return cls(
            available=np.full(number, total, dtype=np.int64),
            members=_zeros(number),
            members_since=_zeros(number),
            member_ns=np.zeros(number),
            admitted=np.full(number, NEVER_ADMITTED, dtype=np.int64),
            admitting=np.full(number, NEVER_ADMITTED, dtype=np.int64),
            newcomers=_zeros(number),
            killed=_zeros(number),
        )

    def set_members(self, i: Ticks, now: Ticks, members: Ticks | int) -> None:
        """Set the number of members of the histories ``i`` from now on."""
        self.member_ns[i] += self.members[i] * (now - self.members_since[i]).astype(np.float64)
        self.members[i], self.members_since[i] = members, now


@dataclass(slots=True)
class RecoveryStates:
    """The current recovery, and its progress.

    Args:
        is_down: No member trains or recovers: the launcher restarts the job now or later.
        is_admission: Nothing failed; newcomers are being admitted.
        case: The members' phase at the failure, a :class:`~holdfast_lab.simulate.decision_table.FailureCase`.
        decision: The column of the decision table.
        sums: Completed all-reduces of the step in progress; -1 if its computation was not finished.
        from_snapshot: The state is in a snapshot: loading loses nothing more.
        takes: Duration of each stage, by :class:`~holdfast_lab.simulate.decision_table.RecoveryStage`; shape ``(stages,
            histories)``.
    """

    is_down: Flags
    is_admission: Flags
    case: Ticks
    decision: Ticks
    sums: Ticks
    from_snapshot: Flags
    takes: Ticks

    @classmethod
    def at_start(cls, number: int) -> RecoveryStates:
        """Return the recoveries of histories in which the job is yet to be started."""
        return cls(
            is_down=np.ones(number, dtype=bool),
            is_admission=_flags(number),
            case=_zeros(number),
            decision=_zeros(number),
            sums=_zeros(number),
            from_snapshot=_flags(number),
            takes=np.zeros((len(RecoveryStage), number), dtype=np.int64),
        )


@dataclass(slots=True)
class Totals:
    """The results of each history so far; see :class:`~holdfast_lab.simulate.Outcome`.

    Args:
        number: Number of histories.
    """

    number: int
    parts: dict[str, Ticks] = field(init=False)
    failures: Ticks = field(init=False)
    lost_workers: Ticks = field(init=False)
    joins: Ticks = field(init=False)
    starts: Ticks = field(init=False)
    lost_slices: Ticks = field(init=False)
    total_ns: Ticks = field(init=False)
    finished: Flags = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {part: _zeros(self.number) for part in PARTS}
        self.failures, self.lost_workers, self.joins = (_zeros(self.number) for _ in range(3))
        self.starts, self.lost_slices, self.total_ns = (_zeros(self.number) for _ in range(3))
        self.finished = _flags(self.number)


def _zeros(number: int) -> Ticks:
    return np.zeros(number, dtype=np.int64)


def _flags(number: int) -> Flags:
    return np.zeros(number, dtype=bool)
