"""Many histories at once, each array an entry for each: the event body's rules, with the protocol's answers from a table.

Every history is at a time of its own. All take a turn together: first whatever comes by itself before the next outage, then
the next outage, or the end of one. What comes out is that of the event body to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.checks import ticks
from holdfast_lab.simulate.failures import Outages
from holdfast_lab.simulate.fates import Case, fates, welcome
from holdfast_lab.simulate.fleets import Calendar, Fleets, NestedUnits, SeparateUnits
from holdfast_lab.simulate.outcome import PARTS, Sweep
from holdfast_lab.simulate.progresses import Progresses
from holdfast_lab.simulate.scenario import Scenario
from holdfast_lab.simulate.strides import FAR, Places, Strides

Ticks = npt.NDArray[np.int64]
_RUN, _DETECT, _MEET, _START, _WAIT, _OVER = range(6)
_NOBODY = -1
_NONE = np.int64(-1)
_SEGMENTS = ("regroup", "restart", "load", "save")
"""What a meeting after a failure takes, in this order."""


class Lockstep:
    """Carries out what the strategies decide, in many histories.

    Args:
        scenario: What is simulated.
        histories: The outages of each.
        nested: A worker may be part of several units that fail.
    """

    def __init__(self, scenario: Scenario, histories: Sequence[Outages], *, nested: bool) -> None:
        job, costs, number = scenario.job, scenario.costs, len(histories)
        self._scenario, self._table = scenario, costs.table(scenario)
        self._horizon, self._quorum = ticks(scenario.horizon_s), scenario.quorum
        self._relaunches, self._split = job.strategy == "relaunch", job.model != "replicated"
        self._detect, self._save, self._behind, self._start, self._load = (
            ticks(one) for one in (costs.detect_s, costs.save_s, costs.save_background_s, costs.restart_s, costs.load_s)
        )
        self._welcome, table = welcome(scenario), fates(scenario)
        self._fates = {
            name: np.array([getattr(table[case, enough], name) for case in Case for enough in (False, True)])
            for name in ("restart", "load", "save", "undo", "discards", "goes_back", "loads", "goes_on", "stops")
        }
        self._calendar = Calendar(histories, ticks(costs.spawn_s))
        total = scenario.cluster.total
        self._fleets: Fleets = NestedUnits(self._calendar, total) if nested else SeparateUnits(self._calendar)
        self._strides = Strides(number, job.save_every, job.buckets)
        target = None if job.steps is None else job.steps * scenario.cluster.workers
        self._progress = Progresses(number, target, self._strides)

        def zeros() -> Ticks:
            return np.zeros(number, dtype=np.int64)

        self.phase, self.wake, self.since = np.full(number, _WAIT), zeros(), zeros()
        self.next_down, self.next_ready = self._calendar.begin.copy(), self._calendar.begin.copy()
        self.available, self.members, self.members_since = np.full(number, total), zeros(), zeros()
        self.admitted, self.admitting = np.full(number, _NOBODY), np.full(number, _NOBODY)
        self.joiners, self.killed, self.sums = zeros(), zeros(), zeros()
        self.case, self.fate, self.regroup, self.undo, self.ends = zeros(), zeros(), zeros(), zeros(), zeros()
        self.is_down, self.snapshot = np.ones(number, dtype=bool), np.zeros(number, dtype=bool)
        self.joining, self.at_once = np.zeros(number, dtype=bool), np.zeros(number, dtype=bool)
        self.parts = {part: zeros() for part in PARTS}
        self.counts = {name: zeros() for name in ("failures", "lost_workers", "joins", "starts", "lost_slices")}
        self.member_ns, self.total, self.finished = np.zeros(number), zeros(), np.zeros(number, dtype=bool)

    def run(self) -> Sweep:
        """Go on until all histories are over."""
        calendar = self._calendar
        active = np.arange(len(self.phase))
        while active.size:
            down = calendar.start[self.next_down[active]]
            ready = calendar.ready[calendar.by_ready[self.next_ready[active]]]
            outside = np.minimum(down, ready)
            wake = self.wake[active]
            first = np.minimum(np.minimum(outside, wake), self._horizon)
            goes_on = ((wake < outside) | self.at_once[active]) & (wake < self._horizon)
            if goes_on.any():
                self._go_on(active[goes_on], wake[goes_on])
            else:
                ends = first >= self._horizon
                falls = ~ends & (down <= ready)
                rises = ~ends & ~falls
                if ends.any():
                    self._close(active[ends], np.full(int(ends.sum()), self._horizon))
                if falls.any():
                    self._go_down(active[falls], down[falls])
                if rises.any():
                    self._come_up(active[rises], ready[rises])
            active = active[self.phase[active] != _OVER]
        return self._sweep()

    def _go_on(self, i: Ticks, now: Ticks) -> None:
        self.at_once[i] = False
        phase = self.phase[i]
        for which, act in (
            (_DETECT, self._notice),
            (_MEET, self._leave_meeting),
            (_RUN, self._end_run),
            (_START, self._end_start),
            (_WAIT, self._try_start),
        ):
            some = phase == which
            if some.any():
                act(i[some], now[some])

    def _spend(self, i: Ticks, now: Ticks, part: str) -> None:
        self.parts[part][i] += now - self.since[i]
        self.since[i] = now

    # -- machines

    def _go_down(self, i: Ticks, now: Ticks) -> None:
        outage = self.next_down[i]
        self.next_down[i] += 1
        struck = self._fleets.go_down(outage, now, self.admitted[i], self.admitting[i])
        self.available[i] -= struck.gone
        self._set_members(i, now, self.members[i] - struck.members)
        self.killed[i] += struck.members
        self.counts["failures"][i] += struck.members > 0
        self.counts["lost_workers"][i] += struck.members
        hit = (struck.members > 0) | (struck.newcomers > 0)
        if hit.any():
            self._lose(i[hit], now[hit])

    def _come_up(self, i: Ticks, now: Ticks) -> None:
        outage = self._calendar.by_ready[self.next_ready[i]]
        self.next_ready[i] += 1
        came = self._fleets.come_up(outage, now)
        self.available[i] += came
        waits, runs = (came > 0) & (self.phase[i] == _WAIT), (came > 0) & (self.phase[i] == _RUN)
        if waits.any():
            self._try_start(i[waits], now[waits])
        if runs.any():
            self._plan(i[runs], now[runs])

    def _set_members(self, i: Ticks, now: Ticks, members: Ticks) -> None:
        self.member_ns[i] += self.members[i] * (now - self.members_since[i]).astype(np.float64)
        self.members[i], self.members_since[i] = members, now

    # -- training

    def _resume(self, i: Ticks, now: Ticks, sums: Ticks | None = None) -> None:
        members, into = self.members[i], np.zeros_like(now)
        compute, rest, exposed = (self._table[name][members] for name in ("compute", "sums", "exposed"))
        buckets, eager = self._scenario.job.buckets, self._scenario.job.update == "eager"
        last = compute - -buckets * rest // (buckets + 1)
        if sums is not None:
            going_on = np.maximum(compute - -sums * rest // (buckets + 1), 1)
            into = np.where(sums >= 0, np.where(eager & (sums == buckets), last + exposed, going_on), 0)
        self.phase[i], self.since[i], self.killed[i] = _RUN, now, 0
        self.snapshot[i], self.is_down[i], self.joining[i] = False, False, False
        self._strides.begin(
            i,
            start=now,
            first=self._progress.step[i],
            into=into,
            compute=compute,
            sums=rest,
            waits=last if eager else compute + rest,
            exposed=exposed,
            hold=self._save,
            behind=self._behind,
            weight=self._table["weight"][members],
        )
        self._plan(i, now)

    def _plan(self, i: Ticks, now: Ticks) -> None:
        ends, left = np.full(len(i), self._horizon), self._progress.left(i)
        if left is not None:
            ends = self._strides.until_step(i, left)
        self.ends[i] = np.minimum(ends, self._horizon)
        if not self._relaunches:
            lets_in = (self.available[i] > self.members[i]) & (self.killed[i] == 0)
            if lets_in.any():
                ends[lets_in] = np.minimum(ends[lets_in], self._strides.boundary(i[lets_in], now[lets_in]))
        self.wake[i] = ends

    def _end_stretch(self, i: Ticks, now: Ticks) -> None:
        place = self._strides.at(i, now)
        self._progress.settle(i, now, place.saves)
        self._progress.add(i, now, place)
        self.since[i] = now

    # -- failures

    def _lose(self, i: Ticks, now: Ticks) -> None:
        phase = self.phase[i]
        notices = np.ones(len(i), dtype=bool)
        if (runs := phase == _RUN).any():
            notices[runs] = self._stop_training(i[runs], now[runs])
        if (starts := phase == _START).any():
            self._spend_start(i[starts], now[starts])
        if (meets := phase == _MEET).any():
            self._break_off(i[meets], now[meets])
        if not notices.all():
            self._plan(i[~notices], now[~notices])
        i, now = i[notices], now[notices]
        self._progress.spoil(i)
        self.phase[i], self.admitting[i], self.joining[i], self.at_once[i] = _DETECT, _NOBODY, False, False
        self.wake[i] = np.maximum(now, self.since[i]) + self._detect

    def _stop_training(self, i: Ticks, now: Ticks) -> npt.NDArray[np.bool_]:
        strides, buckets = self._strides, self._scenario.job.buckets
        place = there = strides.at(i, now)
        missed = now
        if (waiting := strides.waiting(i, place)).any():
            missed = now + waiting
            there = strides.at(i, missed)
        if not self._split:
            rest, there = strides.missed(i, there)
            missed = missed + rest
        notices = missed < self.ends[i]
        if not notices.all():
            i, now, missed = i[notices], now[notices], missed[notices]
            place, there = (Places(*(column[notices] for column in one)) for one in (place, there))
        self._progress.settle(i, now, place.saves)  # what was to be complete when it is missed is not
        self._progress.add(i, missed, there)
        self.since[i] = missed
        compute = strides.compute[i]
        sums = strides.step[i] - compute - (strides.waited[i] - strides.waits[i])
        done = np.minimum((there.into - compute) * (buckets + 1) // sums, buckets)
        self.sums[i], self.case[i] = np.where(there.into >= compute, done, -1), Case.STEP
        return notices

    def _notice(self, i: Ticks, now: Ticks) -> None:
        self._spend(i, now, "detect")
        gone = self.is_down[i] | (self.members[i] == 0) | self._relaunches
        if gone.any():
            self._stop(i[gone], now[gone])
        i, now = i[~gone], now[~gone]
        enough = self.members[i] >= self._scenario.job.min_workers
        fate = self.case[i] * 2 + enough
        self.fate[i], self.phase[i], self.regroup[i] = fate, _MEET, self._table["regroup"][self.members[i]]
        self.undo[i] = self._fates["undo"][fate] * np.maximum(self.sums[i], 0) // self._scenario.job.buckets
        takes = self.regroup[i] + self.undo[i]
        for segment in _SEGMENTS[1:]:
            takes = takes + self._fates[segment][fate]
        self.wake[i], self.at_once[i] = now + takes, takes == 0

    # -- meetings

    def _break_off(self, i: Ticks, now: Ticks) -> None:
        """Somebody died in a meeting: it begins anew."""
        decided, loading, loaded = self._reached(i, now)
        self._spend_meeting(i, now)
        self._take_effect(i[decided], loading[decided])
        self._progress.settle_pending(i, now)
        loads = self._fates["loads"][self.fate[i]]
        case = np.where(decided & loads, Case.LOADING, self.case[i])
        self.case[i] = np.where(self.joining[i] | (loaded & loads), Case.BOUNDARY, case)

    def _reached(self, i: Ticks, now: Ticks) -> Iterator[npt.NDArray[np.bool_]]:
        """Yield who has decided, who has come to loading, and who is past it, if there is anything to load."""
        fate, reached = self.fate[i], np.zeros_like(now)
        for takes in (self.regroup[i], self.undo[i] + self._fates["restart"][fate], self._fates["load"][fate]):
            reached = reached + takes
            yield ~self.joining[i] & ((now - self.since[i] > reached) | (reached == 0))

    def _spend_meeting(self, i: Ticks, now: Ticks) -> None:
        if (joins := self.joining[i]).any():
            self._spend(i[joins], now[joins], "rejoin")
        i, left = i[~joins], (now - self.since[i])[~joins]
        self.since[i] = now[~joins]
        for segment in _SEGMENTS:
            takes = self.regroup[i] + self.undo[i] if segment == "regroup" else self._fates[segment][self.fate[i]]
            spent = np.minimum(left, takes)
            self.parts[segment][i] += spent
            left -= spent

    def _take_effect(self, i: Ticks, loading: npt.NDArray[np.bool_]) -> None:
        """Lose what a decision loses, and those what they go back over who have come to loading; what a snapshot holds is lost no more."""
        fate = {name: self._fates[name][self.fate[i]] for name in ("discards", "goes_back", "loads")}
        self._progress.discard(i[fate["discards"]])
        self._progress.go_back(i[fate["goes_back"] & loading & ~self.snapshot[i]])
        self.snapshot[i] |= fate["loads"] & ~fate["goes_back"]

    def _leave_meeting(self, i: Ticks, now: Ticks) -> None:
        joins = self.joining[i]
        self._spend_meeting(i, now)
        self._take_effect(i[~joins], ~joins[~joins])
        if joins.any():
            self._let_in(i[joins], now[joins])
        i, now = i[~joins], now[~joins]
        stops, goes_on = self._fates["stops"][self.fate[i]], self._fates["goes_on"][self.fate[i]]
        if stops.any():
            self._progress.secure(i[stops])
            self._stop(i[stops], now[stops])
        i, now, goes_on = i[~stops], now[~stops], goes_on[~stops]
        left_out = goes_on & (self.sums[i] < self._scenario.job.buckets)
        seats = np.minimum(self.killed[i], self._scenario.cluster.workers)
        self.counts["lost_slices"][i] += np.where(left_out, seats, 0)
        self._resume(i, now, np.where(goes_on, self.sums[i], _NONE))

    def _let_in(self, i: Ticks, now: Ticks) -> None:
        self.counts["joins"][i] += 1
        self._set_members(i, now, self.members[i] + self.joiners[i])
        self.admitted[i], self.admitting[i] = self.admitting[i], _NOBODY
        self._resume(i, now)

    def _end_run(self, i: Ticks, now: Ticks) -> None:
        """Train to the end, or to where newcomers are let in."""
        self._end_stretch(i, now)
        if (done := self._progress.is_done(i)).any():
            self.finished[i[done]] = True
            self._close_books(i[done], now[done])
            i, now = i[~done], now[~done]
        self.joining[i], self.admitting[i], self.joiners[i] = True, now, self.available[i] - self.members[i]
        self.phase[i], self.since[i] = _MEET, now
        takes = self._table["regroup"][self.members[i]] + self._welcome
        self.wake[i], self.at_once[i] = now + takes, takes == 0

    # -- starting

    def _stop(self, i: Ticks, now: Ticks) -> None:
        self._progress.go_back(i)
        self._set_members(i, now, np.zeros_like(now))
        self.admitted[i], self.is_down[i], self.phase[i], self.since[i] = _NOBODY, True, _WAIT, now
        self.wake[i] = FAR
        self._try_start(i, now)

    def _try_start(self, i: Ticks, now: Ticks) -> None:
        enough = self.available[i] >= self._quorum
        self.wake[i[~enough]] = FAR
        i, now = i[enough], now[enough]
        self._spend(i, now, "wait")
        self._set_members(i, now, self.available[i])
        self.admitted[i] = now
        begins = now == 0
        if begins.any():
            self._resume(i[begins], now[begins])
        i, now = i[~begins], now[~begins]
        self.counts["starts"][i] += 1
        self.phase[i], self.wake[i] = _START, now + self._start + self._load

    def _spend_start(self, i: Ticks, now: Ticks) -> None:
        starting = np.minimum(now - self.since[i], self._start)
        self.parts["restart"][i] += starting
        self.since[i] += starting
        self._spend(i, now, "load")

    def _end_start(self, i: Ticks, now: Ticks) -> None:
        self._spend_start(i, now)
        self._resume(i, now)

    # -- the end

    def _close(self, i: Ticks, now: Ticks) -> None:
        phase = self.phase[i]
        for which, part in ((_DETECT, "detect"), (_WAIT, "wait")):
            self._spend(i[phase == which], now[phase == which], part)
        if (runs := phase == _RUN).any():
            self._end_stretch(i[runs], now[runs])
        if (starts := phase == _START).any():
            self._spend_start(i[starts], now[starts])
        if (meets := phase == _MEET).any():
            some, at = i[meets], now[meets]
            decided, loading, _ = self._reached(some, at)
            self._spend_meeting(some, at)
            self._take_effect(some[decided], loading[decided])
        self._close_books(i, now)

    def _close_books(self, i: Ticks, now: Ticks) -> None:
        self._set_members(i, now, np.zeros_like(now))
        self.total[i], self.phase[i] = now, _OVER

    def _sweep(self) -> Sweep:
        progress, workers = self._progress, self._scenario.cluster.workers
        full = sum(int(self._table[part][workers]) for part in ("compute", "sums", "exposed"))
        ideal = [weight * full // workers for weight in progress.weight.tolist()]  # more than 64 bits on the way
        return Sweep(
            parts_ns=self.parts
            | {"useful": progress.ran, "lost": progress.lost, "save": self.parts["save"] + progress.held},
            total_ns=self.total,
            ideal_ns=np.array(ideal, dtype=np.int64),
            finished=self.finished,
            steps=progress.step,
            member_ns=self.member_ns,
            **self.counts,
        )
