"""Undisturbed training of one history, and what of it is done, saved and lost.

All steps of a segment have the same duration, so one division gives the position at any time. The time from the end of
one checkpoint to the end of the next is a cycle.

Every function is also compiled: see :mod:`~holdfast_lab.simulate.compiled`.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast_lab.simulate.history_inputs import NO_END, Parameters
from holdfast_lab.simulate.history_state import FAR, RUN, HistoryState

REPEATS = -1
"""In place of a number of all-reduces: the step in progress is computed again."""


class TrainingPosition(NamedTuple):
    """The position of training.

    Args:
        step: The step in progress.
        into: Elapsed time of the step, nanoseconds; 0 while training is held for a checkpoint.
        hold_left: How long training is still held for a checkpoint, 0 if it is not.
        saves: Checkpoints of the segment that no longer hold training.
        ran: Work since the segment began, nanoseconds.
    """

    step: int
    into: int
    hold_left: int
    saves: int
    ran: int


class Checkpoint(NamedTuple):
    """The content of a checkpoint: the steps before it, their weight, and the work in them."""

    step: int
    weight: int
    ran: int


def resume(state: HistoryState, given: Parameters, now: int, sums_done: int) -> None:
    """Start training: a step begins, or continues with its completed all-reduces."""
    price, buckets = given.prices[state.members], given.buckets
    compute, sums, exposed = price.compute, price.sums, price.exposed
    last = compute - -buckets * sums // (buckets + 1)
    into = 0
    if sums_done >= 0:
        continued = max(compute - -sums_done * sums // (buckets + 1), 1)
        into = last + exposed if given.eager and sums_done == buckets else continued
    state.phase, state.since, state.killed = RUN, now, 0
    state.from_snapshot = state.is_down = state.is_admission = False
    state.start, state.first, state.into, state.weight_each = now, state.step, into, price.weight
    state.compute, state.step_takes = compute, compute + sums + exposed
    state.waits = last if given.eager else compute + sums
    state.waited = state.waits + exposed
    if given.every:
        _plan_checkpoints(state, given, sums)
    plan(state, given, now)


def _plan_checkpoints(state: HistoryState, given: Parameters, sums: int) -> None:
    step, every = state.step_takes, given.every
    between = product(every, step)
    state.before = state.first % every
    state.hold = given.save + max(given.save_background - between, 0)  # the next one waits until it is written
    state.cycle = between + state.hold
    state.lag = max(given.save_background, state.compute - -sums // (given.buckets + 1))
    state.works = product(every - state.before, step) - state.into


def plan(state: HistoryState, given: Parameters, now: int) -> None:
    """Schedule the end of training or the next admission of newcomers."""
    ends = given.horizon
    if given.target != NO_END:
        ends = _until_step(state, given, -((state.weight - given.target) // state.weight_each))
    state.ends = min(ends, given.horizon)
    # Where a failed member is not detected before the horizon, no more workers are admitted.
    if state.available > state.members and state.killed == 0 and not given.relaunches:
        ends = min(ends, _boundary(state, given, now))
    state.wake = ends


def position_at(state: HistoryState, given: Parameters, now: int) -> TrainingPosition:
    """Return the position at ``now``."""
    every, elapsed, step = given.every, now - state.start, state.step_takes
    after = elapsed - state.works  # the begin of the first checkpoint
    if not every or after < 0:
        done = state.into + elapsed
        number = done // step
        return TrainingPosition(state.first + number, done - number * step, 0, 0, elapsed)
    after -= state.hold  # the end of the first checkpoint, possibly in the future
    base = state.first - state.before
    if after < 0:
        return TrainingPosition(base + every, 0, -after, 0, elapsed - state.hold - after)
    cycles = after // state.cycle
    rest = after - cycles * state.cycle
    steps = min(rest // step, every)
    inside, saves = rest - steps * step, cycles + 1
    hold_left = into = held = 0
    if steps == every:
        held, hold_left = inside, state.hold - inside
    else:
        into = inside
    return TrainingPosition(base + saves * every + steps, into, hold_left, saves, elapsed - saves * state.hold - held)


def detection(
    state: HistoryState, given: Parameters, now: int, position: TrainingPosition
) -> tuple[int, TrainingPosition]:
    """Return when survivors reach an all-reduce that fails, and their position then.

    A survivor that waits for the optimizer detects nothing until it is done. Where the model is split, a failure is
    detected while computing.
    """
    if state.waits <= position.into < state.waited:
        now += state.waited - position.into
        position = position_at(state, given, now)
    if given.split or position.into >= state.compute:
        return now, position
    rest = state.compute - position.into
    there = TrainingPosition(
        position.step, position.into + rest, 0, position.saves + (position.hold_left > 0), position.ran + rest
    )
    return now + rest + position.hold_left, there


def _until_step(state: HistoryState, given: Parameters, left: int) -> int:
    """Return when ``left`` more steps are done; no checkpoint follows the last."""
    saves = (state.before + left - 1) // given.every if given.every else 0
    return min(state.start - state.into + product(left, state.step_takes) + saves * state.hold, FAR)


def _boundary(state: HistoryState, given: Parameters, now: int) -> int:
    """Return when the next step begins, which may be now; if training is held for a checkpoint, after that."""
    position = position_at(state, given, now)
    if position.hold_left > 0:
        return now + position.hold_left
    if position.into == 0:
        return now
    is_saved = given.every > 0 and (position.step + 1) % given.every == 0
    return now + state.step_takes - position.into + (state.hold if is_saved else 0)


def product(a: int, b: int) -> int:
    """Return ``a * b``, at most :data:`FAR`."""
    return a * b if float(a) * b < 2e18 else FAR


def end_segment(state: HistoryState, given: Parameters, now: int) -> None:
    """End training, and count it."""
    position = position_at(state, given, now)
    settle(state, given, now, position.saves)
    add(state, given, now, position)
    state.since = now


def add(state: HistoryState, given: Parameters, now: int, position: TrainingPosition) -> None:
    """Count the segment, which ends now at ``position``."""
    steps = position.step - state.first
    state.held += now - state.start - position.ran
    state.attempt = position.into if steps > 0 else state.attempt + position.ran
    state.ran += position.ran
    state.weight += steps * state.weight_each
    if given.target != NO_END:
        state.weight = min(state.weight, given.target)
    state.step = position.step


def settle(state: HistoryState, given: Parameters, now: int, saves: int) -> None:
    """Determine which of the segment's ``saves`` checkpoints are complete by now; call it before counting the segment."""
    settle_written(state, now)
    if saves == 0:
        return
    complete_at = state.start + state.works + state.hold + (saves - 1) * state.cycle + state.lag
    newest = _checkpoint(state, given, saves)
    if complete_at <= now:
        state.safe_step, state.safe_weight, state.safe_ran = newest
        state.written_at = FAR
        return
    if saves > 1:  # it did not begin before the one before it was complete
        state.safe_step, state.safe_weight, state.safe_ran = _checkpoint(state, given, saves - 1)
    elif state.written_at < FAR:
        state.safe_step, state.safe_weight, state.safe_ran = state.written_step, state.written_weight, state.written_ran
    state.written_step, state.written_weight, state.written_ran = newest
    state.written_at = complete_at


