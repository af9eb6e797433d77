"""One history, event by event: executes the strategies' decisions, which it looks up in a table.

Outages come in time order, and the phase that the job is in has a scheduled end; whichever is first comes next.

Every function is also compiled: see :mod:`~holdfast_lab.simulate.compiled`.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast_lab.simulate.decision_table import FailureCase
from holdfast_lab.simulate.history_inputs import Calendar, Parameters
from holdfast_lab.simulate.history_state import (
    DETECT,
    FAR,
    NEVER_ADMITTED,
    OVER,
    RECOVER,
    RUN,
    START,
    WAIT,
    HistoryState,
)
from holdfast_lab.simulate.training import (
    REPEATS,
    add,
    detection,
    discard,
    end_segment,
    fall_behind,
    go_back,
    plan,
    position_at,
    resume,
    secure,
    settle,
    settle_written,
)

# Plain numbers, because those of an enumeration are slow.
_IN_STEP, _AT_BOUNDARY, _LOADING = (int(case) for case in FailureCase)


class _Reached(NamedTuple):
    """Progress of a recovery.

    Args:
        decided: The survivors have regrouped and decided.
        loading: They have started loading, if there is anything to load.
        loaded: They have finished loading.
    """

    decided: bool
    loading: bool
    loaded: bool


def run_history(state: HistoryState, given: Parameters, calendar: Calendar) -> None:
    """Run one history from its begin until the job is done or the horizon is reached."""
    while state.phase != OVER:
        down = calendar.outages[state.next_down].start
        ready = calendar.outages[calendar.outages[state.next_ready].by_ready].ready
        outside, wake = min(down, ready), state.wake
        if (wake < outside or state.at_once) and wake < given.horizon:
            state.at_once = False
            _end_phase(state, given, wake)
        elif min(outside, wake) >= given.horizon:
            _close(state, given, given.horizon)
        elif down <= ready:
            _go_down(state, given, calendar, down)
        else:
            _come_up(state, given, calendar, ready)


def _end_phase(state: HistoryState, given: Parameters, now: int) -> None:
    phase = state.phase
    if phase == DETECT:
        _detect(state, given, now)
    elif phase == RECOVER:
        _end_recovery(state, given, now)
    elif phase == RUN:
        _end_run(state, given, now)
    elif phase == START:
        _spend_start(state, given, now)
        resume(state, given, now, REPEATS)
    else:
        _try_start(state, given, now)


def _set_members(state: HistoryState, now: int, members: int) -> None:
    state.member_ns += state.members * float(now - state.members_since)
    state.members, state.members_since = members, now


# -- machines


def _go_down(state: HistoryState, given: Parameters, calendar: Calendar, now: int) -> None:
    outage, ready_at = calendar.outages[state.next_down], calendar.ready_at
    state.next_down += 1
    gone = members = newcomers = 0
    for one in range(outage.cell, outage.cell + outage.cells):
        since, size = ready_at[one], min(calendar.size, calendar.total - one * calendar.size)
        if since <= now:
            gone += size
        if since <= state.admitted:
            members += size
        elif since <= state.admitting:
            newcomers += size
        ready_at[one] = max(outage.ready, since)
    state.available -= gone
    _set_members(state, now, state.members - members)
    if members > 0:
        state.killed += members
        state.failures += 1
        state.lost_workers += members
    if members > 0 or newcomers > 0:
        _lose(state, given, now)


def _come_up(state: HistoryState, given: Parameters, calendar: Calendar, now: int) -> None:
    outage = calendar.outages[calendar.outages[state.next_ready].by_ready]
    state.next_ready += 1
    came = 0
    for one in range(outage.cell, outage.cell + outage.cells):
        if calendar.ready_at[one] == now:
            came += min(calendar.size, calendar.total - one * calendar.size)
    state.available += came
    if came > 0 and state.phase == WAIT:
        _try_start(state, given, now)
    elif came > 0 and state.phase == RUN:
        plan(state, given, now)


def _end_run(state: HistoryState, given: Parameters, now: int) -> None:
    """End the job, or admit newcomers."""
    end_segment(state, given, now)
    if state.weight == given.target:
        state.finished = True
        _close_books(state, now)
        return
    state.is_admission, state.admitting = True, now
    state.newcomers = state.available - state.members
    _recover(state, now, given.prices[state.members].regroup + given.admission)


# -- failures


def _lose(state: HistoryState, given: Parameters, now: int) -> None:
    """A member failed, or a newcomer that was about to be admitted: the others will detect it."""
    if state.phase == RUN and not _stop_training(state, given, now):
        plan(state, given, now)
        return
    if state.phase == START:
        _spend_start(state, given, now)
    elif state.phase == RECOVER:
        _break_off(state, given, now)
    state.written_at = FAR  # a worker that held a part of that checkpoint failed
    state.admitting, state.is_admission = NEVER_ADMITTED, False
    state.phase, state.at_once = DETECT, False
    state.wake = max(now, state.since) + given.detect


def _stop_training(state: HistoryState, given: Parameters, now: int) -> bool:
    """Let survivors train until an all-reduce fails.

    Return whether one does before the job is done or the horizon is reached.
    """
    position = position_at(state, given, now)
    detected, there = detection(state, given, now, position)
    if detected >= state.ends:
        return False
    # A checkpoint that would be complete only after the failure, before its detection, does not count.
    settle(state, given, now, position.saves)
    add(state, given, detected, there)
    state.since, state.case, state.sums_done = detected, _IN_STEP, -1
    if there.into >= state.compute:
        sums = state.step_takes - state.compute - (state.waited - state.waits)
        state.sums_done = min((there.into - state.compute) * (given.buckets + 1) // sums, given.buckets)
    return True


def _detect(state: HistoryState, given: Parameters, now: int) -> None:
    """All survivors know of the failure: they recover, or the job is restarted."""
    state.in_detect += now - state.since
    state.since = now
    if state.is_down or state.members == 0 or given.relaunches:
        _stop(state, given, now)
        return
    state.decision = state.case * 2 + (state.members >= given.min_workers)
    decision = given.decisions[state.decision]
    state.regroup_takes = given.prices[state.members].regroup
    state.undo_takes = decision.undo * max(state.sums_done, 0) // given.buckets
    state.restart_takes, state.load_takes, state.save_takes = decision.restart, decision.load, decision.save
    others = state.undo_takes + state.restart_takes + state.load_takes + state.save_takes
    _recover(state, now, state.regroup_takes + others)


# -- recoveries


def _recover(state: HistoryState, now: int, takes: int) -> None:
    """Begin a recovery, or an admission, with this duration."""
    state.phase, state.wake, state.at_once = RECOVER, now + takes, takes == 0


def _break_off(state: HistoryState, given: Parameters, now: int) -> None:
    """A worker failed during a recovery: it begins again."""
    reached = _reached(state, now)
    _spend_recovery(state, now)
    if reached.decided:
        _take_effect(state, given, reached.loading)
    settle_written(state, now)
    loads = given.decisions[state.decision].loads
    if state.is_admission or (reached.loaded and loads):
        state.case = _AT_BOUNDARY
    elif reached.decided and loads:
        state.case = _LOADING


def _reached(state: HistoryState, now: int) -> _Reached:
    if state.is_admission:
        return _Reached(False, False, False)
    spent, decided = now - state.since, state.regroup_takes
    loading = decided + state.undo_takes + state.restart_takes
    loaded = loading + state.load_takes
    return _Reached(spent > decided or decided == 0, spent > loading or loading == 0, spent > loaded or loaded == 0)


def _spend_recovery(state: HistoryState, now: int) -> None:
    left = now - state.since
    state.since = now
    if state.is_admission:
        state.in_rejoin += left
        return
    regroup = min(left, state.regroup_takes + state.undo_takes)
    left -= regroup
    restart = min(left, state.restart_takes)
    left -= restart
    load = min(left, state.load_takes)
    state.in_regroup += regroup
    state.in_restart += restart
    state.in_load += load
    state.in_save += min(left - load, state.save_takes)


def _take_effect(state: HistoryState, given: Parameters, loading: bool) -> None:
    """Apply a decision's losses: what it discards and, while a checkpoint is loaded, all work since it.

    A snapshot's content is not lost.
    """
    decision = given.decisions[state.decision]
    if decision.discards:
        discard(state)
    if decision.goes_back and loading and not state.from_snapshot:
        go_back(state)
    if decision.falls_behind and loading:
        fall_behind(state, given)
    if decision.loads and not decision.goes_back:
        state.from_snapshot = True


def _end_recovery(state: HistoryState, given: Parameters, now: int) -> None:
    _spend_recovery(state, now)
    if state.is_admission:
        _admit(state, given, now)
        return
    _take_effect(state, given, True)
    decision = given.decisions[state.decision]
    if decision.stops:
        secure(state)
        _stop(state, given, now)
        return
    if decision.resumes and state.sums_done < given.buckets:
        state.lost_slices += min(state.killed, given.workers)
    resume(state, given, now, state.sums_done if decision.resumes else REPEATS)


def _admit(state: HistoryState, given: Parameters, now: int) -> None:
    state.joins += 1
    _set_members(state, now, state.members + state.newcomers)
    state.admitted, state.admitting = state.admitting, NEVER_ADMITTED
    resume(state, given, now, REPEATS)


# -- starting


def _stop(state: HistoryState, given: Parameters, now: int) -> None:
    """No member is left: the work since the newest checkpoint is lost."""
    go_back(state)
    _set_members(state, now, 0)
    state.admitted, state.is_down = NEVER_ADMITTED, True
    state.phase, state.since = WAIT, now
    _try_start(state, given, now)


def _try_start(state: HistoryState, given: Parameters, now: int) -> None:
    if state.available < given.quorum:
        state.wake = FAR
        return
    state.in_wait += now - state.since
    state.since = state.admitted = now
    _set_members(state, now, state.available)
    if now == 0:  # the job's first start loses nothing
        resume(state, given, now, REPEATS)
        return
    state.starts += 1
    state.phase, state.wake = START, now + given.restart + given.load


def _spend_start(state: HistoryState, given: Parameters, now: int) -> None:
    starting = min(now - state.since, given.restart)
    state.in_restart += starting
    state.in_load += now - state.since - starting
    state.since = now


# -- the end


def _close(state: HistoryState, given: Parameters, now: int) -> None:
    """The horizon is reached."""
    phase = state.phase
    if phase == DETECT:
        state.in_detect += now - state.since
    elif phase == WAIT:
        state.in_wait += now - state.since
    elif phase == RUN:
        end_segment(state, given, now)
    elif phase == START:
        _spend_start(state, given, now)
    elif phase == RECOVER:
        reached = _reached(state, now)
        _spend_recovery(state, now)
        if reached.decided:
            _take_effect(state, given, reached.loading)
    _close_books(state, now)


def _close_books(state: HistoryState, now: int) -> None:
    _set_members(state, now, 0)
    state.total_ns, state.phase = now, OVER
