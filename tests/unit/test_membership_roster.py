"""Agreements of a roster: the same for all, whoever dies at which write, however late the others hear of it."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosters import Explored, Part, Seen, check, draw_parts, play

from holdfast.errors import InternalError, PeerFailed, VotedOut
from holdfast.membership import Roster
from holdfast.membership.acts import (
    ActDecision,
    NodeVotes,
    RosterVote,
    Tally,
    check_vote,
    decode_members,
    describe_members,
    encode_members,
)

WORLD = (0, 1, 2, 3)


KINDS = ("clients count", "store counts", "relays")


def explore(seed, suspects=0, parts=None, kind="clients count", slow=None):
    """One play over an explored store; a launcher tells of the deaths, and is wrong about some of the living."""
    parts = draw_parts(seed, len(WORLD)) if parts is None else parts
    store, seen = Explored(seed, counts=kind != "clients count", patience=4000, slow=slow), Seen()
    suspected = random.Random(seed).sample(WORLD[:-1], suspects)
    launcher = store.seat("launcher")
    told = set()

    def watch():
        for rank in suspected:
            launcher.put(f"dead/{rank}", "it seemed so")
        while len(seen.ends) < len(parts):
            launcher.wait(lambda: True if seen.ends.keys() - told or len(seen.ends) == len(parts) else None)
            for rank in seen.ends.keys() - told:
                told.add(rank)
                if seen.ends[rank] == "killed":
                    launcher.put(f"dead/{rank}", "killed")

    def act(part, seat):
        end = play(part, seat, WORLD, seen)
        seat.put(f"ended/{part.rank}", end)  # wakes the launcher

    acts = {"launcher": watch}
    relays = [store.relay(f"relay {i}", range(i, len(parts), 2)) for i in range(2)] if kind == "relays" else []
    for relay in relays:
        acts[relay.name] = lambda relay=relay: relay.serve(lambda: len(seen.ends) == len(parts))
    for part in parts:
        seat = store.seat(part.rank, relays[part.rank % 2] if relays else None)
        acts[part.rank] = lambda part=part, seat=seat: act(part, seat)
    store.run(acts)
    check(seen, parts, WORLD, suspected)
    return seen


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS))
def test_members_decide_alike_whoever_dies_leaves_or_comes(seed, kind):
    explore(seed, kind=kind)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), suspects=st.integers(1, 3), kind=st.sampled_from(KINDS))
def test_who_is_taken_for_dead_and_lives_is_voted_out_and_never_decides_otherwise(seed, suspects, kind):
    explore(seed, suspects, kind=kind)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS))
def test_a_slow_member_that_leaves_is_not_waited_for_and_leaves_in_order(seed, kind):
    refusals = frozenset((generation, 1) for generation in range(5))
    parts = [Part(0, leaves_in=0, refuses=frozenset({(0, 1)})), *(Part(rank, refuses=refusals) for rank in (1, 2, 3))]

    assert explore(seed, parts=parts, kind=kind, slow=0).ends[0] == "left"


@given(members=st.frozensets(st.integers(0, 40)))
def test_members_come_back_as_they_went(members):
    assert decode_members(encode_members(members)) == tuple(sorted(members))


def test_the_text_of_members_grows_with_the_losses_only():
    survivors = set(range(10_000)) - {17, 4_000}

    assert encode_members(survivors) == "[[0, 16], [18, 3999], [4001, 9999]]"
    assert describe_members({0, 1, 2, 5}) == "0-2, 5"
    assert decode_members("[0, 1, 5]") == (0, 1, 5)


@pytest.mark.parametrize(
    "text",
    ["[[0, 4294967296]]", "[[3, 1]]", "[5, 1]", "[[0, 1, 2]]", "[true]", "7", "[null]", '["12"]', "[[0, 1.5]]", "no"],
)
def test_what_holds_no_members_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        check_vote("g/0/members", text)


def test_the_plays_reach_what_they_are_about():
    ends = [end for seed in range(60) for end in explore(seed, seed % 3, kind=KINDS[seed % 3]).ends.values()]

    assert {end: ends.count(end) > 5 for end in set(ends)} == dict.fromkeys(
        ("finished", "killed", "left", "voted out"), True
    )


def explored(size, counts=False):
    """An explored store and its members, used by one thread in turn: nothing waits."""
    store = Explored(0, counts=counts)
    store.yield_ = lambda name: None
    return store, [store.seat(rank) for rank in range(size)]


def test_a_client_that_slept_decides_no_act_whose_votes_are_gone_or_are_others():
    store, (lively, sleeper) = explored(2)
    roster = Roster(lively, 0, [0])
    roster.store.post("g/0/act/1/0", RosterVote(act="shrink").encode())
    sleeper._learn(len(store.log))
    assert [decision[0] for decision in sleeper.decisions] == ["g/1/members"]
    for _ in range(4):
        roster.shrink()
    store.write("g/0/act/1/0", RosterVote(act="shrink").encode())

    sleeper._decide()

    assert "g/1/members" not in store.items


def decide_one_vote_early(tally, acts):
    decided = []
    for act in acts:
        members = tally._members.get((act.key.scope, act.key.generation))
        if not act.is_done and members and len(act.votes) >= len(members - tally._dead) - 1:
            act.is_done = True
            decided.append(ActDecision(*tally._decision(act, members), act.key.act))
    return decided


@pytest.mark.parametrize("kind", ["clients count", "store counts"])
def test_a_store_that_decides_before_all_have_voted_is_found_out(monkeypatch, kind):
    monkeypatch.setattr(Tally, "_decide", decide_one_vote_early)

    with pytest.raises(AssertionError):
        explore_many(kind)


def test_a_relay_that_forgets_votes_is_found_out(monkeypatch):
    monkeypatch.setattr(NodeVotes, "note", lambda votes, key: votes._acts.clear())

    with pytest.raises(AssertionError, match="no thread can run"):
        explore_many("relays")


def explore_many(kind):
    for seed in range(20):
        explore(seed, kind=kind)


@pytest.fixture
def seats():
    return explored(12)[1]


def test_a_wish_that_is_taken_back_leaves_the_wishes_of_others(seats):
    roster = Roster(seats[1], 1, None)
    seats[0].put("join/11", json.dumps({"loop": 0}))

    came = roster.join(0, lambda: True)

    seats[0]._learn(len(seats[0].world.log))
    assert not came
    assert seats[0].under("join/") == {"11": '{"loop": 0}'}


def test_a_member_whose_wish_is_still_there_is_no_newcomer(seats):
    roster = Roster(seats[0], 0, [0, 1])
    for rank in (1, 2, 3):
        seats[0].put(f"join/{rank}", json.dumps({"loop": 0}))
    seats[0].put("dead/3", "killed")

    assert roster.newcomers(0) == (2,)


def test_check_tells_of_a_death_and_of_a_revocation_until_the_next_generation(seats):
    first, second = Roster(seats[0], 0, [0, 1, 2]), Roster(seats[1], 1, [0, 1, 2])
    first.check()
    second.revoke()
    seats[0]._learn(len(seats[0].world.log))

    with pytest.raises(PeerFailed, match="worker 1 has revoked generation 0"):
        first.check()

    seats[0].put("g/1/members", "[0, 1, 2]")
    first._enter(1, "[0, 1, 2]")
    first.check()
    seats[0].put("dead/2", "killed")
    with pytest.raises(PeerFailed, match=r"workers \[2\] are dead"):
        first.check()


@pytest.mark.parametrize("counts", [False, True])
def test_keys_of_generations_that_are_over_are_removed_and_a_member_that_slept_is_voted_out(counts):
    _, seats = explored(2, counts)
    sleeper = Roster(seats[1], 1, [0, 1])
    seats[0].put("dead/1", "it seemed so")
    lively = Roster(seats[0], 0, [0, 1])
    numbers = []
    for _ in range(20):
        lively.revoke()
        lively.shrink()
        numbers.append(len(seats[0].under("")))
    assert numbers[3] == numbers[-1], "the number of keys does not grow with the generations"
    assert "members" in seats[0].under("g/0/"), "a worker that starts late cannot begin the job again"

    seats[1]._learn(len(seats[1].world.log))
    with pytest.raises(VotedOut, match=r"worker 1 was voted out: generation 20 is \[0\]"):
        sleeper.agree(True)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("shrinks", [1, 2, 3, 4])
def test_a_member_that_sleeps_while_it_leaves_leaves_quietly_however_far_the_others_are(counts, shrinks):
    store, seats = explored(2, counts)
    leaver, lively = Roster(seats[1], 1, [0, 1]), Roster(seats[0], 0, [0, 1])
    wait = seats[1].wait

    def sleep(ready, timeout_s=None):
        for _ in range(shrinks):
            lively.shrink()
        seats[1]._learn(len(store.log))
        return wait(ready)

    seats[1].wait = sleep
    leaver.shrink(leaves=True)

    assert leaver.members == lively.members == (0,)
    assert leaver.generation in (1, shrinks)


def newcomer_alone(counts):
    """Members 0 and 1 of a store are dead; member 2, admitted in generation 1, is in generation 5."""
    store, seats = explored(3, counts)
    first, sleeper, newcomer = Roster(seats[0], 0, [0, 1]), Roster(seats[1], 1, [0, 1]), Roster(seats[2], 2, None)
    seats[0].put("dead/1", "it seemed so")
    seats[2].put("join/2", json.dumps({"loop": 0}))
    first.shrink(admits=0)
    seats[2]._learn(len(store.log))
    assert newcomer.join(0)
    seats[0].put("dead/0", "killed")
    seats[2]._learn(len(store.log))
    for _ in range(4):
        newcomer.shrink()
    assert (newcomer.generation, newcomer.members) == (5, (2,))
    return store, sleeper


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("act", [lambda roster: roster.shrink(), lambda roster: roster.agree(True)])
def test_a_sleeper_of_the_first_generation_decides_nothing_again_once_all_of_it_are_dead(act, counts):
    store, sleeper = newcomer_alone(counts)

    with pytest.raises(VotedOut, match=r"generation 5 is \[2\]"):
        act(sleeper)

    assert "g/1/members" not in store.items
    assert "g/0/act/1/decision" not in store.items


@pytest.mark.parametrize("counts", [False, True])
def test_a_newcomer_that_was_admitted_reported_dead_and_forgotten_stops_and_revokes_nothing(counts):
    store, seats = explored(3, counts)
    first = Roster(seats[0], 0, [0])
    wait = seats[2].wait

    def sleep(ready, timeout_s=None):
        if seats[2].get("g/0/revoked") is not None and first.generation == 0:
            seats[0]._learn(len(store.log))
            first.shrink(admits=0)
            assert first.members == (0, 2)
            seats[0].put("dead/2", "it seemed so")
            for _ in range(4):
                first.shrink()
            seats[2]._learn(len(store.log))
        return wait(ready, timeout_s)

    seats[2].wait = sleep
    with pytest.raises(VotedOut, match=r"worker 2 was reported dead before it joined \(it seemed so\)"):
        Roster(seats[2], 2, None).join_at_once()

    assert [key for key in store.items if key.endswith("/revoked")] == ["g/0/revoked"]


def test_members_that_are_not_at_the_same_point_are_a_bug_and_say_so(seats):
    first, second = Roster(seats[0], 0, [0, 1]), Roster(seats[1], 1, [0, 1])
    seats[1].put("g/0/act/1/1", json.dumps({"act": "shrink"}))
    seats[0]._learn(len(seats[0].world.log))

    with pytest.raises(InternalError, match=r"worker 0 is in agree, workers \[1\] are not"):
        first.agree(True)
    assert second.members == (0, 1)


def test_where_all_would_leave_nobody_does_and_newcomers_come(seats):
    roster = Roster(seats[0], 0, [0])
    seats[0].put("join/5", json.dumps({"loop": 0}))

    roster.shrink(admits=0, leaves=True)

    assert roster.members == (0, 5)
