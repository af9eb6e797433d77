"""What a job lacks when the worker is lost that was to write it, and ranks that wait for one that has left."""

import pytest
from some_records import some

from holdfast.launch.job_state import JobBroken, JobCompleted, JobState
from holdfast.records.types import (
    CollectiveAwaited,
    Finished,
    Recovered,
    RunStarted,
    ScriptEnded,
    SeatTaken,
    WorkerEnded,
    WriterDeclared,
)


def started(rank, **more):
    return some(RunStarted, **({"rank": rank, "steps_planned": 9, "parameters": 1} | more))


def in_group(rank):
    """The start of a rank of torch.distributed, which knows neither model nor plan."""
    return started(rank, steps_planned=0, parameters=0)


def finished(rank):
    return some(Finished, t_s=9.0, rank=rank, step=9, outcome="done", planned=9, committed=9)


def recovered(rank, lost, **more):
    return some(Recovered, t_s=5.0, rank=rank, step=4, lost=lost, **({"survivors": (rank,), "decision": "redo"} | more))


def asked(rank, is_lead, **more):
    return WriterDeclared(t_s=4.0, rank=rank, step=3, how="is_lead", is_lead=is_lead, **more)


def saved(rank):
    return WriterDeclared(t_s=9.5, rank=rank, step=9, how="save", is_lead=rank == 0)


def waits(rank, what="all_reduce(SUM)", number=12, members=(0, 1, 2)):
    named = {"rank": rank, "what": what, "signature": what, "number": number, "members": members, "group": 1}
    return some(CollectiveAwaited, t_s=5.0, step=11, where="train.py, line 33", **named)


def left(rank, completed=12, group=1):
    return ScriptEnded(t_s=4.0, rank=rank, step=11, steps=12, groups=(group,), completed=(completed,))


def ended(rank, exit_code, t_s=5.0):
    return WorkerEnded(t_s=t_s, rank=rank, step=4, exit_code=exit_code, pid=1)


def verdict(*records, ranks=(0, 1, 2), running=False):
    state = JobState("train.py")
    state.begin(ranks)
    for record in records:
        state.apply(record)
    return state.verdict(10.0, running=running)


def survivors_finish(*ranks):
    return [*map(finished, ranks), *(ended(rank, 0, t_s=10.0) for rank in ranks)]


RANK_0_DIES = (*map(in_group, range(3)), ended(0, -9), recovered(1, (0,)), recovered(2, (0,)))


def test_a_job_whose_rank_0_is_lost_is_not_done():
    said = verdict(*RANK_0_DIES, *survivors_finish(1, 2))

    assert isinstance(said, JobBroken)
    assert said.exit_code == 1
    assert not said.is_final
    assert 'under "rank == 0"' in said.message
    assert "is_lead()" in said.message


def test_another_rank_has_no_duties():
    said = verdict(*map(in_group, range(3)), ended(1, -9), recovered(0, (1,)), *survivors_finish(0, 2))

    assert isinstance(said, JobCompleted)


@pytest.mark.parametrize(
    ("calls", "is_done"),
    [
        ([asked(1, False), asked(2, False)], False),  # before the loss, and never again
        ([asked(1, True)], True),
        ([asked(2, False), asked(1, True)], True),
    ],
)
def test_a_survivor_that_was_told_that_it_leads_has_taken_the_duties_over(calls, is_done):
    said = verdict(*RANK_0_DIES, *calls, *survivors_finish(1, 2))

    assert isinstance(said, JobCompleted) == is_done, said
    assert is_done or "since" in said.message


def test_the_next_lead_is_lost_before_it_is_asked_again():
    """Rank 1 led, and died; rank 2 has never been told that it leads."""
    said = verdict(
        *RANK_0_DIES, asked(1, True), asked(2, False), ended(1, -9), recovered(2, (1,)), *survivors_finish(2)
    )

    assert isinstance(said, JobBroken)


def test_a_newcomer_in_seat_0_has_its_duties():
    seat = SeatTaken(t_s=6.0, rank=1, step=5, seat=0, worker=3)
    state = JobState("train.py")
    state.begin((0, 1, 2))
    state.wait_for(3)
    joined = recovered(1, (), joined=(3,), survivors=(1, 2, 3))
    for record in (*RANK_0_DIES, joined, seat, *survivors_finish(1, 2, 3)):
        state.apply(record)

    assert isinstance(state.verdict(10.0, running=False), JobCompleted)


def test_rank_0_that_dies_after_its_script_counts_too():
    said = verdict(*map(in_group, range(3)), *map(finished, range(3)), ended(0, -9, t_s=9.5), ended(1, 0), ended(2, 0))

    assert isinstance(said, JobBroken)


def test_rank_0_whose_script_has_ended_has_done_its_duties():
    """It is killed while it waits for the others, or its interpreter crashes at the end."""
    script = ScriptEnded(t_s=9.2, rank=0, step=8, steps=9, groups=(1,), completed=(9,))

    for code in (-9, -11):
        at_gate = [recovered(1, (0,)), recovered(2, (0,)), *survivors_finish(1, 2)]
        said = verdict(*map(in_group, range(3)), script, ended(0, code, t_s=9.5), *at_gate)
        assert isinstance(said, JobCompleted), said


# -- sessions


