"""One history, event by event: the strategies of production, with costs in the place of tensors.

Events are taken in the order of (time, kind, number). Between two that disturb it, training is a :class:`~oracle.segment.Segment`
that is worked out in one piece; the protocol is asked when members are lost, or come.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.recovery.messages import (
    Action,
    ComputeStep,
    DiscardStep,
    LoadCheckpoint,
    MoveParts,
    ReduceBucket,
    Reinitialise,
    SaveAndStop,
    SendState,
    Shrink,
)
from holdfast_lab.simulate.checks import ticks
from holdfast_lab.simulate.failures import Outages
from holdfast_lab.simulate.outcome import PARTS, Outcome
from holdfast_lab.simulate.price_table import price_table
from holdfast_lab.simulate.protocol_model import SimulatedRecovery, rules_of
from holdfast_lab.simulate.scenario import Scenario
from oracle.fleet import NOBODY, Fleet
from oracle.progress import Progress
from oracle.segment import NEVER, Segment

_DOWN, _READY, _NEXT = 0, 1, 2
"""Kinds of events; at the same time, the lower comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Outcome):
    """What comes of one history, and what was decided at each recovery: in the order of time, at which step, what, and the orders by name."""

    decisions: tuple[tuple[int, str, Mapping[str, int]], ...]


def simulate(scenario: Scenario, *, seed: int = 0, repetition: int = 0) -> History:
    """Return what comes of one history; the arguments are those of :func:`holdfast_lab.simulate.simulate`."""
    outages = scenario.failures.draw(scenario.cluster, scenario.horizon_s, (seed, repetition))
    return Simulator(scenario, outages).run()


class _Phase(enum.Enum):
    RUN = enum.auto()
    DETECT = enum.auto()
    RECOVER = enum.auto()
    START = enum.auto()
    WAIT = enum.auto()


@dataclass(slots=True)
class _Counts:
    failures: int = 0
    lost_workers: int = 0
    joins: int = 0
    starts: int = 0
    lost_slices: int = 0


