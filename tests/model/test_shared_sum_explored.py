"""Every run of small jobs that sum through shared memory: it is right, and without any one of its rules it is not.

The barriers may lie, and workers may be stopped while they add, and wake up late, unless a test says otherwise.
"""

import dataclasses
import random
from dataclasses import dataclass

import pytest

from holdfast.recovery import Forward, Restart, Rollback, Strategy
from holdfast.recovery.messages import Action, ContinueStep, Event, HandOver, ProgressKnown
from holdfast.recovery.strategy import ProgressView
from model.explorer import Rule, World, explore, walk
from model.verdicts import NAMES, STRATEGIES, NobodyHandsOver, lossy, must_break, must_hold

three_strategies = pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=NAMES[:3])


def shared(strategy: Strategy, **fields) -> World:
    return World(**{"shared": True, "late": True, "lying": True, "lossy": lossy(strategy)} | fields)


# -- it holds


@three_strategies
@pytest.mark.parametrize(("workers", "deaths"), [(2, 2), (3, 1), pytest.param(3, 2, marks=pytest.mark.soak)])
def test_nothing_goes_wrong_in_any_run(strategy, workers, deaths):
    world = shared(strategy, workers=workers, deaths=deaths)
    plain = World(workers=workers, deaths=deaths, lossy=world.lossy)

    assert must_hold(strategy, world) > must_hold(strategy, plain)


def test_nothing_goes_wrong_with_a_single_bucket():
    must_hold(Rollback(), shared(Rollback(), buckets=1))


@three_strategies
def test_nothing_goes_wrong_when_no_moves_are_joined(strategy):
    joined = must_hold(strategy, shared(strategy, workers=2, buckets=1))
    apart = must_hold(strategy, shared(strategy, workers=2, buckets=1, atomic=False))

    assert apart > joined


@three_strategies
def test_nothing_goes_wrong_when_inputs_are_kept_until_the_step_is_over(strategy):
    must_hold(strategy, shared(strategy, workers=2, keep_input=True))


def test_late_workers_and_lying_barriers_add_to_what_can_happen():
    world = shared(Rollback(), workers=2, deaths=1)
    tame = must_hold(Rollback(), dataclasses.replace(world, late=False, lying=False))

    assert tame < must_hold(Rollback(), dataclasses.replace(world, lying=False))
    assert tame < must_hold(Rollback(), dataclasses.replace(world, late=False))


@pytest.mark.parametrize("seed", range(3))
@three_strategies
def test_nothing_goes_wrong_in_large_jobs_at_random(strategy, seed):
    world = shared(strategy, workers=6, deaths=4, steps=4, buckets=3)

    found = walk(strategy, world, random.Random(seed), death_rate=0.03)

    assert found.violation is None, str(found)
    assert found.states > 100


# -- without one of its rules


SMALLEST = [
    # What is left out, strategy, workers, deaths, what else is, what goes wrong.
    (Rule.BARRIER_A, Rollback(), 2, 0, {}, "wrong input"),
    (Rule.BARRIER_B, Rollback(), 2, 0, {}, "wrong input"),
    (Rule.BARRIER_B, Forward(), 2, 1, {"keep_input": True}, "result not complete"),
    (Rule.ONE_WRITER, Rollback(), 2, 0, {}, "result overwritten"),
    (Rule.FROZEN_INPUT, Rollback(), 3, 1, {}, "wrong input"),
    (Rule.ENTRY, Rollback(), 2, 0, {}, "result overwritten"),
    (Rule.WORDS_AFTER_A, Rollback(), 2, 1, {}, "wrong input"),
    (Rule.WORDS_AFTER_B, Rollback(), 3, 1, {}, "wrong input"),
    (Rule.WORDS_AFTER_B, Forward(), 2, 1, {}, "result not complete"),
    (Rule.WORDS_OF_TODAY, Rollback(), 3, 2, {}, "wrong input"),
    (Rule.WORD_COMES_LAST, Rollback(), 3, 1, {}, "wrong input"),
    (Rule.WORD_COMES_LAST, Forward(), 2, 1, {}, "result not complete"),
    (Rule.FRESH_MEMORY, Rollback(), 2, 1, {}, "result overwritten"),
    (Rule.OLD_RESULT, Rollback(), 3, 1, {}, "result not complete"),
    (Rule.OLD_RESULT, Forward(), 2, 1, {}, "result not complete"),
]


