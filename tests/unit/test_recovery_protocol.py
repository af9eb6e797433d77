"""One worker's protocol: what happens, and what it then does."""

import copy

import pytest

from holdfast.errors import InternalError, JobError
from holdfast.recovery import Forward, Protocol, Restart, Rollback
from holdfast.recovery.messages import (
    JOINING,
    LOADING,
    Action,
    Admitted,
    AdoptPlacement,
    AdoptState,
    Agree,
    Agreed,
    ApplyConfig,
    ApplyStep,
    BucketReduced,
    CatchUp,
    ChangesWait,
    CheckpointLoaded,
    Computed,
    ComputeStep,
    ContinueStep,
    DataExhausted,
    DiscardStep,
    Done,
    Event,
    FetchConfig,
    HandedOver,
    HandOver,
    Leave,
    LeftGroup,
    LoadCheckpoint,
    LoopLeft,
    MembersChange,
    MoveParts,
    Note,
    PeerLost,
    Progress,
    ProgressKnown,
    Publish,
    ReduceBucket,
    Revoke,
    Revoked,
    SaveAndStop,
    SendState,
    ShareProgress,
    Shrink,
    Shrunk,
    Started,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast.recovery.protocol import ProtocolState

YES, NO = Agreed(value=True), Agreed(value=False)
AGREE_1, AGREE_0 = Agree(flag=True), Agree(flag=False)

Table = list[tuple[Event, list[Action]]]

# What everybody hears and does, from the start to the sum of bucket 0 of step 0.
BEGIN: Table = [
    (Started(), [LoadCheckpoint()]),
    (CheckpointLoaded(0), [ComputeStep(0)]),
    (Computed(), [ReduceBucket(0, 0)]),
]

# From the sum of bucket 0 of step 0 to that of step 1, with two buckets.
STEP_0: Table = [
    (BucketReduced(), [Publish(-1), ReduceBucket(0, 1)]),
    (BucketReduced(), [VoteStep(0)]),
    (StepVoted(), [ApplyStep(0)]),
    (StepApplied(), [ComputeStep(1)]),
    (Computed(), [ReduceBucket(1, 0)]),
]


def recovery(mine: Progress, told: bool = False) -> Table:
    """From the failure to the agreement on what everybody said, which decides."""
    first: Table = [(NO, [Shrink()])]
    if not told:
        first = [(PeerLost(), [Revoke()]), (Revoked(), [AGREE_0]), *first]
    return [*first, (Shrunk(), [AGREE_1]), (YES, [ShareProgress(mine)])]


def news(*completed: int, computed: bool = True, num_buckets: int = 2) -> Table:
    """Everybody's progress is known, by rank from 0."""
    progress = {rank: Progress(c, computed) for rank, c in enumerate(completed)}
    return [(ProgressKnown(progress, num_buckets), [AGREE_1])]


def play(protocol: Protocol, *tables: Table) -> Protocol:
    """Tell ``protocol`` what happens, and check what it does, line by line."""
    for number, (event, orders) in enumerate(line for table in tables for line in table):
        assert protocol.handle(event) == orders, f"line {number}: {event}"
    return protocol


# -- without failures


def test_a_step_is_computed_summed_closed_and_applied():
    protocol = play(Protocol(Rollback(), 3), [(Started(), [LoadCheckpoint()]), (CheckpointLoaded(7), [ComputeStep(7)])])

    play(
        protocol,
        [
            (Computed(), [ReduceBucket(7, 0)]),
            (BucketReduced(), [Publish(6), ReduceBucket(7, 1)]),  # everybody applied step 6 before it entered this sum
            (BucketReduced(), [ReduceBucket(7, 2)]),
            (BucketReduced(), [VoteStep(7)]),
            (StepVoted(), [ApplyStep(7)]),
            (StepApplied(), [ComputeStep(8)]),
        ],
    )

    assert protocol.step == 8
    assert protocol.progress == Progress(32, computed=False)


def test_nobody_leaves_but_through_two_agreements():
    protocol = play(
        Protocol(Rollback(), 2),
        BEGIN,
        STEP_0[:-1],
        [
            (DataExhausted(), [AGREE_1]),
            (YES, [Publish(0), AGREE_1]),
            (YES, [Leave()]),
        ],
    )

    assert protocol.state is ProtocolState.LEFT


def test_a_loop_that_was_left_ends_at_the_gate_and_its_last_step_is_kept_until_all_have_left():
    left: Table = [
        (BucketReduced(), [Publish(0), ReduceBucket(1, 1)]),
        (BucketReduced(), [VoteStep(1)]),
        (LoopLeft(), [AGREE_1]),
    ]
    protocol = play(Protocol(Rollback(), 2), BEGIN, STEP_0, left)
    play(copy.copy(protocol), [(YES, [Publish(0), AGREE_1]), (YES, [Leave()])])

    # a peer has missed the vote: all are still in step 1, which is computed, and voted on again
    play(
        protocol,
        recovery(Progress(5, computed=True), told=True),
        news(5, 5),
        [(YES, [DiscardStep(1)]), (Done(), [ComputeStep(1)]), (Computed(), [ReduceBucket(1, 0)])],
        left,
    )


# -- recovery


def test_a_failed_sum_is_answered_by_the_five_parts_of_recovery():
    protocol = play(Protocol(Rollback(), 2), BEGIN, STEP_0[:1])

    play(
        protocol,
        [
            (PeerLost(), [Revoke()]),
            (Revoked(), [AGREE_0]),
            (NO, [Shrink()]),
            (Shrunk(), [AGREE_1]),
            (YES, [ShareProgress(Progress(1, computed=True))]),
            (ProgressKnown({0: Progress(1, True), 2: Progress(1, True)}, 2), [AGREE_1]),
            (YES, [DiscardStep(0)]),
            (Done(), [ComputeStep(0)]),
        ],
    )


def test_a_gate_that_failed_is_not_followed_by_a_revoke():
    at_the_gate = play(Protocol(Rollback(), 2), BEGIN, STEP_0[:-1], [(DataExhausted(), [AGREE_1])])
    at_the_last = play(copy.copy(at_the_gate), [(YES, [Publish(0), AGREE_1])])

    for protocol in (at_the_gate, at_the_last):
        play(
            protocol,
            recovery(Progress(3, computed=False), told=True),
            news(3, 3, computed=False),
            [
                (YES, [DiscardStep(1)]),
                (Done(), [ComputeStep(1)]),
                (DataExhausted(), [AGREE_1]),
                (YES, [Publish(0), AGREE_1]),
                (YES, [Leave()]),
            ],
        )


def test_whoever_did_not_close_a_step_that_somebody_closed_applies_it_now():
    behind = play(Protocol(Rollback(), 2), BEGIN, STEP_0[:2])
    ahead = play(Protocol(Rollback(), 2), BEGIN, STEP_0)
    everybody = news(2, 3)
    then: Table = [(Done(), [ComputeStep(1)])]

    play(
        behind,
        recovery(Progress(2, computed=True)),
        everybody,
        [(YES, [ApplyStep(0)]), (StepApplied(), [DiscardStep(1)])],
        then,
    )
    play(ahead, recovery(Progress(3, computed=True)), everybody, [(YES, [DiscardStep(1)])], then)

    assert behind.key() == ahead.key()


def test_forward_hands_over_the_bucket_that_only_some_hold_and_goes_on():
    behind = play(Protocol(Forward(), 2), BEGIN, STEP_0[:1])
    ahead = play(Protocol(Forward(), 2), BEGIN, STEP_0[:2])
    then: Table = [(YES, [HandOver(0, 1, 1)]), (HandedOver(0, 1), [VoteStep(0)])]

    play(behind, recovery(Progress(1, computed=True)), news(1, 2), then)
    play(ahead, recovery(Progress(2, computed=True)), news(1, 2), then)

    assert behind.key() == ahead.key()


def test_restart_says_that_it_loads_before_it_loads():
    protocol = play(Protocol(Restart(), 2), BEGIN, STEP_0)
    play(protocol, recovery(Progress(3, computed=True)), news(3, 3), [(YES, [LoadCheckpoint()])])

    assert protocol.progress == Progress(LOADING, computed=False)
    assert protocol.step == -1

    play(protocol, recovery(Progress(LOADING, computed=False)), news(LOADING, 0), [(YES, [LoadCheckpoint()])])
    play(protocol, [(CheckpointLoaded(0), [ComputeStep(0)])])


def test_too_few_workers_save_and_leave_through_the_gate():
    protocol = play(Protocol(Rollback(min_workers=2), 2), BEGIN, STEP_0)

    play(
        protocol,
        recovery(Progress(3, computed=True)),
        news(3),
        [
            (YES, [DiscardStep(1)]),
            (Done(), [SaveAndStop()]),
            (Done(), [AGREE_1]),
            (YES, [Publish(0), AGREE_1]),
            (YES, [Leave()]),
        ],
    )


# -- coming and leaving

# From the closing sum of step 0, in which all hear that members change, to where all know how far all are.
MEETING: Table = [
    (StepApplied(), [ComputeStep(1)]),
    (MembersChange(), [AGREE_0]),
    (NO, [Shrink()]),
    (Shrunk(), [AGREE_1]),
    (YES, [ShareProgress(Progress(3, computed=False))]),
]
COMING: Table = [(Admitted(), [AGREE_1]), (YES, [ShareProgress(Progress(JOINING, computed=False))])]
WELCOME: Table = [(YES, [SendState(1, (2,))]), (Done(), [AGREE_1])]


def newcomer_known(*completed: int) -> Table:
    return news(*completed, computed=False)


@pytest.mark.parametrize("kind", [Rollback, Forward, Restart])
def test_a_newcomer_begins_like_the_others_once_all_know_that_it_has_their_state(kind):
    giver, newcomer = play(Protocol(kind(), 2), BEGIN, STEP_0[:3], MEETING), play(Protocol(kind(), 2), COMING)
    then: Table = [(YES, [AdoptState(1)]), (Done(), [ComputeStep(1)]), (Computed(), [ReduceBucket(1, 0)])]

    for protocol in (giver, newcomer):
        play(protocol, newcomer_known(3, 3, JOINING), WELCOME, then)

    assert newcomer.progress == Progress(3, computed=True)
    assert giver.key() == newcomer.key()


def test_who_leaves_the_others_says_so_in_the_shrink_and_passes_no_gate():
    protocol = play(Protocol(Rollback(), 2), BEGIN, STEP_0[:3], MEETING[:3], [(LeftGroup(), [Leave()])])

    assert protocol.state is ProtocolState.LEFT


def test_newcomers_that_are_left_alone_do_not_invent_a_state():
    newcomer = play(Protocol(Rollback(), 2), COMING)
    play(newcomer, [(ProgressKnown({2: Progress(JOINING, False), 3: Progress(JOINING, False)}, 2), [AGREE_1])])

    with pytest.raises(JobError, match=r"only newcomers are alive, \[2, 3\]"):
        newcomer.handle(YES)


@pytest.mark.parametrize("others", [(3, 2), (4, 4), (LOADING, LOADING)])
def test_workers_that_are_not_between_the_same_steps_cannot_have_admitted_anybody(others):
    newcomer = play(Protocol(Rollback(), 2), COMING, newcomer_known(*others, JOINING))

    with pytest.raises(InternalError, match="not all between the same two steps"):
        newcomer.handle(YES)


# -- changes to the running job

CHANGES: Table = [(ChangesWait(), [FetchConfig()]), (Done(), [AGREE_1])]


def test_changes_are_made_when_all_have_agreed_that_they_have_them():
    play(
        Protocol(Rollback(), 2),
        BEGIN,
        STEP_0[:4],
        CHANGES,
        [(YES, [ApplyConfig()]), (Done(), [ComputeStep(1)])],
    )


# -- what cannot be


@pytest.mark.parametrize(
    "event",
    [
        Started(),
        Admitted(),
        BucketReduced(),
        StepVoted(),
        StepApplied(),
        YES,
        Shrunk(),
        LeftGroup(),
        Revoked(),
        Done(),
        HandedOver(0, 0),
    ],
    ids=str,
)
def test_an_event_that_cannot_happen_now_is_an_internal_error(event):
    protocol = play(Protocol(Rollback(), 2), BEGIN[:2])

    with pytest.raises(InternalError, match="cannot happen in state COMPUTE"):
        protocol.handle(event)


def test_no_sum_fails_while_none_is_open():
    protocol = play(Protocol(Rollback(), 2), BEGIN[:2])

    with pytest.raises(InternalError, match="no collective can fail in state COMPUTE"):
        protocol.handle(PeerLost())


def test_an_order_of_a_strategy_is_not_answered_by_a_sum():
    protocol = play(Protocol(Rollback(), 2), BEGIN[:1])

    with pytest.raises(InternalError, match=r"BucketReduced\(\) does not answer an action"):
        protocol.handle(BucketReduced())


def test_survivors_two_sums_apart_are_an_internal_error():
    protocol = play(Protocol(Rollback(), 2), BEGIN, recovery(Progress(0, computed=True)), news(0, 2))

    with pytest.raises(InternalError, match="2 collectives apart"):
        protocol.handle(YES)


def test_a_strategy_may_not_order_what_is_not_its_business():
    class Leaver:
        def handle(self, event: Event) -> list[Action]:
            return [CatchUp(-1), Leave()]

    protocol = play(Protocol(Leaver(), 2), BEGIN, recovery(Progress(0, computed=True)), news(0, 0))

    with pytest.raises(InternalError, match="may not order the action Leave"):
        protocol.handle(YES)


def test_a_step_has_a_bucket():
    with pytest.raises(InternalError, match="num_buckets must be at least 1, or 0 for a model that is split, got 0"):
        Protocol(Rollback(), 0)
    with pytest.raises(InternalError, match="got -1"):
        Protocol(Rollback(), -1, split=True)


# -- split models

# From the start to the closing sum of step 0, where all sums but the closing one are among some workers.
SPLIT: Table = [
    (Started(), [LoadCheckpoint()]),
    (CheckpointLoaded(0), [ComputeStep(0)]),
    (Computed(), [VoteStep(0)]),
]

# The parts get new homes, and the step in progress is computed.
REHOMED: Table = [(Done(), [AGREE_1]), (YES, [AdoptPlacement()])]


def test_the_closing_sum_of_a_split_model_publishes_the_step_before():
    play(
        Protocol(Rollback(), 0, split=True),
        SPLIT,
        [
            (StepVoted(), [Publish(-1), ApplyStep(0)]),
            (StepApplied(), [ComputeStep(1)]),
            (Computed(), [VoteStep(1)]),
            (StepVoted(), [Publish(0), ApplyStep(1)]),
        ],
    )


@pytest.mark.parametrize("strategy", [Rollback(), Forward()], ids=["rollback", "forward"])
def test_parts_of_the_dead_get_new_homes_before_the_step_is_computed_again(strategy):
    play(
        Protocol(strategy, 0, split=True),
        SPLIT,
        recovery(Progress(0, computed=False)),  # nobody can go on with what it computed: the dead's part is missing
        news(0, 0, computed=False, num_buckets=0),
        [(YES, [DiscardStep(0)]), (Done(), [MoveParts()])],
        REHOMED,
        [(Done(), [ComputeStep(0)])],
    )


@pytest.mark.parametrize("strategy", [Rollback(), Forward(), Restart()], ids=["rollback", "forward", "restart"])
def test_where_a_part_is_lost_all_load_and_loading_gives_it_a_home(strategy):
    progress = {0: Progress(0, computed=False), 2: Progress(0, computed=False, flags=Note.LOST)}

    play(
        Protocol(strategy, 0, split=True),
        SPLIT,
        recovery(Progress(0, computed=False)),
        [(ProgressKnown(progress, 0), [AGREE_1]), (YES, [LoadCheckpoint()]), (CheckpointLoaded(0), [ComputeStep(0)])],
    )


# -- copies


def test_orders_that_continue_a_step_begin_at_what_this_worker_has():
    class GoesOn:
        def handle(self, event: Event) -> list[Action]:
            return [ContinueStep(0, 1)]

    play(
        Protocol(GoesOn(), 2),
        BEGIN,
        STEP_0[:1],
        recovery(Progress(1, computed=True)),
        news(1, 1),
        [(YES, [ReduceBucket(0, 1)])],
    )