class Simulator:
    """Carries out what the strategies decide, in time.

    Args:
        scenario: What is simulated.
        outages: Who is down and when.
    """

    def __init__(self, scenario: Scenario, outages: Outages) -> None:
        job, costs, table = scenario.job, scenario.costs, price_table(scenario.cluster, scenario.job, scenario.costs)
        self._workers, self._min_workers, self._quorum = scenario.cluster.workers, job.min_workers, scenario.quorum
        self._every = job.save_every or NEVER
        self._relaunches = job.strategy == "relaunch"
        self._from_snapshot = job.reinit_from == "snapshot" and job.model == "replicated"
        strategy = "rollback" if self._relaunches else job.strategy
        self._rules = rules_of(strategy, min_workers=job.min_workers, buckets=job.buckets, model=job.model)
        self._horizon = ticks(scenario.horizon_s)
        self._stale = round(scenario.stale_iterations * self._workers)
        self._progress = Progress(None if job.steps is None else job.steps * self._workers)
        self._compute, self._sums = table.compute.tolist(), table.sums.tolist()
        self._exposed, self._undo = table.exposed.tolist(), ticks(costs.undo_s)
        self._eager = job.overlap_optimizer
        self._regroup, self._weight = table.regroup.tolist(), table.weight.tolist()
        self._detect, self._save, self._behind = (
            ticks(costs.detect_s),
            ticks(costs.save_s),
            ticks(costs.save_background_s),
        )
        self._start, self._load = ticks(costs.restart_s), ticks(costs.load_s)
        self._prices: dict[type[Action], tuple[int, str]] = {
            LoadCheckpoint: (self._load, "load"),
            Reinitialise: (ticks(costs.rebuild_s), "restart"),
            MoveParts: (ticks(costs.rehome_s), "load"),
            SendState: (ticks(costs.rejoin_s), "rejoin"),
            SaveAndStop: (self._save + self._behind, "save"),
        }
        self._full = sum(part[self._workers] for part in (self._compute, self._sums, self._exposed))
        self._fleet = Fleet(scenario.cluster.total, outages, ticks(costs.spawn_s))
        self._heap = [(start, _DOWN, number) for number, start in enumerate(outages.start.tolist())]  # sorted: a heap
        self._members, self._members_since, self._member_ns, self._joiners, self._killed = 0, 0, 0, 0, 0
        self._ends = self._horizon
        self._phase, self._since, self._turn = _Phase.WAIT, 0, 0
        self._is_down, self._snapshot, self._finished = True, False, False
        self._segment: Segment | None = None
        self._recovery: SimulatedRecovery | None = None
        self._sums_done: int | None = None
        self._parts = dict.fromkeys(PARTS, 0)
        self._counts = _Counts()
        self._decisions: list[tuple[int, str, dict[str, int]]] = []

    def run(self) -> History:
        """Go through the events until the job is done, or time is up."""
        self._wake(0)
        while True:
            now, kind, number = heapq.heappop(self._heap) if self._heap else (self._horizon, _NEXT, 0)
            if now >= self._horizon:
                return self._close(self._horizon)
            if kind == _DOWN:
                self._go_down(now, number)
            elif kind == _READY:
                self._come_up(now, number)
            elif number == self._turn:
                self._go_on(now)
                if self._finished:
                    return self._close(now)

    def _wake(self, at: int) -> None:
        """Go on at ``at``, and at no other time that was meant before."""
        self._turn += 1
        heapq.heappush(self._heap, (at, _NEXT, self._turn))

    def _go_on(self, now: int) -> None:
        match self._phase:
            case _Phase.RUN:
                self._end_segment(now)
                self._finished = self._progress.is_done
                if not self._finished:
                    self._admit(now)
            case _Phase.DETECT:
                self._notice(now)
            case _Phase.RECOVER:
                self._spend_recovery(now)
                self._do(now)
            case _Phase.START:
                self._spend_start(now)
                self._resume(now)
            case _Phase.WAIT:
                self._try_start(now)

    def _spend(self, now: int, part: str) -> None:
        self._parts[part] += now - self._since
        self._since = now

    # -- machines

    def _go_down(self, now: int, number: int) -> None:
        hit = self._fleet.go_down(now, number)
        heapq.heappush(self._heap, (self._fleet.ready[number], _READY, number))
        if hit.members:
            self._set_members(now, self._members - hit.members)
            self._killed += hit.members
            self._counts.failures += 1
            self._counts.lost_workers += hit.members
        if hit.members or hit.newcomers:
            self._lose(now)

    def _come_up(self, now: int, number: int) -> None:
        if not self._fleet.come_up(now, number):
            return
        if self._phase is _Phase.WAIT:
            self._try_start(now)
        elif self._phase is _Phase.RUN:
            self._plan(now)

    def _set_members(self, now: int, members: int) -> None:
        self._member_ns += self._members * (now - self._members_since)
        self._members, self._members_since = members, now

    # -- training

    def _resume(self, now: int, sums: int | None = None) -> None:
        """Train from here: a step is begun, or gone on with where so many of its sums are done."""
        compute, rest, into = self._compute[self._members], self._sums[self._members], 0
        exposed, last = self._exposed[self._members], compute - -self._rules.buckets * rest // (self._rules.buckets + 1)
        step, waits = compute + rest + exposed, last if self._eager else compute + rest
        if sums is not None:
            updated = self._eager and sums == self._rules.buckets
            into = last + exposed if updated else max(1, compute - -sums * rest // (self._rules.buckets + 1))
        self._phase, self._since, self._killed = _Phase.RUN, now, 0
        self._recovery, self._snapshot, self._is_down = None, False, False
        self._segment = Segment(
            start=now,
            first=self._progress.step,
            into=into,
            step=step,
            compute=compute,
            waits=waits,
            waited=waits + exposed,
            every=self._every,
            hold=self._save + max(0, self._behind - self._every * step),
            lag=max(self._behind, compute - -rest // (self._rules.buckets + 1)),
            weight=self._weight[self._members],
        )
        self._plan(now)

    def _plan(self, now: int) -> None:
        """Wake up where training ends, or where newcomers are let in."""
        assert self._segment is not None
        ends, left = self._horizon, self._progress.left(self._segment.weight)
        if left is not None:
            ends = self._segment.until_step(self._segment.first + left)
        self._ends = min(ends, self._horizon)
        # Where somebody is dead whom nobody misses before time is up, nobody is let in any more.
        if self._fleet.available > self._members and not self._relaunches and not self._killed:
            ends = min(ends, self._segment.boundary(now))
        self._wake(ends)

    def _end_segment(self, now: int) -> None:
        """Train until ``now``, and not on."""
        assert self._segment is not None
        self._progress.add(self._segment, now)
        self._segment, self._since = None, now

    # -- failures

    def _lose(self, now: int) -> None:
        """Somebody died, a member or a newcomer who was about to be let in: the others will notice."""
        match self._phase:
            case _Phase.RUN:
                if not self._stop_training(now):
                    self._plan(now)
                    return
            case _Phase.START:
                self._spend_start(now)
            case _Phase.RECOVER:
                self._spend_recovery(now)
                self._progress.settle(None, now)
        self._progress.spoil()
        self._phase, self._fleet.admitting = _Phase.DETECT, NOBODY
        self._wake(max(now, self._since) + self._detect)

    def _stop_training(self, now: int) -> bool:
        """Let survivors train until they miss somebody in a sum; return whether they do before all is done, or time is up."""
        assert self._segment is not None
        segment, missed = self._segment, self._segment.missed(now, computing=self._rules.split)
        if missed >= self._ends:
            return False
        place = self._progress.add_broken_off(segment, now, missed)
        self._segment, self._since = None, missed
        self._sums_done = None
        if place.into >= segment.compute:
            sums = segment.step - segment.compute - (segment.waited - segment.waits)
            done = (place.into - segment.compute) * (self._rules.buckets + 1) // sums
            self._sums_done = min(done, self._rules.buckets)
        return True

    def _notice(self, now: int) -> None:
        self._spend(now, "detect")
        if self._is_down or self._relaunches or not self._members:
            self._stop(now)
            return
        if self._recovery is None:
            self._recovery = SimulatedRecovery(self._rules, self._progress.step, self._sums_done)
        self._recovery.peer_lost()
        self._phase = _Phase.RECOVER
        self._begin(now)

    # -- recoveries

    def _admit(self, now: int) -> None:
        """Let in all who wait."""
        self._recovery, self._sums_done = SimulatedRecovery(self._rules, self._progress.step), None
        self._recovery.members_change()
        self._fleet.admitting, self._joiners = now, self._fleet.available - self._members
        self._phase = _Phase.RECOVER
        self._begin(now)

    def _begin(self, now: int) -> None:
        """Carry out what takes no time, and begin with what does."""
        recovery = self._recovery
        assert recovery is not None
        while not (recovery.is_over or recovery.has_stopped):
            self._take_effect(recovery.open)
            if price := self._price(recovery)[0]:
                self._wake(now + price)
                return
            recovery.carry_out(enough=self._members >= self._min_workers, checkpoint=self._progress.step)
        self._end_recovery(now, recovery)

    def _do(self, now: int) -> None:
        assert self._recovery is not None
        self._recovery.carry_out(enough=self._members >= self._min_workers, checkpoint=self._progress.step)
        self._begin(now)

    def _price(self, recovery: SimulatedRecovery) -> tuple[int, str]:
        """Return what the open order takes, and what that counts as."""
        price, part = self._prices.get(type(recovery.open), (0, "regroup"))
        if isinstance(recovery.open, Shrink):  # with all that is agreed on
            price = self._regroup[self._members]
        elif isinstance(recovery.open, DiscardStep) and self._eager:
            price = self._undo * (self._sums_done or 0) // self._rules.buckets
        return price, "rejoin" if recovery.decision == "grow" else part

    def _take_effect(self, order: Action) -> None:
        if isinstance(order, Reinitialise | LoadCheckpoint):
            self._sums_done = None  # nothing is left of them that could be taken back
        match order:
            case Reinitialise() if self._from_snapshot:
                self._progress.discard()
                self._snapshot = True
            case DiscardStep():
                self._progress.discard()
            case LoadCheckpoint() if not self._snapshot:
                self._progress.go_back()
            case MoveParts() if self._recovery is not None and self._recovery.decision != "grow":
                self._progress.fall_behind(self._stale)

    def _spend_recovery(self, now: int) -> None:
        assert self._recovery is not None
        self._spend(now, self._price(self._recovery)[1])

    def _end_recovery(self, now: int, recovery: SimulatedRecovery) -> None:
        self._decisions.append((self._progress.step, recovery.decision, dict(recovery.orders)))
        if recovery.has_stopped:
            self._progress.secure(now)
            self._stop(now)
            return
        if recovery.decision == "grow":
            self._counts.joins += 1
            self._set_members(now, self._members + self._joiners)
            self._fleet.admitted, self._fleet.admitting = self._fleet.admitting, NOBODY
        if isinstance(recovery.open, ComputeStep):
            self._resume(now)
            return
        sums = recovery.open.bucket if isinstance(recovery.open, ReduceBucket) else self._rules.buckets
        if sums < self._rules.buckets:
            self._counts.lost_slices += min(self._killed, self._workers)
        self._resume(now, sums)

    # -- starting

    def _stop(self, now: int) -> None:
        """Nobody trains any more: what was done since the newest checkpoint is lost."""
        self._progress.go_back()
        self._set_members(now, 0)
        self._fleet.admitted, self._recovery, self._is_down = NOBODY, None, True
        self._phase, self._since = _Phase.WAIT, now
        self._try_start(now)

    def _try_start(self, now: int) -> None:
        if self._fleet.available < self._quorum:
            return
        self._spend(now, "wait")
        self._set_members(now, self._fleet.available)
        self._fleet.admitted = now
        if now == 0:
            self._resume(now)  # the job begins here: that it was started once is no loss
            return
        self._counts.starts += 1
        self._phase = _Phase.START
        self._wake(now + self._start + self._load)

    def _spend_start(self, now: int) -> None:
        starting = min(now - self._since, self._start)
        self._parts["restart"] += starting
        self._since += starting
        self._spend(now, "load")

    # -- the end

    def _close(self, now: int) -> History:
        match self._phase:
            case _Phase.RUN if self._segment is not None:
                self._end_segment(now)
            case _Phase.RECOVER:
                self._spend_recovery(now)
            case _Phase.START:
                self._spend_start(now)
            case _Phase.DETECT:
                self._spend(now, "detect")
            case _Phase.WAIT:
                self._spend(now, "wait")
        self._set_members(now, 0)
        progress, counts = self._progress, self._counts
        self._parts["useful"], self._parts["lost"] = progress.ran, progress.lost
        self._parts["save"] += progress.held
        return History(
            parts_ns=self._parts,
            total_ns=now,
            ideal_ns=progress.weight * self._full // self._workers,
            finished=self._finished,
            steps=progress.step,
            failures=counts.failures,
            lost_workers=counts.lost_workers,
            joins=counts.joins,
            starts=counts.starts,
            lost_slices=counts.lost_slices,
            member_ns=self._member_ns,
            decisions=tuple(self._decisions),
        )
