"""Every run of small jobs whose model is split over the workers: the protocol holds, and without any one of its lines it does not."""

import dataclasses
import random

import pytest

from holdfast.errors import InternalError
from holdfast.recovery import Forward, Partial, Protocol, Restart, Rollback
from holdfast.recovery.messages import (
    Action,
    AdoptPlacement,
    Agree,
    Event,
    LoadCheckpoint,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
)
from holdfast.recovery.placement import PlacementShape
from holdfast.recovery.protocol import ProtocolState
from model.broken import PublishesAtOnce
from model.explorer import Lapse, Split, World, explore, walk
from model.verdicts import must_break, must_hold

STRATEGIES = [Rollback(), Forward(), Restart(), Partial()]
NAMES = ["rollback", "forward", "restart", "partial"]

STAGES = Split(shape=PlacementShape(parts=2, chains=1, copies=2))
WITHOUT_MIRRORS = Split(shape=PlacementShape(parts=2, chains=1, copies=1))
TWO_CHAINS = Split(shape=PlacementShape(parts=2, chains=2, copies=2))
SHARDS = Split(shape=PlacementShape(parts=2, chains=1, copies=2), transfers=0, gathers=2)
REPLICAS = Split(shape=PlacementShape(parts=1, chains=3, copies=2), transfers=0)
MANY_TRANSFERS = Split(shape=PlacementShape(parts=3, chains=1, copies=2), transfers=2)

BACKUPS = Split(shape=PlacementShape(parts=2, chains=1, copies=2, lazy=True))
THREE_COPIES = Split(shape=PlacementShape(parts=2, chains=1, copies=3))

SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


# -- it holds


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize("split", [STAGES, WITHOUT_MIRRORS], ids=["mirrors", "no mirrors"])
def test_nothing_goes_wrong_whatever_the_strategy(strategy, split):
    must_hold(strategy, World(workers=2, deaths=1, split=split))


@pytest.mark.parametrize(
    ("split", "workers", "newcomers", "deaths"),
    [
        (STAGES, 1, 0, 0),
        (STAGES, 2, 0, 2),
        (STAGES, 3, 0, 2),
        (WITHOUT_MIRRORS, 3, 0, 1),
        (REPLICAS, 3, 0, 1),
        (SHARDS, 3, 0, 1),
        (STAGES, 1, 1, 1),
        (WITHOUT_MIRRORS, 2, 1, 1),
    ],
)
def test_nothing_goes_wrong_in_any_run(split, workers, newcomers, deaths):
    must_hold(Rollback(), World(workers=workers, newcomers=newcomers, deaths=deaths, split=split))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", [Rollback(), Restart(), Partial()], ids=["rollback", "restart", "partial"])
@pytest.mark.parametrize(
    ("split", "workers", "newcomers", "deaths"),
    [
        (STAGES, 3, 0, 3),
        (WITHOUT_MIRRORS, 3, 0, 3),
        (TWO_CHAINS, 4, 0, 2),
        (MANY_TRANSFERS, 4, 0, 2),
        (STAGES, 2, 2, 2),
        (STAGES, 3, 1, 2),
        (WITHOUT_MIRRORS, 3, 1, 2),
        (THREE_COPIES, 2, 1, 2),
        (TWO_CHAINS, 3, 1, 1),
    ],
)
def test_nothing_goes_wrong_in_any_run_of_larger_jobs(strategy, split, workers, newcomers, deaths):
    must_hold(strategy, World(workers=workers, newcomers=newcomers, deaths=deaths, split=split))


@pytest.mark.parametrize(
    ("split", "workers", "newcomers", "deaths"),
    [(BACKUPS, 3, 0, 2), (BACKUPS, 2, 1, 1), (STAGES, 3, 0, 2), (STAGES, 2, 1, 2)],
)
def test_lost_parts_are_restored_and_the_others_stay(split, workers, newcomers, deaths):
    world = World(workers=workers, newcomers=newcomers, deaths=deaths, split=split, make_protocol=NeverLoads)

    must_hold(Partial(), world)


def test_nothing_goes_wrong_when_no_moves_are_joined():
    joined = must_hold(Rollback(), World(workers=2, deaths=1, split=STAGES))
    apart = must_hold(Rollback(), World(workers=2, deaths=1, split=STAGES, atomic=False))

    assert apart > joined