@pytest.mark.parametrize(("rule", "strategy", "workers", "deaths", "fields", "kind"), SMALLEST)
def test_every_rule_is_needed(rule, strategy, workers, deaths, fields, kind):
    world = shared(strategy, workers=workers, deaths=deaths, without=rule, **fields)
    if deaths:
        must_hold(strategy, dataclasses.replace(world, deaths=deaths - 1))

    must_break(strategy, world, kind, holds_without_deaths=False)


@pytest.mark.parametrize(
    ("rule", "strategy", "workers", "deaths", "fields", "kind"), [case for case in SMALLEST if case[2] == 2]
)
def test_it_is_found_as_well_when_no_moves_are_joined(rule, strategy, workers, deaths, fields, kind):
    world = shared(strategy, workers=workers, deaths=deaths, without=rule, atomic=False, **fields)

    must_break(strategy, world, kind, holds_without_deaths=False)


def test_a_late_writer_is_stopped_and_wakes_after_the_others_have_summed_into_the_same_memory():
    found = must_break(Rollback(), shared(Rollback(), deaths=1, without=Rule.FRESH_MEMORY), "result overwritten")

    stopped, wakes = (
        next(n for n, line in enumerate(found.trace) if words in line)
        for words in ("is stopped in adding of ReduceBucket(0, 0)", "wakes and finishes bucket 0")
    )
    assert any("completes B of ReduceBucket(0, 0)" in line for line in found.trace[stopped:wakes])
    # Nobody had read before: all read the same wrong numbers, and no comparison of replicas would see it.
    assert [line.split(" | ")[0].strip() for line in found.trace[wakes + 1 :]] == ["1 completes VoteStep(0)"]


# -- each rule is there for one thing


@three_strategies
def test_memory_could_be_used_again_if_nobody_woke_up_late(strategy):
    must_hold(strategy, shared(strategy, workers=2, late=False, without=Rule.FRESH_MEMORY))


@pytest.mark.parametrize(
    ("strategy", "deaths"), [(Rollback(), 1), (Forward(), 1), pytest.param(Rollback(), 2, marks=pytest.mark.soak)]
)
def test_nobody_would_have_to_look_at_words_if_barriers_kept_theirs(strategy, deaths):
    words = Rule.WORDS_AFTER_A | Rule.WORDS_AFTER_B | Rule.WORDS_OF_TODAY | Rule.WORD_COMES_LAST

    must_hold(strategy, shared(strategy, deaths=deaths, lying=False, without=words))


@pytest.mark.parametrize("strategy", [Rollback(), Restart()], ids=["rollback", "restart"])
def test_barrier_b_is_only_for_forward_if_inputs_are_kept_until_the_step_is_over(strategy):
    """Whoever enters the closing sum has added; until then nobody but ``forward`` looks at a result."""
    must_hold(strategy, shared(strategy, workers=2, keep_input=True, without=Rule.BARRIER_B))


# -- with a strategy that reads what nobody completed


@dataclass(frozen=True)
class TakesWhatLies:
    """Forward that never sums a bucket again: what lies in the old result will do."""

    def handle(self, event: Event) -> list[Action]:
        orders = Forward().handle(event)
        match event, orders:
            case ProgressKnown(num_buckets=buckets), [ContinueStep(step=step, next_sum=next_sum)] if next_sum < buckets:
                return [HandOver(step, next_sum, ProgressView.of(event).source), ContinueStep(step, next_sum + 1)]
            case _:
                return orders


@dataclass(frozen=True)
class TakesItsOwnShare(TakesWhatLies):
    """The same, but only from the second bucket on, when all have long been in the sums."""

    def handle(self, event: Event) -> list[Action]:
        orders = super().handle(event)
        match orders:
            case [HandOver(bucket=0), ContinueStep()]:
                return Forward().handle(event)
            case _:
                return orders


@pytest.mark.parametrize("strategy", [TakesWhatLies(), TakesItsOwnShare()])
def test_a_result_that_nobody_completed_must_not_be_read(strategy):
    must_break(strategy, shared(strategy, workers=2, deaths=1), "result not complete")


def test_a_broken_strategy_is_found_out_with_shared_memory_too():
    must_break(NobodyHandsOver(), shared(NobodyHandsOver(), deaths=1), "rubbish is summed")


def test_the_same_world_gives_the_same_trace():
    world = shared(Rollback(), workers=2, without=Rule.ENTRY)

    assert explore(Rollback(), world) == explore(Rollback(), world)
