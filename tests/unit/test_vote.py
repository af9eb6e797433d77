"""The commit vote: which integers it is, in which order, and what all hear in their maxima."""

import dataclasses

import pytest

from holdfast.comm.allreduce.shm import MAX_INTEGERS
from holdfast.errors import InternalError
from holdfast.recovery.messages import REPORTED, VOTED, Note
from holdfast.recovery.vote import NOTHING, CommitVote, GuardVote, MinMax, leaver_vote

SILENT = GuardVote(altered=None, replicas=None, ranges=None, odd=None)
LARGEST_GUARD = GuardVote(altered=False, replicas=MinMax(9, 9), ranges=0, odd=MinMax(-1, 1 << 30))
VOTE = CommitVote(
    guard=SILENT, parts=(), step=MinMax(7, 7), stop=False, leave=False, change=False, stays=True, has_store=True, ask=False, save=None
)  # fmt: skip


def vote(**fields):
    return dataclasses.replace(VOTE, **fields)


def said(*votes):
    """Return what all hear in the maxima of some votes."""
    return votes[0].unpack([max(column) for column in zip(*(each.pack() for each in votes), strict=True)])


@pytest.mark.parametrize(
    ("given", "integers"),
    [
        (vote(), [7, ~7, 0, 0, 0, 1, 1, 0]),
        (vote(stop=True, leave=True, change=True, ask=True), [7, ~7, 1, 2, 8, 1, 1, 16]),
        (vote(stays=False, has_store=False, save=True), [7, ~7, 0, 0, 0, 0, 0, 0, 1]),
        (vote(guard=dataclasses.replace(SILENT, replicas=MinMax.of([5]))), [5, ~5, 7, ~7, 0, 0, 0, 1, 1, 0]),
        (
            vote(guard=GuardVote(altered=True, replicas=MinMax.of([5, 3]), ranges=4, odd=MinMax(2, 1))),
            [1, 5, ~3, 4, 2, ~1, 7, ~7, 0, 0, 0, 1, 1, 0],
        ),
        (
            vote(guard=dataclasses.replace(SILENT, replicas=MinMax.of([])), parts=(MinMax.of([6]), MinMax.of([]))),
            [NOTHING, NOTHING, 6, ~6, NOTHING, NOTHING, 7, ~7, 0, 0, 0, 1, 1, 0],
        ),
    ],
    ids=["quiet", "flags", "leaving", "guard stop", "guard heal with sums", "split"],
)
def test_the_integers_and_their_order_are_those_that_workers_of_all_versions_send(given, integers):
    assert given.pack() == integers
    assert given.unpack(integers) == given


def test_all_hear_the_largest_the_smallest_and_what_any_says():
    heard = said(
        vote(step=MinMax(8, 8), stop=True, guard=dataclasses.replace(LARGEST_GUARD, odd=MinMax(0, 0))),
        vote(stays=False, guard=dataclasses.replace(LARGEST_GUARD, replicas=MinMax(4, 4), ranges=3)),
    )

    assert (heard.step, heard.step.differs) == (MinMax(8, 7), True)
    assert heard.guard == GuardVote(altered=False, replicas=MinMax(9, 4), ranges=3, odd=MinMax(0, 0))
    assert (heard.stop, heard.leave, heard.stays) == (True, False, True)


@pytest.mark.parametrize(
    ("numbers", "integers"), [([], [NOTHING, NOTHING]), ([0], [0, ~0]), ([3, 8, 5], [8, ~3])], ids=str
)
def test_a_part_is_its_largest_and_smallest_digest_and_a_worker_without_it_changes_nothing(numbers, integers):
    assert MinMax.of(numbers).pack() == integers
    assert said(MinMax.of(numbers), MinMax.of([])) == MinMax.of(numbers)


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ([vote(), vote()], Note(0)),
        ([vote(stop=True), vote(ask=True)], Note.STOP | Note.ASK),
        ([vote(change=True, stays=False), vote()], Note.CHANGE),
        ([vote(change=True, stays=False), vote(change=True, stays=False)], Note.LEAVE),
        ([vote(has_store=False), vote()], Note(0)),
        ([vote(has_store=False, change=True), vote(has_store=False)], Note.LEAVE),
    ],
    ids=["nothing", "both", "one leaves", "all leave", "one is stranded", "all are stranded"],
)
def test_if_none_stays_or_none_reaches_the_store_all_stop(given, notes):
    assert said(*given).notes == notes


def test_only_a_split_model_that_is_hashed_as_a_whole_takes_more_integers_than_shared_memory_has():
    replicated = vote(guard=LARGEST_GUARD, save=False)
    split = vote(guard=dataclasses.replace(SILENT, altered=False, replicas=MinMax(9, 9)), save=False)

    assert len(replicated.pack()) == MAX_INTEGERS
    assert len(dataclasses.replace(split, parts=(MinMax(1, 1),)).pack()) <= MAX_INTEGERS
    assert len(dataclasses.replace(split, parts=(MinMax(1, 1),) * 2).pack()) > MAX_INTEGERS


@pytest.mark.parametrize("wrong", [[], [1] * 7, [1] * 9])
def test_an_answer_to_another_vote_is_refused(wrong):
    with pytest.raises(InternalError, match=f"a vote of 8 integers was reduced to {len(wrong)}"):
        VOTE.unpack(wrong)


def test_workers_that_have_left_the_loop_say_so_in_place_of_the_step():
    some = said(vote(), vote(step=leaver_vote(0)), vote(step=leaver_vote(3)), vote())
    none, every = said(vote(), vote()), said(vote(step=leaver_vote(1)), vote(step=leaver_vote(0)))

    assert [vote.has_left for vote in (none, some, every)] == [False, True, True]
    assert [vote.has_all_left for vote in (none, some, every)] == [False, False, True]
    assert some.leaver_line().startswith("rank 3 left the loop after step 6, while other ranks were in step 7: ")


def test_each_note_is_voted_or_reported():
    assert sum(Note) == VOTED | REPORTED
    assert not VOTED & REPORTED