def late(victim, *calls):
    """Three workers of a session train; ``victim`` dies after training, before the script ends."""
    others = [rank for rank in range(3) if rank != victim]
    trained = [*map(started, range(3)), *map(finished, range(3))]
    return verdict(*trained, *calls, ended(victim, -9, t_s=9.5), *(ended(rank, 0, t_s=10.0) for rank in others))


@pytest.mark.parametrize("victim", range(3))
def test_a_worker_that_dies_after_training_may_have_had_to_write(victim):
    said = late(victim)

    assert isinstance(said, JobBroken)
    assert said.exit_code == 1
    assert f"worker {victim} was lost after training" in said.message
    assert "session.save" in said.message


@pytest.mark.parametrize(
    ("victim", "calls", "is_done"),
    [
        (1, [asked(0, True), asked(2, False)], True),
        (1, [asked(0, True, in_loop=True)], False),  # after the loop each worker may write
        (0, [asked(1, False), asked(2, False)], False),  # the survivors had been told that rank 0 would do it
        (0, [asked(1, False, in_loop=True)], False),
        (0, [saved(1), saved(2)], True),
        (0, [saved(1), asked(1, False, in_loop=True)], True),  # what it did in the loop is done
        (0, [saved(1), asked(1, False)], False),  # something else may be missing
        (0, [saved(0)], False),  # the others have not come to it
    ],
)
def test_a_script_that_says_who_writes_loses_nothing_by_the_death_of_another(victim, calls, is_done):
    said = late(victim, *calls)

    assert isinstance(said, JobCompleted) == is_done, said


def test_what_was_asked_between_two_loops_says_nothing_about_the_end():
    """The lead printed a figure of each epoch; in the end each worker writes."""
    assert isinstance(late(1, asked(0, True), *(started(rank, t_s=9.2) for rank in range(3))), JobBroken)


def test_a_worker_whose_death_the_others_have_recovered_from_is_no_late_loss():
    """It had passed the gate of an earlier loop."""
    first = [*map(started, range(3)), *map(finished, range(3))]
    second = [ended(0, -9, t_s=12.0), recovered(1, (0,)), recovered(2, (0,)), *survivors_finish(1, 2)]

    assert isinstance(verdict(*first, *second), JobCompleted)


# -- ranks that wait in vain


def blocked(*records):
    return verdict(*map(in_group, range(3)), *records, running=True)


def test_ranks_that_wait_for_one_whose_script_has_ended():
    said = blocked(left(2), waits(0), waits(1))

    assert isinstance(said, JobBroken)
    assert said.is_final
    assert said.message == (
        "rank 2 has ended its script after 12 steps; ranks 0 and 1 wait for it in all_reduce(SUM) (train.py, line 33):"
        " uneven data; use model.join(), or give every rank the same number of batches"
    )


def test_two_ranks_have_left():
    said = blocked(left(2), left(1), waits(0))

    assert said.message.startswith("ranks 1 and 2 have ended their scripts after 12 steps; rank 0 waits for them in")


@pytest.mark.parametrize(
    "records",
    [
        [waits(0), waits(1)],  # rank 2 computes
        [left(2), waits(0)],  # rank 1 may still save; it is not interrupted
        [left(2, completed=13), waits(0), waits(1)],  # it has called the collective: the others are about to return
        [left(2, group=7), waits(0, members=(0, 1)), waits(1, members=(0, 1))],  # it is no member
        [left(2), waits(0), waits(1), waits(1, what="")],
        [left(0), left(1), left(2)],
        [waits(0), waits(1), waits(2)],  # slow, but the same call
        [waits(0), waits(1), waits(2, "barrier", number=13)],  # the others are about to return from it
        [left(2, completed=13), waits(0, number=13), waits(1)],  # rank 1 is about to return from the one before
        [waits(0, members=(0, 1)), waits(1, members=(0, 1)), waits(2, "barrier", number=13)],
        [waits(0), waits(1, "barrier")],  # rank 2 may still come
    ],
)
def test_a_wait_that_may_end(records):
    assert blocked(*records) is None


def test_ranks_that_all_wait_in_different_calls():
    said = blocked(waits(0), waits(1), waits(2, "barrier"))

    assert isinstance(said, JobBroken)
    assert "different collectives as number 12" in said.message
    assert "rank 2: barrier (train.py, line 33)" in said.message


def test_a_rank_outside_of_their_group_does_not_hide_that_two_wait_in_different_calls():
    """It may be an idle spare, or wait for a message."""
    said = blocked(waits(0, members=(0, 1)), waits(1, "barrier", members=(0, 1)))

    assert isinstance(said, JobBroken)
    assert "different collectives as number 12 of their group: rank 0: all_reduce(SUM)" in said.message
    assert "rank 2" not in said.message


def test_after_a_loss_the_same_may_not_happen_again():
    said = blocked(ended(2, -9), recovered(0, (2,)), left(1), waits(0, members=(0, 1)))

    assert isinstance(said, JobBroken)
    assert not said.is_final


def test_ranks_that_were_asked_to_stop_may_have_left_for_that():
    state = JobState("train.py")
    state.begin((0, 1, 2))
    state.is_stopping = True
    for record in (*map(in_group, range(3)), left(2), waits(0), waits(1)):
        state.apply(record)

    said = state.verdict(10.0, running=True)

    assert isinstance(said, JobBroken)
    assert (said.exit_code, said.is_final) == (1, False)