def settle_written(state: HistoryState, now: int) -> None:
    """Determine whether the checkpoint of an earlier segment is complete by now."""
    if state.written_at <= now:
        state.safe_step, state.safe_weight, state.safe_ran = state.written_step, state.written_weight, state.written_ran
        state.written_at = FAR


def _checkpoint(state: HistoryState, given: Parameters, number: int) -> Checkpoint:
    """Return a checkpoint of the segment; 1 is the first."""
    step = state.first - state.before + number * given.every
    weight = state.weight + (step - state.first) * state.weight_each
    return Checkpoint(step, weight, state.ran + state.works + (number - 1) * (state.cycle - state.hold))


def discard(state: HistoryState) -> None:
    """Lose the step in progress."""
    _waste(state, state.attempt)


def go_back(state: HistoryState) -> None:
    """Lose the work since the newest checkpoint."""
    _waste(state, state.ran - state.safe_ran)
    state.step, state.weight = state.safe_step, state.safe_weight


def fall_behind(state: HistoryState, given: Parameters) -> None:
    """Lose the steps that it takes to be again where the loss was: a part was restored as it was some steps ago.

    The numbering of steps goes on, so the job needs that many more of them.
    """
    behind = min(given.stale, state.weight)
    ran = min(product(behind, state.step_takes) // max(state.weight_each, 1), state.ran - state.attempt)
    state.weight -= behind
    state.ran -= ran
    state.lost += ran


def secure(state: HistoryState) -> None:
    """Save all completed work."""
    state.safe_step, state.safe_weight, state.safe_ran = state.step, state.weight, state.ran


def _waste(state: HistoryState, ran: int) -> None:
    state.ran -= ran
    state.lost += ran
    state.attempt = 0
