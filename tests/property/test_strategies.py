"""What every strategy must keep to, whatever the survivors tell it; and long runs at random."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InternalError
from holdfast.recovery import Forward, Protocol, Reinit, Restart, Rollback, make_strategy
from holdfast.recovery.messages import (
    LOADING,
    Agreed,
    CatchUp,
    ContinueStep,
    DataExhausted,
    DiscardStep,
    HandOver,
    Leave,
    LoadCheckpoint,
    Note,
    Progress,
    ProgressKnown,
    SaveAndStop,
)
from model.explorer import Lapse, World, walk

BUSY = World(
    workers=5,
    newcomers=2,
    leavers=frozenset({0, 3}),
    changes=(Restart(), Forward(), Rollback()),
    deaths=4,
    steps=6,
    lossy=True,
)
"""A job in which everything happens."""

each_strategy = pytest.mark.parametrize("name", ["rollback", "forward", "restart", "reinit"])
KINDS = [Rollback, Forward, Restart, Reinit]

ranks = st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True)


@st.composite
def legal(draw, *, loading: bool | None = False):
    """What survivors may tell: at most one sum apart, or anything if one of them is loading."""
    who = draw(ranks)
    buckets = draw(st.integers(1, 4))
    top = draw(st.integers(0, 4 * (buckets + 1)))
    is_loading = draw(st.booleans()) if loading is None else loading
    done = st.integers(LOADING, top) if is_loading else st.integers(max(top - 1, 0), top)
    completed = [LOADING if is_loading else top, *(draw(done) for _ in who[1:])]
    return ProgressKnown({r: Progress(c, draw(st.booleans())) for r, c in zip(who, completed, strict=True)}, buckets)


@st.composite
def illegal(draw):
    """Two survivors more than one sum apart, nobody loading."""
    event = draw(legal().filter(lambda event: len(event.progress) > 1))
    top = max(p.completed for p in event.progress.values())
    ahead = draw(st.sampled_from(sorted(event.progress)))
    far = Progress(top + draw(st.integers(2, 20)), draw(st.booleans()))
    return ProgressKnown({**event.progress, ahead: far}, event.num_buckets)


def sums_of(event):
    return event.num_buckets + 1


# -- one decision


@given(event=legal(loading=None), min_workers=st.integers(1, 4))
def test_the_same_news_gives_the_same_orders_in_any_order_and_however_often(event, min_workers):
    shuffled = ProgressKnown(dict(reversed(event.progress.items())), event.num_buckets)

    for kind in KINDS:
        strategy = kind(min_workers=min_workers)
        first = strategy.handle(event)

        assert strategy.handle(Agreed(value=False)) == [], "everything but news of progress is ignored"
        assert strategy.handle(event) == first, "heard twice"
        assert strategy.handle(shuffled) == first
        assert kind(min_workers=min_workers).handle(event) == first, "at another worker"
        assert len({type(order) for order in first}) == len(first), "orders of each kind come at most once"


@given(event=legal())
def test_a_step_that_somebody_closed_is_never_taken_back_nor_left_behind(event):
    sums = sums_of(event)
    top = max(p.completed for p in event.progress.values())
    closed = top // sums  # steps that somebody closed
    behind = any(p.completed < closed * sums for p in event.progress.values())

    for kind in KINDS:
        orders = kind().handle(event)

        assert (CatchUp(closed - 1) in orders) == behind
        assert orders[0] == CatchUp(closed - 1) or not behind
        for order in orders:
            if isinstance(order, DiscardStep | ContinueStep | HandOver):
                assert order.step == closed
            if isinstance(order, CatchUp):
                assert top == (order.step + 1) * sums, "only a step that somebody closed is caught up"


@given(event=legal())
def test_forward_takes_the_one_bucket_that_only_some_hold_from_the_lowest_holder(event):
    sums = sums_of(event)
    completed = {rank: p.completed for rank, p in event.progress.items()}
    top = max(completed.values())
    orders = Forward().handle(event)

    for order in orders:
        if isinstance(order, HandOver):
            assert order.step * sums + order.bucket + 1 == top
            assert order.bucket < event.num_buckets
            assert order.source == min(rank for rank, c in completed.items() if c == top)
            assert orders[-1] == ContinueStep(order.step, order.bucket + 1)


@given(event=legal())
def test_forward_goes_on_only_if_everybody_has_gradients_of_the_same_attempt(event):
    orders = Forward().handle(event)

    if any(isinstance(order, ContinueStep) for order in orders):
        assert all(p.computed for p in event.progress.values())
        assert not any(isinstance(order, DiscardStep | CatchUp) for order in orders)


@given(event=legal(loading=True))
def test_when_one_loads_everybody_loads(event):
    for kind in KINDS:
        assert kind().handle(event) == [LoadCheckpoint()]


@given(event=legal(loading=None), missing=st.integers(1, 5), spare=st.integers(0, 5))
def test_with_too_few_workers_the_last_order_is_to_save_and_stop(event, missing, spare):
    for kind in KINDS:
        orders = kind(min_workers=len(event.progress) + missing).handle(event)

        assert orders[-1] == SaveAndStop()
        assert not any(isinstance(order, ContinueStep | HandOver) for order in orders)
        assert SaveAndStop() not in kind(min_workers=max(1, len(event.progress) - spare)).handle(event)


@given(event=illegal())
def test_survivors_more_than_one_sum_apart_are_not_believed(event):
    for kind in KINDS:
        with pytest.raises(InternalError, match="collectives apart, which cannot happen"):
            kind().handle(event)


@given(who=ranks, step=st.integers(0, 9), buckets=st.integers(1, 4), min_workers=st.integers(1, 9))
def test_where_members_change_and_nobody_saw_a_failure_nothing_is_taken_back(who, step, buckets, min_workers):
    calm = Progress(step * (buckets + 1), computed=False, flags=Note.PLANNED)

    for kind in KINDS:
        orders = kind(min_workers=min_workers).handle(ProgressKnown(dict.fromkeys(who, calm), buckets))
        assert orders == ([SaveAndStop()] if len(who) < min_workers else [])


@given(who=ranks, step=st.integers(0, 9), min_workers=st.integers(1, 9))
def test_who_saw_a_failure_where_members_change_makes_it_one_for_all(who, step, min_workers):
    calm = {rank: Progress(step * 3, computed=False, flags=Note.PLANNED) for rank in who}
    told = calm | {who[0]: Progress(step * 3, computed=False)}
    quiet = {rank: Progress(step * 3, computed=False) for rank in who}

    for kind in KINDS:
        strategy = kind(min_workers=min_workers)
        assert strategy.handle(ProgressKnown(told, 2)) == strategy.handle(ProgressKnown(quiet, 2)) != []


# -- a whole recovery


@given(event=legal(loading=None))
def test_the_protocol_can_carry_out_what_a_strategy_orders(event):
    """All orders are understood, and the answer to the last one leads back to training."""
    for kind in KINDS:
        protocol = Protocol(kind(), event.num_buckets)
        protocol._completed = max(p.completed for p in event.progress.values())
        protocol._known = event

        assert len(protocol._decide()) == 1


# -- long runs at random


@each_strategy
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1), checkpoint_every=st.integers(1, 3), death_rate=st.sampled_from([0.01, 0.05, 0.3])
)
def test_survivors_of_any_failures_end_with_the_same_history(name, seed, checkpoint_every, death_rate):
    world = World(workers=6, deaths=5, steps=5, buckets=3, checkpoint_every=checkpoint_every, lossy=name == "forward")

    found = walk(make_strategy(name), world, random.Random(seed), death_rate=death_rate)

    assert found.violation is None, str(found)
    assert found.end.left


@each_strategy
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), min_workers=st.integers(2, 6))
def test_survivors_that_are_too_few_stop_with_the_same_history(name, seed, min_workers):
    world = World(workers=6, deaths=4, steps=4, buckets=2, lossy=name == "forward", atomic=False)

    found = walk(make_strategy(name, min_workers=min_workers), world, random.Random(seed), death_rate=0.05)

    assert found.violation is None, str(found)
    assert found.end.left


@each_strategy
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), death_rate=st.sampled_from([0.01, 0.05, 0.3]), atomic=st.booleans())
def test_whoever_comes_and_leaves_all_have_the_same_history(name, seed, death_rate, atomic):
    world = dataclasses.replace(BUSY, lossy=True, atomic=atomic)  # the strategies that follow may be lossy

    found = walk(make_strategy(name), world, random.Random(seed), death_rate=death_rate)

    assert found.violation is None, str(found)


def test_in_the_random_runs_workers_do_come_and_leave_in_every_way():
    """The control: without it the runs above could pass because nothing happens in them."""
    runs = [walk(Rollback(), BUSY, random.Random(seed), death_rate=0.02) for seed in range(60)]
    lines = [line for run in runs for line in run.trace]
    at_the_end = [run.trace[-1] for run in runs]

    for what in (
        "waits to join",
        "is told to leave",
        "there are new settings",
        "dies before it is admitted",
        "dies in SendState",
        "fails in SendState",
        "dies in FetchConfig",
        "fails in FetchConfig",
        "ShareProgress(-2)",
    ):
        assert any(what in line for line in lines), f"never: {what}"
    for newcomer in (5, 6):
        assert any(f"{newcomer}: left" in line for line in at_the_end), f"{newcomer} never came to the end"
    assert any("0: left, 1: ReduceBucket" in line for line in lines), "no worker left before the end"


def test_the_random_runs_find_newcomers_that_are_let_in_too_early():
    """The control: an engine that admits newcomers of whom not all have heard does not pass."""
    world = dataclasses.replace(BUSY, lapses=Lapse.ADMITS_EARLY)

    runs = [walk(Rollback(), world, random.Random(seed), death_rate=0.05) for seed in range(60)]

    assert any(run.violation is not None and "were admitted by workers" in run.violation for run in runs)


def test_the_random_runs_do_lose_workers_in_every_phase():
    """The control: without it the runs above could pass because nothing happens in them."""
    world = World(workers=6, deaths=5, steps=5, buckets=3)
    phases = ["ReduceBucket", "VoteStep", "ShareProgress", "LoadCheckpoint", "Agree"]

    runs = [walk(Rollback(), world, random.Random(seed), death_rate=0.05) for seed in range(30)]
    deaths = [line.split("|")[0] for run in runs for line in run.trace if " dies in " in line]

    assert len(deaths) > 100
    for phase in phases:
        assert any(phase in death for death in deaths), f"nobody ever died in {phase}"


def test_the_random_runs_find_a_worker_that_leaves_too_soon():
    """The control: a protocol without its gate does not pass."""
    world = World(workers=6, deaths=5, steps=2, buckets=1, make_protocol=_LeavesAtOnce)

    runs = [walk(Rollback(), world, random.Random(seed), death_rate=0.05) for seed in range(30)]

    assert any(run.violation is not None and run.violation.startswith("deadlock") for run in runs)


def test_the_same_seed_gives_the_same_run():
    world = World(workers=6, deaths=5)

    assert walk(Forward(), world, random.Random(7)) == walk(Forward(), world, random.Random(7))


class _LeavesAtOnce(Protocol):
    def handle(self, event):
        if event == DataExhausted():
            return [Leave()]
        return super().handle(event)
