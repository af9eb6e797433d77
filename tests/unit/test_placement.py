"""Who holds which part of a split model, whoever dies and comes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.recovery.placement import (
    PartTransfer,
    Placement,
    PlacementShape,
    Restoration,
    initial_placement,
    next_placement,
    restorations,
    transfers,
)

shapes = st.builds(
    PlacementShape, parts=st.integers(1, 5), chains=st.integers(1, 3), copies=st.integers(1, 4), lazy=st.booleans()
)
groups = st.sets(st.integers(0, 11), min_size=1).map(sorted)


@st.composite
def histories(draw):
    """Return a shape, and the groups that follow each other: some of each live on, some may be new."""
    history = [draw(groups)]
    for _ in range(draw(st.integers(0, 5))):
        stay = draw(st.sets(st.sampled_from(history[-1]), min_size=1))
        history.append(sorted(stay | draw(st.sets(st.integers(0, 11), max_size=3))))
    return draw(shapes), history


def homes_after(shape: PlacementShape, history: Sequence[Sequence[int]]) -> Placement:
    homes = initial_placement(shape, history[0])
    for members in history[1:]:
        homes = next_placement(shape, homes, members)
    return homes


def homes_with(chains, mirrors) -> Placement:
    return Placement(chains=chains, mirrors=mirrors, backups=((),) * len(mirrors))


# -- what holds whatever happened before


@given(histories())
def test_the_living_fill_every_place_and_hold_every_part_as_often_as_asked_and_nothing_changes_without_a_reason(drawn):
    shape, history = drawn
    members = history[-1]

    homes = homes_after(shape, history)

    assert len(homes.chains) == shape.chains_of(len(members))
    for part in range(shape.parts):
        computing = [chain[part] for chain in homes.chains]
        having = [*homes.holders(part), *homes.backups[part]]
        assert set(having) <= set(members)
        assert len(set(having)) == len(having) == shape.copies_of(len(members))
        assert len(set(computing)) == len(computing)  # nobody is its own twin
        assert not set(computing) & set(homes.mirrors[part])
        assert not (homes.mirrors if shape.lazy else homes.backups)[part]
    assert homes.lost(members) == ()
    places = [rank for chain in homes.chains for rank in chain]
    assert len(set(places)) == min(len(members), len(places)), "none computes twice, or none is idle"
    assert next_placement(shape, homes, members) == homes
    assert transfers(homes, homes, members) == ()
    assert Placement.from_json(homes.to_json()) == homes
    assert initial_placement(shape, members) == initial_placement(shape, tuple(members))


# -- what is given


@given(histories())
def test_what_was_given_restored_and_held_is_what_is_to_be_held(drawn):
    shape, history = drawn
    members = history[-1]
    before = homes_after(shape, history[:-1]) if len(history) > 1 else initial_placement(shape, [99])
    after = next_placement(shape, before, members)

    lost, moved = before.lost(members), transfers(before, after, members)

    assert lost == tuple(p for p in range(shape.parts) if not any(rank in members for rank in before.holders(p)))
    assert len(set(moved)) == len(moved)
    for gift in moved:
        assert gift.part not in lost
        assert gift.giver in before.holders(gift.part)
        assert gift.taker not in before.holders(gift.part)
        assert {gift.giver, gift.taker} <= set(members)
    for part in range(shape.parts):
        takers = {gift.taker for gift in moved if gift.part == part}
        has_it = set() if part in lost else set(before.holders(part)) & set(members) | takers
        assert set(after.holders(part)) <= has_it or part in lost
        assert takers <= set(after.holders(part))
    restored = restorations(before, after, members)
    assert tuple(restoration.part for restoration in restored) == lost
    for restoration in restored:
        backups = set(before.backups[restoration.part])
        assert restoration.restorer in members
        assert {restoration.restorer, *restoration.takers} >= set(after.holders(restoration.part))
        assert restoration.restorer in backups or not backups & set(members)


@given(shapes, groups, st.data())
def test_a_death_has_only_parts_given_that_the_dead_held_and_fewer_deaths_than_copies_lose_none(shape, members, data):
    survivors = sorted(data.draw(st.sets(st.sampled_from(members), min_size=1)))
    before = initial_placement(shape, members)

    moved = transfers(before, next_placement(shape, before, survivors), survivors)

    for gift in moved:
        assert not set(before.holders(gift.part)) <= set(survivors)
    for part in range(shape.parts):
        dead_holders = set(before.holders(part)) - set(survivors)
        assert sum(gift.part == part for gift in moved) <= len(dead_holders)
        dead = before.holders(part)[: shape.copies_of(len(members)) - 1]
        assert shape.lazy or before.lost([rank for rank in members if rank not in dead]) == ()


# -- who takes over, by example


def test_who_holds_the_part_and_computes_nothing_takes_over_and_only_the_mirror_is_given():
    shape = PlacementShape(parts=2, chains=1, copies=2)
    before = initial_placement(shape, [0, 1, 2])
    assert before == homes_with(((0, 1),), ((2,), (2,)))

    after = next_placement(shape, before, [1, 2])

    assert after == homes_with(((2, 1),), ((1,), (2,)))
    assert transfers(before, after, [1, 2]) == (PartTransfer(0, 2, 1),)


def test_of_those_who_compute_nothing_the_one_that_holds_the_part_takes_over():
    shape = PlacementShape(parts=2, chains=1, copies=2)
    before = initial_placement(shape, [0, 1, 2, 3])
    assert before == homes_with(((0, 1),), ((2,), (3,)))

    assert next_placement(shape, before, [0, 2, 3]).chains == ((0, 3),)


def test_who_computes_nothing_takes_over_before_who_holds_the_part_and_computes_another():
    shape = PlacementShape(parts=2, chains=1, copies=2)
    before = next_placement(shape, initial_placement(shape, [0, 1]), [0, 1, 5])
    assert before == homes_with(((0, 1),), ((1,), (0,)))

    after = next_placement(shape, before, [0, 5])

    assert after.chains == ((0, 5),)


def test_the_chain_that_lost_most_is_given_up():
    shape = PlacementShape(parts=2, chains=2, copies=1)

    after = next_placement(shape, initial_placement(shape, [0, 1, 2, 3]), [1, 2, 3])

    assert after.chains == ((2, 3),)


def test_workers_that_are_left_of_a_chain_take_the_places_in_the_others():
    shape = PlacementShape(parts=2, chains=2, copies=1)
    before = initial_placement(shape, [0, 1, 2, 3])
    assert before.chains == ((0, 1), (2, 3))

    after = next_placement(shape, before, [1, 2])

    assert after.chains == ((2, 1),)
    assert transfers(before, after, [1, 2]) == ()


def test_those_who_have_a_part_take_turns_to_give_it():
    shape = PlacementShape(parts=1, chains=1, copies=4)
    before = initial_placement(shape, [0, 1])

    after = next_placement(shape, before, [0, 1, 2, 3])

    assert transfers(before, after, [0, 1, 2, 3]) == (PartTransfer(0, 0, 2), PartTransfer(0, 1, 3))


def test_newcomers_relieve_who_computes_several_parts_and_then_make_a_chain():
    shape = PlacementShape(parts=2, chains=2, copies=1)
    alone = initial_placement(shape, [0])

    two = next_placement(shape, alone, [0, 5])
    four = next_placement(shape, two, [0, 5, 6, 7])

    assert [sorted(chain) for chain in two.chains] == [[0, 5]]
    assert four.chains == (*two.chains, (6, 7))


def test_a_backup_takes_over_what_it_has_and_restores_it():
    shape = PlacementShape(parts=2, chains=1, copies=2, lazy=True)
    before = initial_placement(shape, [0, 1, 2])
    assert (before.chains, before.backups) == (((0, 1),), ((2,), (2,)))

    after = next_placement(shape, before, [1, 2])

    assert (after.chains, after.backups) == (((2, 1),), ((1,), (2,)))
    assert restorations(before, after, [1, 2]) == (Restoration(0, 2, ()),)
    assert transfers(before, after, [1, 2]) == ()


def test_who_has_been_a_backup_for_longest_restores_and_without_one_who_takes_over():
    shape = PlacementShape(parts=1, chains=1, copies=3, lazy=True)
    three = next_placement(shape, initial_placement(shape, [1, 2]), [0, 1, 2])
    assert three.backups == ((2, 0),)

    after = next_placement(shape, three, [0, 2])

    assert restorations(three, after, [0, 2])[0].restorer == 2
    alone = initial_placement(PlacementShape(parts=2, chains=1, copies=1), [0, 1])
    assert restorations(alone, next_placement(PlacementShape(parts=2, chains=1, copies=1), alone, [0]), [0]) == (
        Restoration(1, 0, ()),
    )


def test_with_fewer_workers_than_parts_each_computes_neighbours():
    homes = initial_placement(PlacementShape(parts=4, chains=1, copies=1), [3, 8])

    assert homes.chains == ((3, 3, 8, 8),)
    assert homes.held_by([3]) == (0, 1)
    assert homes.computed_by([8]) == ((0, 2), (0, 3))


@pytest.mark.parametrize("name", ["parts", "chains", "copies"])
def test_a_shape_that_cannot_be_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} of a split model must be at least 1, got 0"):
        PlacementShape(**{"parts": 1, "chains": 1, "copies": 1, name: 0})