def test_workers_leave_the_job_is_changed_and_too_few_stop():
    world = World(workers=2, deaths=1, split=WITHOUT_MIRRORS)

    must_hold(Rollback(), dataclasses.replace(world, newcomers=1, leavers=frozenset({0})))
    must_hold(Rollback(), dataclasses.replace(world, changes=(Restart(),)))
    must_hold(Rollback(min_workers=2), dataclasses.replace(world, newcomers=1))
    must_hold(Forward(min_workers=2), dataclasses.replace(world, checkpoint_every=2, steps=3))


def test_every_survivor_is_told_of_every_stable_step():
    must_hold(Rollback(), World(workers=2, deaths=1, newcomers=1, all_publish=True, split=STAGES))
    must_hold(Rollback(), World(workers=3, deaths=1, steps=3, all_publish=True, split=STAGES))


class NeverLoads(Protocol):
    """Is in error where a checkpoint must be loaded although training has begun."""

    def _next_order(self) -> list[Action]:
        if self._completed > 0 and any(isinstance(order, LoadCheckpoint) for order in self._orders):
            msg = "a checkpoint is loaded"
            raise InternalError(msg)
        return super()._next_order()


def test_with_more_copies_than_deaths_no_step_is_lost_and_with_as_many_some_are():
    world = World(workers=2, deaths=1, newcomers=1, split=STAGES, make_protocol=NeverLoads)

    must_hold(Rollback(), world)
    must_break(Rollback(), dataclasses.replace(world, split=WITHOUT_MIRRORS), "internal error: a checkpoint is loaded")


def test_who_leaves_in_order_takes_no_step_along_unless_it_alone_held_a_part():
    world = World(workers=2, deaths=0, leavers=frozenset({0}), split=STAGES, make_protocol=NeverLoads)

    must_hold(Rollback(), world)
    must_break(Rollback(), dataclasses.replace(world, split=WITHOUT_MIRRORS), "internal error: a checkpoint is loaded")


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=SOAK) for seed in range(8, 40))])
def test_larger_jobs_at_random(seed):
    rng = random.Random(seed)
    workers, parts = rng.randint(2, 6), rng.randint(1, 4)
    split = Split(
        shape=PlacementShape(parts=parts, chains=rng.randint(1, 3), copies=rng.randint(1, 3), lazy=rng.random() < 0.3),
        transfers=rng.randint(0, 3),
        gathers=rng.randint(0, 1),
    )
    world = World(
        workers=workers,
        deaths=rng.randint(0, workers),
        newcomers=rng.randint(0, 3),
        steps=rng.randint(2, 5),
        checkpoint_every=rng.randint(1, 2),
        leavers=frozenset(rng.sample(range(workers), rng.randint(0, 1))),
        split=split,
        atomic=rng.random() < 0.5,
    )
    strategy = rng.choice([Rollback, Forward, Restart, Partial])(min_workers=rng.choice([1, 1, 2]))

    for _ in range(5):
        found = walk(strategy, world, rng, death_rate=rng.choice([0.01, 0.03, 0.1]))
        assert found.violation is None, f"{strategy} {world}\n{found}"


# -- without one of its lines


class WithoutAgreeingOnHomes(Protocol):
    """New homes count as soon as this worker has its parts, and it goes on."""

    def _next_order(self) -> list[Action]:
        if self._orders == (Agree(flag=True), AdoptPlacement()):
            self._orders = (AdoptPlacement(),)
        return super()._next_order()


class SettlesBeforeAgreeing(Protocol):
    """New homes count as soon as this worker has its parts, but nobody goes on before all have agreed."""

    def _next_order(self) -> list[Action]:
        if self._orders == (Agree(flag=True), AdoptPlacement()):
            self._orders = (AdoptPlacement(), Agree(flag=True))
        return super()._next_order()


class WithoutRehoming(Protocol):
    """The homes stay as they were."""

    def _with_placement(self, orders: tuple[Action, ...]) -> tuple[Action, ...]:
        return orders


class IgnoresFailuresWhileComputing(Protocol):
    """Tries what failed again, as if it concerned nobody else."""

    def handle(self, event: Event) -> list[Action]:
        if self.state is ProtocolState.COMPUTE and event == PeerLost():
            return self._compute()
        return super().handle(event)


class PublishesOneBucketLate(Protocol):
    """Publishes as if there were buckets, after whose first sum the step before is stable: so never before the end."""

    def handle(self, event: Event) -> list[Action]:
        orders = super().handle(event)
        return orders if self.state is ProtocolState.LAST_GATE else [o for o in orders if not isinstance(o, Publish)]


