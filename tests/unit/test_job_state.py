"""What records mean for a job, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.launch.job_state import VAIN_RECOVERIES, JobBroken, JobCompleted, JobLost, JobState
from holdfast.records.beacon import BeaconPosition
from holdfast.records.types import (
    DeviceLost,
    FaultFired,
    Finished,
    Left,
    Recovered,
    RunStarted,
    ScriptFailed,
    StepCommitted,
    WorkerEnded,
)


def started(rank):
    return RunStarted(
        t_s=0.0, rank=rank, step=0, fabric="ulfm", strategy="rollback", seed=0, workers=2, slices=2, order="fold",
        split="slices", batch="global", rescale="survivors", steps_planned=9, samples_planned=9, num_buckets=1,
        parameters=1,
    )  # fmt: skip


def finished(rank, outcome="done"):
    return Finished(
        t_s=9.0, rank=rank, step=9, outcome=outcome, sha256="", state_sha256="", planned=9, committed=9, lost=0,
        repeated=0, metrics={}, checkpoint="",
    )  # fmt: skip


def ended(rank, exit_code, step=4, t_s=5.0):
    return WorkerEnded(t_s=t_s, rank=rank, step=step, exit_code=exit_code, pid=1)


def failed(rank, t_s=5.0, exit_code=1, **more):
    return ScriptFailed(t_s=t_s, rank=rank, step=4, exit_code=exit_code, message=f"boom {rank}", traceback="T", **more)


def killed(rank):
    return FaultFired(t_s=5.0, rank=rank, step=4, fault=0, kind="kill", phase="forward")


def recovered(rank, lost):
    return Recovered(
        t_s=5.0, rank=rank, step=4, lost=lost, survivors=(rank,), decision="redo", redone_steps=1, generation=1
    )


def at(phase="forward", step=4, slice_=2, beats=1, **more):
    return BeaconPosition(beats=beats, step=step, slice=slice_, phase=phase, pid=1, samples=(7, 8), **more)


@pytest.fixture
def judge():
    judge = JobState("train.py", stall_timeout_s=60.0)
    judge.begin((0, 1, 2))
    for rank in range(3):
        judge.apply(started(rank))
    return judge


def test_a_job_goes_on_while_somebody_lives(judge):
    judge.apply(ended(1, -9))

    assert judge.verdict(1.0, running=True) is None
    assert judge.living() == (0, 2)


def test_a_job_is_done_when_all_that_are_not_dead_have_finished_and_ended(judge):
    judge.apply(ended(1, -9))
    for rank in (0, 2):
        judge.apply(finished(rank))
    assert judge.verdict(1.0, running=True) is None

    for rank in (0, 2):
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(0))


def test_a_bug_of_the_script_is_final(judge):
    judge.apply(failed(1, is_bug=True))
    judge.apply(recovered(0, lost=(1,)))

    assert judge.verdict(1.0, running=True) == JobBroken("rank 1, step 4: boom 1", 1, "T", is_final=True)


def test_scripts_that_need_failed_ranks_lose_the_job_as_a_whole(judge):
    judge.apply(ended(1, -9, t_s=4.0))
    judge.apply(failed(2, t_s=5.2, is_loss=True))
    judge.apply(failed(0, t_s=5.0, is_loss=True))

    assert judge.verdict(6.0, running=True) == JobLost("boom 0", is_final=False)


def test_an_error_of_the_script_beside_them_is_what_ends_it(judge):
    judge.apply(failed(0, t_s=5.0, is_loss=True))
    judge.apply(failed(2, t_s=5.2))

    assert isinstance(judge.verdict(6.0, running=True), JobBroken)


RECOVERED_BEFORE = replace(recovered(0, lost=(2,)), t_s=4.0)


@pytest.mark.parametrize(
    "known", [[ended(2, -9, t_s=4.0)], [RECOVERED_BEFORE], [RECOVERED_BEFORE, ended(2, -9, t_s=6.0)]]
)
def test_an_exception_after_a_loss_may_be_due_to_it(judge, known):
    for record in (*known, failed(1, is_bug=True)):
        judge.apply(record)

    assert judge.verdict(1.0, running=True) == JobBroken("rank 1, step 4: boom 1", 1, "T")


def committed(step):
    return StepCommitted(t_s=5.0, rank=0, step=step, epoch=0, samples=4, workers=3, metrics={})


def test_only_new_steps_are_progress():
    judge, seen = JobState("train.py"), []
    for steps in ((0, 1), (0, 1), (), (2,), (1, 2)):
        judge.begin((0,))
        for step in steps:
            judge.apply(committed(step))
        seen.append(judge.restarts_in_vain)

    assert seen == [0, 1, 2, 0, 1]


def test_a_worker_that_the_others_have_lost_is_asked_for_until_its_end_is_recorded(judge):
    judge.apply(recovered(0, (1,)))
    assert judge.lost_without_end() == {1}

    judge.apply(ended(1, -9))
    assert judge.lost_without_end() == set()


def test_mpirun_being_gone_does_not_make_a_job_fail_that_finished(judge):
    for rank in (0, 1, 2):
        judge.apply(finished(rank))
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=False) == JobCompleted(finished(0))


def test_the_first_exception_ends_the_job(judge):
    judge.apply(failed(2, t_s=6.0))
    judge.apply(failed(1, t_s=5.0))

    assert judge.verdict(1.0, running=True) == JobBroken("rank 1, step 4: boom 1", 1, "T")


def test_a_wrong_setting_keeps_its_exit_code_and_names_no_rank(judge):
    judge.apply(failed(1, exit_code=2))

    assert judge.verdict(1.0, running=True) == JobBroken("boom 1", 2, "T")


def test_an_exit_code_without_an_exception_ends_the_job(judge):
    judge.apply(ended(1, 3))

    verdict = judge.verdict(1.0, running=True)

    assert verdict == JobBroken("rank 1, step 4: train.py ended with exit code 3", rank=1, step=4)


def test_leaving_training_early_ends_the_job(judge):
    judge.apply(ended(1, 0))

    verdict = judge.verdict(1.0, running=True)

    assert verdict == JobBroken(
        "rank 1 left training at step 4 before its end: train.py returned", rank=1, step=4, is_final=True
    )


def test_a_script_that_never_trains_is_told_so():
    judge = JobState("train.py")
    judge.begin((0, 1))
    judge.apply(ended(0, 0, step=-1))

    verdict = judge.verdict(1.0, running=True)

    assert isinstance(verdict, JobBroken)
    assert verdict.message == "train.py ended without training: it never ran session.steps(...)"


def test_giving_up_is_not_an_exception(judge):
    for rank in (0, 1, 2):
        judge.apply(finished(rank, "gave-up"))
        judge.apply(failed(rank))
        judge.apply(ended(rank, 1))

    assert judge.verdict(1.0, running=False) == JobCompleted(finished(0, "gave-up"))


def test_a_job_whose_workers_all_died_is_lost_and_starts_again_without_those_that_were_killed(judge):
    judge.apply(killed(0))
    judge.apply(ended(0, -9))
    judge.apply(ended(1, -11))
    judge.apply(ended(2, -9))

    verdict = judge.verdict(1.0, running=True)

    assert verdict == JobLost("rank 0 killed by SIGKILL; rank 1 killed by SIGSEGV; rank 2 killed by SIGKILL")
    assert judge.ranks_left() == (1,)


def test_a_worker_that_survivors_missed_does_not_start_again(judge):
    judge.apply(recovered(0, lost=(1,)))

    assert judge.verdict(1.0, running=False) == JobLost("ranks 0, 2 ended, and how is not recorded")
    assert judge.ranks_left() == (0, 2)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([ended(0, -9)], "rank 0 killed by SIGKILL"),
        ([], "rank 0 ended, and how is not recorded"),
    ],
)
def test_workers_lost_with_their_node_are_not_named_as_the_reason(judge, ends, reason):
    judge.lose([1, 2])
    for end in ends:
        judge.apply(end)

    assert judge.verdict(1.0, running=False) == JobLost(reason)


def test_known_ends_are_named_beside_unknown_ones(judge):
    judge.apply(ended(1, -11))

    reason = "ranks 0, 2 ended, and how is not recorded; rank 1 killed by SIGSEGV"
    assert judge.verdict(1.0, running=False) == JobLost(reason)


def test_a_job_whose_nodes_are_all_lost_says_so(judge):
    judge.lose([0, 1, 2])

    assert judge.verdict(1.0, running=True) == JobLost("no worker is left, and how they ended is not recorded")


def test_the_end_of_a_worker_of_an_earlier_start_does_not_end_the_job(judge):
    judge.begin((3, 4))
    judge.apply(started(3))
    judge.apply(finished(2, "stopped"))  # on a host that was taken for lost
    for rank in (3, 4):
        judge.apply(finished(rank))
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=False) == JobCompleted(finished(3))


def test_where_there_is_an_mpirun_its_end_is_named():
    judge = JobState("train.py", all_connect=True)
    judge.begin((0, 1))
    for rank in (0, 1):
        judge.apply(started(rank))
    judge.apply(recovered(0, lost=(1,)))

    assert judge.verdict(1.0, running=False) == JobLost("mpirun ended before the workers did")


def test_when_nobody_is_left_a_replacement_gets_a_new_number(judge):
    for rank in range(3):
        judge.apply(ended(rank, -9))
    assert judge.ranks_left() == (3,)

    judge.begin((3,))
    judge.apply(ended(3, -9))

    assert judge.ranks_left() == (4,)


def test_deaths_that_the_launcher_caused_are_not_counted(judge):
    judge.close()
    for rank in range(3):
        judge.apply(ended(rank, -9))

    assert judge.ranks_left() == (0, 1, 2)


def test_workers_that_never_started_are_not_started_again():
    judge = JobState("train.py")
    judge.begin((0, 1))

    assert judge.verdict(1.0, running=False) == JobBroken("the workers did not start", unexplained=True)


def test_the_error_of_a_device_that_samples_break_is_said_with_them(judge):
    for rank in (0, 1, 2):
        judge.apply(
            DeviceLost(t_s=1.0, rank=rank, step=4, what="lost", message="CUDA error: device-side assert triggered")
        )
        judge.apply(ended(rank, -9), at("backward"))

    verdict = judge.verdict(1.0, running=True)
    assert isinstance(verdict, JobBroken)
    assert verdict.message == (
        "workers 0, 1, 2 died one after another at the same place, slice 2 of step 4 (backward, lost its device: CUDA error: "
        "device-side assert triggered): its samples are the likely cause: 7, 8"
    )


def test_three_deaths_at_the_same_slice_blame_its_samples(judge):
    for rank in (0, 1):
        judge.apply(ended(rank, -9), at())
    assert judge.verdict(1.0, running=True) is None

    judge.begin((2,))  # across a restart
    judge.apply(ended(2, -9), at("backward"))

    verdict = judge.verdict(1.0, running=True)
    assert isinstance(verdict, JobBroken)
    assert verdict.message == (
        "workers 0, 1, 2 died one after another at the same place, slice 2 of step 4 (backward, killed by SIGKILL): "
        "its samples are the likely cause: 7, 8"
    )


@pytest.mark.parametrize("other", [at(step=5), at(slice_=1), at("recovery"), at("allreduce"), None])
def test_deaths_elsewhere_blame_nobody(judge, other):
    judge.apply(ended(0, -9), at())
    judge.apply(ended(1, -9), other)
    judge.apply(ended(2, -9), at())

    assert isinstance(judge.verdict(1.0, running=True), JobLost)


def test_injected_deaths_blame_nobody(judge):
    for rank in range(3):
        judge.apply(killed(rank))
        judge.apply(ended(rank, -9), at())

    assert isinstance(judge.verdict(1.0, running=True), JobLost)


def test_workers_that_all_wait_without_a_sign_of_life_are_lost(judge):
    judge.observe({rank: at("allreduce") for rank in range(3)}, 10.0)
    judge.observe({rank: at("allreduce") for rank in range(3)}, 60.0)

    assert judge.verdict(69.0, running=True) is None
    assert isinstance(judge.verdict(70.0, running=True), JobLost)


def test_workers_in_a_collective_of_their_script_may_move_any_number_of_bytes(judge):
    for now_s in (10.0, 1000.0):
        judge.observe({rank: at("script", waits=True, in_collective=True) for rank in range(3)}, now_s)

    assert judge.verdict(1000.0, running=True) is None


def test_a_node_without_workers_does_not_stand_still(judge):
    judge.observe({rank: at("allreduce") for rank in range(3)}, 10.0)

    assert judge.stand_still([0, 1, 2], 100.0)
    assert not judge.stand_still([], 100.0), "its workers have finished, or have not joined yet"


def test_stages_that_all_wait_for_each_others_messages_on_their_way_forward_and_back_are_lost(judge):
    waiting = {0: at("backward", waits=True), 1: at("forward", waits=True), 2: at("forward", waits=True)}
    judge.observe(waiting | {2: at("forward")}, 10.0)
    judge.observe(waiting, 30.0)
    judge.observe(waiting, 85.0)

    assert judge.verdict(85.0, running=True) is None, "one of them has waited for 55 s only"
    assert isinstance(judge.verdict(90.0, running=True), JobLost)


@pytest.mark.parametrize("busy", [at("forward"), at("allreduce", beats=2), at("backward", beats=2, waits=True)])
def test_one_worker_that_computes_or_moves_is_enough_to_wait(judge, busy):
    judge.observe({rank: at("allreduce") for rank in range(3)}, 10.0)
    judge.observe({0: busy}, 60.0)

    assert judge.verdict(80.0, running=True) is None


def test_those_who_waited_for_one_that_was_stuck_have_as_long_again_to_go_on_without_it(judge):
    waiting = {rank: at("allreduce") for rank in (1, 2)}
    judge.observe(waiting | {0: at("checkpoint")}, 10.0)
    judge.apply(ended(0, -9))

    judge.observe(waiting, 70.5)
    assert judge.verdict(71.0, running=True) is None
    judge.observe(waiting, 130.0)
    assert isinstance(judge.verdict(131.0, running=True), JobLost)


def in_vain(count):
    """Where a worker is that has recovered so often and moves on all the time."""
    return replace(at("recovery", beats=100 + count), in_vain=count)


def test_recoveries_of_which_nothing_comes_lose_the_job(judge):
    for count in range(1, VAIN_RECOVERIES + 1):
        judge.observe({rank: in_vain(count if rank == 2 else 0) for rank in range(3)}, 10.0 * count)
    assert judge.verdict(69.0, running=True) is None

    verdict = judge.verdict(71.0, running=True)

    assert verdict == JobLost(
        "the workers recovered 3 times in 61 s without progress: no worker was lost or admitted, and no step was committed"
    )
    judge.begin((0, 1, 2))
    assert judge.verdict(200.0, running=True) is None, "what was before the restart does not count"


@pytest.mark.parametrize("changed", ["few", "progress", "dead"])
def test_a_recovery_that_may_yet_succeed_loses_nothing(judge, changed):
    judge.observe({2: in_vain(VAIN_RECOVERIES - 1)}, 10.0)
    if changed != "few":
        judge.observe({2: in_vain(VAIN_RECOVERIES)}, 20.0)
    if changed == "progress":  # a step was applied, or a member was lost, and then it begins again
        judge.observe({2: in_vain(0)}, 40.0)
        judge.observe({2: in_vain(VAIN_RECOVERIES)}, 50.0)
    if changed == "dead":
        judge.apply(ended(2, -9))

    assert judge.verdict(90.0, running=True) is None


def test_a_virtual_job_is_judged_by_its_one_process():
    judge = JobState("train.py", virtual=True)
    judge.begin((0, 1, 2))
    judge.apply(started(0))
    judge.apply(recovered(1, lost=(0,)))
    judge.apply(finished(1))
    assert judge.verdict(1.0, running=True) is None
    assert judge.workers_alive() == (1, 2)

    judge.apply(ended(0, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(1))


def test_a_virtual_job_that_dies_loses_no_worker():
    judge = JobState("train.py", virtual=True)
    judge.begin((0, 1, 2))
    judge.apply(killed(1))
    judge.apply(ended(0, -9))

    assert isinstance(judge.verdict(1.0, running=False), JobLost)
    assert judge.ranks_left() == (0, 2)


# ---------------------------------------------------------------------------------------------
# Newcomers, those that leave, those that are given up


def grown(rank, joined, survivors, t_s=5.0):
    return Recovered(
        t_s=t_s, rank=rank, step=4, lost=(), survivors=survivors, decision="grow", redone_steps=0, generation=2,
        joined=joined, held_s=0.1,
    )  # fmt: skip


def left(rank):
    return Left(t_s=5.0, rank=rank, step=4)


def test_a_newcomer_counts_once_the_others_have_let_it_in(judge):
    judge.wait_for(3)
    assert (judge.waiting, judge.living(), judge.highest) == ({3}, (0, 1, 2), 3)

    judge.apply(grown(0, (3,), (0, 1, 2, 3)))

    assert (judge.waiting, judge.living(), judge.workers_alive()) == (set(), (0, 1, 2, 3), (0, 1, 2, 3))


@pytest.mark.parametrize("end", [ended(3, -9), ended(3, 1), ended(3, 0), failed(3)])
def test_what_befalls_a_newcomer_that_waits_is_no_fault_of_the_job(judge, end):
    judge.wait_for(3)
    judge.apply(end)

    assert judge.verdict(1.0, running=True) is None
    assert judge.waiting == ({3} if isinstance(end, ScriptFailed) else set())


def test_a_late_record_of_a_newcomer_that_an_earlier_start_never_admitted_says_nothing(judge):
    judge.wait_for(3)
    judge.begin((0, 1, 2))
    judge.apply(ended(3, 1))

    assert not judge.has_ended(3)
    assert judge.verdict(1.0, running=True) is None


@pytest.mark.parametrize("alive", [(0, 1), (1, 2)])
def test_a_newcomer_whose_end_is_heard_before_its_admission_is_not_waited_for(judge, alive):
    judge.wait_for(3)
    judge.apply(ended(3, -9))
    judge.apply(grown(0, (3,), (0, 1, 2, 3)))
    assert judge.living() == (0, 1, 2)

    for rank in (0, 1, 2):
        judge.apply(finished(rank) if rank in alive else ended(rank, -9))
    for rank in alive:
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(alive[0]))


def test_a_newcomer_that_was_let_in_must_not_leave_training_early(judge):
    judge.wait_for(3)
    judge.apply(started(3))
    judge.apply(grown(0, (3,), (0, 1, 2, 3)))
    judge.apply(ended(3, 0))

    assert isinstance(judge.verdict(1.0, running=True), JobBroken)


def test_a_newcomer_that_still_waits_when_the_others_are_done_does_not_keep_the_job(judge):
    judge.wait_for(3)
    for rank in range(3):
        judge.apply(finished(rank))
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(0))


def test_a_worker_that_leaves_in_order_is_no_failure(judge):
    judge.apply(left(1))
    judge.apply(ended(1, 0))

    assert judge.verdict(1.0, running=True) is None
    assert judge.living() == (0, 2)


def test_a_worker_that_left_is_not_started_again(judge):
    judge.apply(left(1))
    judge.apply(ended(1, 0))
    for rank in (0, 2):
        judge.apply(ended(rank, -11))

    assert isinstance(judge.verdict(1.0, running=True), JobLost)
    assert judge.ranks_left() == (0, 2)


def test_a_job_that_replaces_the_dead_starts_again_with_as_many_as_it_had_each_with_a_number_of_its_own(judge):
    judge.wait_for(3)
    for rank in (0, 1, 2):
        judge.apply(ended(rank, -9))
    assert judge.ranks_left(3) == (4, 5, 6)

    judge.begin((4, 5, 6))
    judge.apply(ended(5, -9))
    for rank in (4, 6):
        judge.apply(ended(rank, -11))

    assert judge.ranks_left(3) == (4, 6, 7)
    assert judge.ranks_left() == (4, 6)


def test_the_workers_of_a_lost_node_are_not_waited_for(judge):
    judge.lose([1, 2])
    assert (judge.living(), judge.workers_alive(), judge.ranks_left()) == ((0,), (0,), (0,))

    judge.apply(finished(0))
    judge.apply(ended(0, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(0))


@pytest.mark.parametrize("late", [failed(1, t_s=6.0), ended(1, 1, t_s=6.0), ended(1, 0, t_s=6.0)])
def test_what_a_worker_says_after_it_was_given_up_does_not_end_the_job(judge, late):
    judge.apply(recovered(0, lost=(1,)))
    judge.apply(late)

    assert judge.verdict(7.0, running=True) is None


def test_an_exception_from_before_the_others_went_on_ends_the_job(judge):
    judge.apply(recovered(0, lost=(1,)))
    judge.apply(failed(1, t_s=4.9))
    judge.apply(ended(1, 1, t_s=6.0))

    assert judge.verdict(7.0, running=True) == JobBroken("rank 1, step 4: boom 1", 1, "T")


def test_who_left_does_not_speak_for_those_that_were_lost_after(judge):
    judge.apply(finished(1))  # of an earlier loop
    judge.apply(left(1))
    judge.apply(ended(1, 0))
    for rank in (0, 2):
        judge.apply(ended(rank, -9))

    assert isinstance(judge.verdict(1.0, running=True), JobLost)


@pytest.fixture
def beginning():
    judge = JobState("train.py", all_connect=True)
    judge.begin((0, 1, 2))
    judge.connect([0])
    return judge


def test_a_death_before_all_are_connected_loses_the_start_where_a_fabric_connects_all_or_none(beginning):
    beginning.apply(ended(1, -9))

    assert beginning.verdict(1.0, running=True) == JobLost(
        "rank 1 was killed by SIGKILL before all workers were connected"
    )
    assert beginning.ranks_left() == (0, 2)


def test_a_death_once_the_survivors_are_connected_is_one_to_recover_from(beginning):
    beginning.connect([1, 2])
    beginning.apply(ended(1, -9))

    assert beginning.verdict(1.0, running=True) is None


def test_other_fabrics_begin_without_a_worker_that_died():
    judge = JobState("train.py")
    judge.begin((0, 1, 2))
    judge.apply(ended(1, -9))

    assert judge.verdict(1.0, running=True) is None


def test_an_exception_before_all_are_connected_is_a_bug_of_the_script(beginning):
    beginning.apply(failed(1))
    beginning.apply(ended(1, 1))

    assert isinstance(beginning.verdict(1.0, running=True), JobBroken)


@pytest.mark.parametrize("ends", [(2,), (0, 1, 2)])
def test_a_worker_that_open_mpi_ends_while_it_connects_loses_the_start_and_is_no_failure_of_the_script(ends):
    judge = JobState("train.py", all_connect=True)
    judge.begin((0, 1, 2))
    for rank in ends:
        judge.apply(ended(rank, 14, step=-1), at("connect", step=-1))

    assert judge.verdict(1.0, running=True) == JobLost(
        f"rank {ends[0]} could not be connected to the others: the fabric ended it with exit code 14"
    )
    assert judge.could_not_connect
    assert judge.ranks_left() == (0, 1, 2)


@pytest.mark.parametrize("phase", ["launch", "start", "forward"])
def test_an_exit_code_elsewhere_is_the_scripts(phase):
    judge = JobState("train.py", all_connect=True)
    judge.begin((0, 1))
    judge.apply(ended(1, 14), at(phase))

    assert judge.verdict(1.0, running=True) == JobBroken(
        "rank 1, step 4: train.py ended with exit code 14", rank=1, step=4
    )


@pytest.mark.parametrize(
    ("phases", "connected", "could_not"),
    [
        ((), (), True),
        (("connect", "connect"), (), True),
        (("connect", "launch"), (), False),
        (("connect", "start"), (1,), False),
    ],
)
def test_a_start_in_which_no_worker_was_connected_and_none_prepares_is_not_held_against_the_script(
    phases, connected, could_not
):
    judge = JobState("train.py", all_connect=True)
    judge.begin((0, 1))
    judge.observe({rank: at(phase, step=-1) for rank, phase in enumerate(phases)}, 1.0)
    judge.connect(connected)

    assert judge.could_not_connect is could_not


def test_a_start_that_is_given_up_is_lost_and_may_be_made_again_with_all_workers(beginning):
    beginning.give_up("rank 2 has not started for 120.0 s")

    assert beginning.verdict(1.0, running=True) == JobLost("rank 2 has not started for 120.0 s")
    assert beginning.ranks_left() == (0, 1, 2)


def test_an_mpirun_that_is_killed_before_a_worker_began_is_no_reason_to_give_up(beginning):
    verdict = beginning.verdict(1.0, running=False, crash="mpirun was killed by SIGKILL")

    assert verdict == JobLost("mpirun was killed by SIGKILL")
    assert isinstance(beginning.verdict(1.0, running=False), JobBroken)


@pytest.mark.parametrize(
    "gone",
    [
        [ended(1, -9, t_s=10.0)],
        [replace(recovered(0, lost=(1,)), t_s=10.0)],  # with its node: nobody has seen it end
        [Left(t_s=10.0, rank=1, step=4)],
        [replace(started(1), t_s=9.5)],
    ],
)
def test_bits_of_an_earlier_loop_are_compared_with_none(judge, gone):
    """Both loops have nine steps; rank 1 has passed the first gate only."""
    for record in [*map(finished, range(3)), *gone]:
        judge.apply(record)
    for rank in (0, 2):
        judge.apply(replace(finished(rank), t_s=12.0, sha256="of the second loop"))

    assert judge.differing() == ""


def test_one_that_the_others_lost_because_it_had_finished_is_compared(judge):
    for record in [*map(finished, range(3)), ended(1, 0), replace(recovered(0, lost=(1,)), t_s=10.0)]:
        judge.apply(record)
    judge.apply(replace(finished(1), sha256="x"))

    assert "rank 1: x, state" in judge.differing()
