"""Simulates the production strategies in many histories at once, one array entry each, with decisions from a table.

Every history has its own time. In each round every history advances: first through scheduled events before the next
outage, then through the next outage or the end of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.checks import ticks
from holdfast_lab.simulate.decision_table import PART_OF, FailureCase, RecoveryStage, admission_ns, decision_table
from holdfast_lab.simulate.failures import Outages
from holdfast_lab.simulate.fleet import Calendar, Fleet, NestedUnits, SeparateUnits
from holdfast_lab.simulate.histories import NEVER_ADMITTED, Clocks, Phase, RecoveryStates, Totals, WorkerStates
from holdfast_lab.simulate.outcome import Sweep
from holdfast_lab.simulate.price_table import price_table
from holdfast_lab.simulate.progress import SimulatedProgress
from holdfast_lab.simulate.scenario import Scenario
from holdfast_lab.simulate.segments import FAR, Segments, TrainingPosition

Ticks = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_TELL_EVERY = 256
"""Rounds between two reports of the share that is done."""
_REPEATS = np.int64(-1)
"""In place of a number of all-reduces: the step in progress is computed again."""


class _Reached(NamedTuple):
    """Progress of recoveries; shape ``(histories,)``.

    Args:
        decided: The survivors have regrouped and decided.
        loading: They have started loading, if there is anything to load.
        loaded: They have finished loading.
    """

    decided: Flags
    loading: Flags
    loaded: Flags


@dataclass(frozen=True, slots=True)
class _Times:
    """Durations that do not depend on the number of members, nanoseconds."""

    horizon: int
    detect: int
    save: int
    save_background: int
    restart: int
    load: int
    admission: int

    @classmethod
    def of(cls, scenario: Scenario) -> _Times:
        costs = scenario.costs
        return cls(
            horizon=ticks(scenario.horizon_s),
            detect=ticks(costs.detect_s),
            save=ticks(costs.save_s),
            save_background=ticks(costs.save_background_s),
            restart=ticks(costs.restart_s),
            load=ticks(costs.load_s),
            admission=admission_ns(scenario),
        )


class Simulator:
    """Executes the strategies' decisions in many histories.

    Args:
        scenario: The scenario.
        histories: The outages of each history.
        nested: Whether a worker may be part of several units that fail.
    """

    def __init__(self, scenario: Scenario, histories: Sequence[Outages], *, nested: bool) -> None:
        cluster, job, number = scenario.cluster, scenario.job, len(histories)
        self._cluster, self._job, self._quorum = cluster, job, scenario.quorum
        self._relaunches, self._split = job.strategy == "relaunch", job.model != "replicated"
        self._times, self._prices = _Times.of(scenario), price_table(cluster, job, scenario.costs)
        self._decisions = decision_table(scenario)
        self._calendar = Calendar(histories, ticks(scenario.costs.spawn_s))
        self._fleet: Fleet = NestedUnits(self._calendar, cluster.total) if nested else SeparateUnits(self._calendar)
        self._segments = Segments(number, job.save_every, job.buckets)
        target = None if job.steps is None else job.steps * cluster.workers
        self._progress = SimulatedProgress(number, target, self._segments)
        self._clocks, self._workers = Clocks.at_start(self._calendar), WorkerStates.at_start(number, cluster.total)
        self._recoveries, self._totals = RecoveryStates.at_start(number), Totals(number)

    def run(self, tell: Callable[[float], None] = lambda share: None) -> Sweep:
        """Run until all histories are over; ``tell`` is called now and then with the share that is done, at most 1."""
        calendar, clocks, horizon = self._calendar, self._clocks, self._times.horizon
        active = np.arange(len(clocks.phase))
        for turn in itertools.count(1):
            if not active.size:
                break
            down = calendar.start[clocks.next_down[active]]
            ready = calendar.ready[calendar.by_ready[clocks.next_ready[active]]]
            outside = np.minimum(down, ready)
            wake = clocks.wake[active]
            goes_on = ((wake < outside) | clocks.at_once[active]) & (wake < horizon)
            if goes_on.any():
                self._go_on(active[goes_on], wake[goes_on])
            else:
                ends = np.minimum(outside, wake) >= horizon
                falls = ~ends & (down <= ready)
                rises = ~ends & ~falls
                if ends.any():
                    self._close(active[ends], np.full(int(ends.sum()), horizon))
                if falls.any():
                    self._go_down(active[falls], down[falls])
                if rises.any():
                    self._come_up(active[rises], ready[rises])
            if turn % _TELL_EVERY == 0:
                left = np.clip(1 - np.minimum(outside, wake) / horizon, 0, 1).sum()
                tell(float(1 - left / len(clocks.phase)))
            active = active[clocks.phase[active] != Phase.OVER]
        return self._sweep()

    def _go_on(self, i: Ticks, now: Ticks) -> None:
        self._clocks.at_once[i] = False
        phase = self._clocks.phase[i]
        for which, act in (
            (Phase.DETECT, self._detect),
            (Phase.RECOVER, self._end_recovery),
            (Phase.RUN, self._end_run),
            (Phase.START, self._end_start),
            (Phase.WAIT, self._try_start),
        ):
            some = phase == which
            if some.any():
                act(i[some], now[some])

    def _spend(self, i: Ticks, now: Ticks, part: str) -> None:
        self._totals.parts[part][i] += now - self._clocks.since[i]
        self._clocks.since[i] = now

    # -- machines

    def _go_down(self, i: Ticks, now: Ticks) -> None:
        workers, totals = self._workers, self._totals
        outage = self._clocks.next_down[i]
        self._clocks.next_down[i] += 1
        losses = self._fleet.go_down(outage, now, workers.admitted[i], workers.admitting[i])
        workers.available[i] -= losses.gone
        workers.set_members(i, now, workers.members[i] - losses.members)
        workers.killed[i] += losses.members
        totals.failures[i] += losses.members > 0
        totals.lost_workers[i] += losses.members
        hit = (losses.members > 0) | (losses.newcomers > 0)
        if hit.any():
            self._lose(i[hit], now[hit])

    def _come_up(self, i: Ticks, now: Ticks) -> None:
        outage = self._calendar.by_ready[self._clocks.next_ready[i]]
        self._clocks.next_ready[i] += 1
        came = self._fleet.come_up(outage, now)
        self._workers.available[i] += came
        phase = self._clocks.phase[i]
        waits, runs = (came > 0) & (phase == Phase.WAIT), (came > 0) & (phase == Phase.RUN)
        if waits.any():
            self._try_start(i[waits], now[waits])
        if runs.any():
            self._plan(i[runs], now[runs])

    # -- training

    def _resume(self, i: Ticks, now: Ticks, sums: Ticks | None = None) -> None:
        """Start training: a step begins, or continues with its completed all-reduces."""
        members, into = self._workers.members[i], np.zeros_like(now)
        prices, buckets, eager = self._prices, self._job.buckets, self._job.update == "eager"
        compute, rest, exposed = prices.compute[members], prices.sums[members], prices.exposed[members]
        last = compute - -buckets * rest // (buckets + 1)
        if sums is not None:
            continued = np.maximum(compute - -sums * rest // (buckets + 1), 1)
            into = np.where(sums >= 0, np.where(eager & (sums == buckets), last + exposed, continued), 0)
        self._clocks.phase[i], self._clocks.since[i] = Phase.RUN, now
        self._workers.killed[i] = 0
        recoveries = self._recoveries
        recoveries.from_snapshot[i], recoveries.is_down[i], recoveries.is_admission[i] = False, False, False
        self._segments.begin(
            i,
            start=now,
            first=self._progress.step[i],
            into=into,
            compute=compute,
            sums=rest,
            waits=last if eager else compute + rest,
            exposed=exposed,
            hold=self._times.save,
            behind=self._times.save_background,
            weight=prices.weight[members],
        )
        self._plan(i, now)

    def _plan(self, i: Ticks, now: Ticks) -> None:
        """Schedule the end of training or the next admission of newcomers."""
        workers, horizon = self._workers, self._times.horizon
        ends, left = np.full(len(i), horizon), self._progress.left(i)
        if left is not None:
            ends = self._segments.until_step(i, left)
        self._clocks.ends[i] = np.minimum(ends, horizon)
        if not self._relaunches:
            # Where a failed member is not detected before the horizon, no more workers are admitted.
            admits = (workers.available[i] > workers.members[i]) & (workers.killed[i] == 0)
            if admits.any():
                ends[admits] = np.minimum(ends[admits], self._segments.boundary(i[admits], now[admits]))
        self._clocks.wake[i] = ends

    def _end_segment(self, i: Ticks, now: Ticks) -> None:
        position = self._segments.at(i, now)
        self._progress.settle(i, now, position.saves)
        self._progress.add(i, now, position)
        self._clocks.since[i] = now

    def _end_run(self, i: Ticks, now: Ticks) -> None:
        """End the job, or admit newcomers."""
        self._end_segment(i, now)
        if (done := self._progress.is_done(i)).any():
            self._totals.finished[i[done]] = True
            self._close_books(i[done], now[done])
            i, now = i[~done], now[~done]
        workers = self._workers
        self._recoveries.is_admission[i] = True
        workers.admitting[i], workers.newcomers[i] = now, workers.available[i] - workers.members[i]
        self._clocks.since[i] = now
        self._recover(i, now, self._prices.regroup[workers.members[i]] + self._times.admission)

    # -- failures

    def _lose(self, i: Ticks, now: Ticks) -> None:
        """A member failed, or a newcomer that was about to be admitted: the others will detect it."""
        phase = self._clocks.phase[i]
        detects = np.ones(len(i), dtype=bool)
        if (runs := phase == Phase.RUN).any():
            detects[runs] = self._stop_training(i[runs], now[runs])
        if (starts := phase == Phase.START).any():
            self._spend_start(i[starts], now[starts])
        if (recovers := phase == Phase.RECOVER).any():
            self._break_off(i[recovers], now[recovers])
        if not detects.all():
            self._plan(i[~detects], now[~detects])
        i, now = i[detects], now[detects]
        self._progress.spoil(i)
        self._workers.admitting[i], self._recoveries.is_admission[i] = NEVER_ADMITTED, False
        self._clocks.phase[i], self._clocks.at_once[i] = Phase.DETECT, False
        self._clocks.wake[i] = np.maximum(now, self._clocks.since[i]) + self._times.detect

    def _stop_training(self, i: Ticks, now: Ticks) -> Flags:
        """Let survivors train until an all-reduce fails.

        Return whether one does before the job is done or the horizon is reached.
        """
        segments, buckets = self._segments, self._job.buckets
        position = there = segments.at(i, now)
        missed = now
        if (waiting := segments.waiting(i, position)).any():
            missed = now + waiting
            there = segments.at(i, missed)
        if not self._split:
            rest, there = segments.missed(i, there)
            missed = missed + rest
        detects = missed < self._clocks.ends[i]
        if not detects.all():
            i, now, missed = i[detects], now[detects], missed[detects]
            position, there = (TrainingPosition(*(column[detects] for column in one)) for one in (position, there))
        # A checkpoint that would be complete only after the failure, before its detection, does not count.
        self._progress.settle(i, now, position.saves)
        self._progress.add(i, missed, there)
        self._clocks.since[i] = missed
        compute = segments.compute[i]
        sums = segments.step[i] - compute - (segments.waited[i] - segments.waits[i])
        done = np.minimum((there.into - compute) * (buckets + 1) // sums, buckets)
        self._recoveries.sums[i] = np.where(there.into >= compute, done, -1)
        self._recoveries.case[i] = FailureCase.STEP
        return detects

    def _detect(self, i: Ticks, now: Ticks) -> None:
        """All survivors know of the failure: they recover, or the job is restarted."""
        self._spend(i, now, "detect")
        recoveries, members = self._recoveries, self._workers.members
        gone = recoveries.is_down[i] | (members[i] == 0) | self._relaunches
        if gone.any():
            self._stop(i[gone], now[gone])
        i, now = i[~gone], now[~gone]
        column = self._decisions.column(recoveries.case[i], members[i] >= self._job.min_workers)
        takes = self._decisions.takes.take(column, axis=1)
        takes[RecoveryStage.REGROUP] = self._prices.regroup[members[i]]
        takes[RecoveryStage.UNDO] = takes[RecoveryStage.UNDO] * np.maximum(recoveries.sums[i], 0) // self._job.buckets
        recoveries.decision[i], recoveries.takes[:, i] = column, takes
        self._recover(i, now, takes.sum(axis=0))

    # -- recoveries

    def _recover(self, i: Ticks, now: Ticks, takes: Ticks) -> None:
        """Begin a recovery, or an admission, with these durations."""
        clocks = self._clocks
        clocks.phase[i], clocks.wake[i], clocks.at_once[i] = Phase.RECOVER, now + takes, takes == 0

    def _break_off(self, i: Ticks, now: Ticks) -> None:
        """A worker failed during a recovery: it begins again."""
        recoveries, reached = self._recoveries, self._reached(i, now)
        self._spend_recovery(i, now)
        self._take_effect(i[reached.decided], reached.loading[reached.decided])
        self._progress.settle_pending(i, now)
        loads = self._decisions.loads[recoveries.decision[i]]
        case = np.where(reached.decided & loads, FailureCase.LOADING, recoveries.case[i])
        between = recoveries.is_admission[i] | (reached.loaded & loads)
        recoveries.case[i] = np.where(between, FailureCase.BOUNDARY, case)

    def _reached(self, i: Ticks, now: Ticks) -> _Reached:
        spent, takes = now - self._clocks.since[i], self._recoveries.takes.take(i, axis=1)
        recovers = ~self._recoveries.is_admission[i]
        decided = takes[RecoveryStage.REGROUP]
        loading = decided + takes[RecoveryStage.UNDO] + takes[RecoveryStage.RESTART]
        loaded = loading + takes[RecoveryStage.LOAD]
        return _Reached(*(recovers & ((spent > ends) | (ends == 0)) for ends in (decided, loading, loaded)))

    def _spend_recovery(self, i: Ticks, now: Ticks) -> None:
        if (admits := self._recoveries.is_admission[i]).any():
            self._spend(i[admits], now[admits], "rejoin")
            i, now = i[~admits], now[~admits]
        left = now - self._clocks.since[i]
        self._clocks.since[i] = now
        for stage, takes in zip(RecoveryStage, self._recoveries.takes.take(i, axis=1), strict=True):
            spent = np.minimum(left, takes)
            self._totals.parts[PART_OF[stage]][i] += spent
            left -= spent

    def _take_effect(self, i: Ticks, loading: Flags) -> None:
        """Apply a decision's losses: what it discards and, while a checkpoint is loaded, all work since it.

        A snapshot's content is not lost.
        """
        decisions, column = self._decisions, self._recoveries.decision[i]
        goes_back, from_snapshot = decisions.goes_back[column], self._recoveries.from_snapshot
        self._progress.discard(i[decisions.discards[column]])
        self._progress.go_back(i[goes_back & loading & ~from_snapshot[i]])
        from_snapshot[i] |= decisions.loads[column] & ~goes_back

    def _end_recovery(self, i: Ticks, now: Ticks) -> None:
        admits = self._recoveries.is_admission[i]
        self._spend_recovery(i, now)
        self._take_effect(i[~admits], ~admits[~admits])
        if admits.any():
            self._admit(i[admits], now[admits])
        i, now = i[~admits], now[~admits]
        column = self._recoveries.decision[i]
        stops, resumes = self._decisions.stops[column], self._decisions.resumes[column]
        if stops.any():
            self._progress.secure(i[stops])
            self._stop(i[stops], now[stops])
        i, now, resumes = i[~stops], now[~stops], resumes[~stops]
        sums = self._recoveries.sums[i]
        left_out = resumes & (sums < self._job.buckets)
        seats = np.minimum(self._workers.killed[i], self._cluster.workers)
        self._totals.lost_slices[i] += np.where(left_out, seats, 0)
        self._resume(i, now, np.where(resumes, sums, _REPEATS))

    def _admit(self, i: Ticks, now: Ticks) -> None:
        workers = self._workers
        self._totals.joins[i] += 1
        workers.set_members(i, now, workers.members[i] + workers.newcomers[i])
        workers.admitted[i], workers.admitting[i] = workers.admitting[i], NEVER_ADMITTED
        self._resume(i, now)

    # -- starting

    def _stop(self, i: Ticks, now: Ticks) -> None:
        """No member is left: the work since the newest checkpoint is lost."""
        self._progress.go_back(i)
        self._workers.set_members(i, now, 0)
        self._workers.admitted[i], self._recoveries.is_down[i] = NEVER_ADMITTED, True
        self._clocks.phase[i], self._clocks.since[i] = Phase.WAIT, now
        self._try_start(i, now)

    def _try_start(self, i: Ticks, now: Ticks) -> None:
        enough = self._workers.available[i] >= self._quorum
        self._clocks.wake[i[~enough]] = FAR
        i, now = i[enough], now[enough]
        self._spend(i, now, "wait")
        self._workers.set_members(i, now, self._workers.available[i])
        self._workers.admitted[i] = now
        begins = now == 0  # the job's first start loses nothing
        if begins.any():
            self._resume(i[begins], now[begins])
        i, now = i[~begins], now[~begins]
        self._totals.starts[i] += 1
        self._clocks.phase[i], self._clocks.wake[i] = Phase.START, now + self._times.restart + self._times.load

    def _spend_start(self, i: Ticks, now: Ticks) -> None:
        starting = np.minimum(now - self._clocks.since[i], self._times.restart)
        self._totals.parts["restart"][i] += starting
        self._clocks.since[i] += starting
        self._spend(i, now, "load")

    def _end_start(self, i: Ticks, now: Ticks) -> None:
        self._spend_start(i, now)
        self._resume(i, now)

    # -- the end

    def _close(self, i: Ticks, now: Ticks) -> None:
        """The horizon is reached."""
        phase = self._clocks.phase[i]
        for which, part in ((Phase.DETECT, "detect"), (Phase.WAIT, "wait")):
            self._spend(i[phase == which], now[phase == which], part)
        if (runs := phase == Phase.RUN).any():
            self._end_segment(i[runs], now[runs])
        if (starts := phase == Phase.START).any():
            self._spend_start(i[starts], now[starts])
        if (recovers := phase == Phase.RECOVER).any():
            some, at = i[recovers], now[recovers]
            reached = self._reached(some, at)
            self._spend_recovery(some, at)
            self._take_effect(some[reached.decided], reached.loading[reached.decided])
        self._close_books(i, now)

    def _close_books(self, i: Ticks, now: Ticks) -> None:
        self._workers.set_members(i, now, 0)
        self._totals.total_ns[i], self._clocks.phase[i] = now, Phase.OVER

    def _sweep(self) -> Sweep:
        progress, prices, totals, workers = self._progress, self._prices, self._totals, self._cluster.workers
        full = sum(int(one[workers]) for one in (prices.compute, prices.sums, prices.exposed))
        ideal = [
            weight * full // workers for weight in progress.weight.tolist()
        ]  # intermediate values may exceed 64 bits
        return Sweep(
            parts_ns=totals.parts
            | {"useful": progress.ran, "lost": progress.lost, "save": totals.parts["save"] + progress.held},
            total_ns=totals.total_ns,
            ideal_ns=np.array(ideal, dtype=np.int64),
            finished=totals.finished,
            steps=progress.step,
            failures=totals.failures,
            lost_workers=totals.lost_workers,
            joins=totals.joins,
            starts=totals.starts,
            lost_slices=totals.lost_slices,
            member_ns=self._workers.member_ns,
        )