class HearsOfLostPartsFromAll(Protocol):
    """Believes that a part is lost only if everybody says so."""

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, ProgressKnown) and not all(p.flags & Note.LOST for p in event.progress.values()):
            calmer = {r: Progress(p.completed, p.computed, p.flags & ~Note.LOST) for r, p in event.progress.items()}
            event = ProgressKnown(calmer, event.num_buckets)
        return super().handle(event)


class GoesOnWithTheDead(Protocol):
    """Says that it has the gradients of the step, as if the parts of the dead were not missing from it."""

    def handle(self, event: Event) -> list[Action]:
        was_computing = self.state is ProtocolState.COMPUTE
        orders = super().handle(event)
        if was_computing and self.state is ProtocolState.CLOSE:
            self._computed = True
        return orders


BROKEN = [
    # What is wrong, strategy, world, what goes wrong.
    (WithoutAgreeingOnHomes, Rollback(), World(workers=2, newcomers=1, deaths=1, split=THREE_COPIES), "rubbish"),
    (SettlesBeforeAgreeing, Rollback(), World(workers=2, newcomers=1, deaths=1, split=THREE_COPIES), "rubbish"),
    (WithoutRehoming, Rollback(), World(workers=2, deaths=1, split=STAGES), "deadlock"),
    (IgnoresFailuresWhileComputing, Rollback(), World(workers=2, deaths=1, split=STAGES), "deadlock"),
    (PublishesAtOnce, Rollback(), World(workers=2, deaths=1, split=STAGES), "published state is not in the history"),
    (
        PublishesOneBucketLate,
        Rollback(),
        World(workers=2, deaths=0, steps=3, all_publish=True, split=STAGES),
        "never published",
    ),
    (
        HearsOfLostPartsFromAll,
        Rollback(),
        World(workers=2, deaths=1, newcomers=1, split=WITHOUT_MIRRORS),
        "part missing",
    ),
    (GoesOnWithTheDead, Forward(), World(workers=2, deaths=1, split=STAGES), "deadlock"),
]


@pytest.mark.parametrize(("broken", "strategy", "world", "kind"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_every_line_for_split_models_is_needed(broken, strategy, world, kind):
    must_hold(strategy, world)
    must_break(strategy, dataclasses.replace(world, make_protocol=broken), kind)


LAPSES = [
    # What the engine does wrong, world, what goes wrong.
    (Lapse.SETTLES_AT_ONCE, World(workers=2, newcomers=1, deaths=1, split=THREE_COPIES), "rubbish"),
    (Lapse.MIRRORS_LATE, World(workers=3, deaths=1, split=STAGES), "gradients are missing"),
    (Lapse.SUMS_LATE, World(workers=2, deaths=1, split=STAGES), "gradients are missing"),
    (Lapse.NOBODY_SAYS_LOST, World(workers=2, deaths=1, split=WITHOUT_MIRRORS), "part missing"),
    (Lapse.REVOKES_HALF, World(workers=3, deaths=1, split=STAGES), "deadlock"),
]


@pytest.mark.parametrize(("lapse", "world", "kind"), LAPSES, ids=[case[0].name for case in LAPSES])
def test_what_carries_out_the_orders_must_be_right_too(lapse, world, kind):
    must_hold(Rollback(), world)
    must_break(Rollback(), dataclasses.replace(world, lapses=lapse), kind)


def test_one_restores_a_lost_part_and_gives_it_to_the_others():
    world = World(workers=4, deaths=2, split=Split(shape=PlacementShape(parts=1, chains=1, copies=2), transfers=0))

    must_hold(Partial(), world)
    must_break(Partial(), dataclasses.replace(world, lapses=Lapse.EACH_RESTORES), "rubbish")


@pytest.mark.parametrize("newcomers", [0, 1])
def test_it_is_enough_if_one_says_that_a_part_is_lost(newcomers):
    must_hold(
        Rollback(),
        World(workers=2, deaths=1, newcomers=newcomers, split=WITHOUT_MIRRORS, lapses=Lapse.ONE_SAYS_LOST),
    )


def test_a_split_model_is_not_explored_with_what_it_has_not():
    with pytest.raises(InternalError, match="a split model is explored with exchanges"):
        explore(Rollback(), World(split=STAGES, shared=True))
