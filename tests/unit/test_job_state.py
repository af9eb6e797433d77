"""What records mean for a job, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from some_records import some

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
    return some(RunStarted, rank=rank, steps_planned=9, parameters=1)


def finished(rank, outcome="done"):
    return some(Finished, t_s=9.0, rank=rank, step=9, outcome=outcome, planned=9, committed=9)


def ended(rank, exit_code, step=4, t_s=5.0):
    return WorkerEnded(t_s=t_s, rank=rank, step=step, exit_code=exit_code, pid=1)


def recovered(rank, lost=(), t_s=5.0, **more):
    return some(Recovered, t_s=t_s, rank=rank, step=4, lost=lost, **({"survivors": (rank,), "decision": "redo"} | more))


def left(rank, t_s=5.0):
    return Left(t_s=t_s, rank=rank, step=4)


def failed(rank, t_s=5.0, exit_code=1, **more):
    return ScriptFailed(t_s=t_s, rank=rank, step=4, exit_code=exit_code, message=f"boom {rank}", traceback="T", **more)


def killed(rank):
    return some(FaultFired, t_s=5.0, rank=rank, step=4, kind="kill")


def at(phase="forward", step=4, slice_=2, beats=1, **more):
    return BeaconPosition(beats=beats, step=step, slice=slice_, phase=phase, pid=1, samples=(7, 8), **more)


@pytest.fixture
def judge():
    judge = JobState("train.py", stall_timeout_s=60.0)
    judge.begin((0, 1, 2))
    for rank in range(3):
        judge.apply(started(rank))
    return judge


BROKEN = JobBroken("rank 1, step 4: boom 1", 1, "T")
RECOVERED_BEFORE = recovered(0, lost=(2,), t_s=4.0)
UNKNOWN = "ended, and how is not recorded"
AFTER_A_LOSS = {
    "whose end was recorded": [ended(2, -9, t_s=4.0)],
    "that others recovered from": [RECOVERED_BEFORE],
    "whose end was recorded later": [RECOVERED_BEFORE, ended(2, -9, t_s=6.0)],
}
VERDICTS = {
    "a job goes on while somebody lives": ([ended(1, -9)], None),
    "a bug of the script is final": ([failed(1, is_bug=True), recovered(0, (1,))], replace(BROKEN, is_final=True)),
    **{f"an exception may be due to a loss {when}": ([*known, failed(1, is_bug=True)], BROKEN) for when, known in AFTER_A_LOSS.items()},
    "scripts that need failed ranks lose the job as a whole": (
        [ended(1, -9, t_s=4.0), failed(2, t_s=5.2, is_loss=True), failed(0, is_loss=True)],
        JobLost("boom 0", is_final=False),
    ),
    "an error of the script beside them is what ends it": ([failed(0, is_loss=True), failed(2, t_s=5.2)], JobBroken),
    "the first exception ends the job": ([failed(2, t_s=6.0), failed(1)], BROKEN),
    "a wrong setting keeps its exit code and names no rank": ([failed(1, exit_code=2)], JobBroken("boom 1", 2, "T")),
    "an exit code without an exception ends the job": (
        [ended(1, 3)],
        JobBroken("rank 1, step 4: train.py ended with exit code 3", rank=1, step=4),
    ),
    "leaving training early ends the job": (
        [ended(1, 0)],
        JobBroken("rank 1 left training at step 4 before its end: train.py returned", rank=1, step=4, is_final=True),
    ),
    "giving up is not an exception": (
        [each for rank in range(3) for each in (finished(rank, "gave-up"), failed(rank), ended(rank, 1))],
        JobCompleted(finished(0, "gave-up")),
    ),
    **{
        f"what a worker says after it was given up does not end the job: {what}": ([recovered(0, (1,)), late], None)
        for what, late in {"error": failed(1, t_s=6.0), "code 1": ended(1, 1, t_s=6.0), "code 0": ended(1, 0, t_s=6.0)}.items()
    },
    "an exception from before the others went on does": ([recovered(0, (1,)), failed(1, t_s=4.9), ended(1, 1, t_s=6.0)], BROKEN),
    "who left does not speak for those that were lost after": (
        [finished(1), left(1), ended(1, 0), ended(0, -9), ended(2, -9)],  # it had finished an earlier loop
        JobLost,
    ),
}  # fmt: skip


@pytest.mark.parametrize("promise", VERDICTS)
def test_what_records_of_a_running_job_mean(judge, promise):
    records, expected = VERDICTS[promise]
    for record in records:
        judge.apply(record)

    verdict = judge.verdict(7.0, running=True)

    assert isinstance(verdict, expected) if isinstance(expected, type) else verdict == expected


ENDS = {
    "of a job that finished": ((), [each for rank in range(3) for each in (finished(rank), ended(rank, 0))], JobCompleted(finished(0))),
    "of workers beside those of a lost node": ((1, 2), [ended(0, -9)], JobLost("rank 0 killed by SIGKILL")),
    "of such a worker, unknown": ((1, 2), [], JobLost(f"rank 0 {UNKNOWN}")),
    "of such a worker that finished": ((1, 2), [finished(0), ended(0, 0)], JobCompleted(finished(0))),
    "known and unknown": ((), [ended(1, -11)], JobLost(f"ranks 0, 2 {UNKNOWN}; rank 1 killed by SIGSEGV")),
    "of all nodes": ((0, 1, 2), [], JobLost("no worker is left, and how they ended is not recorded")),
}  # fmt: skip


@pytest.mark.parametrize("ends", ENDS)
def test_what_the_ends_mean_once_no_process_is_left(judge, ends):
    lost, records, expected = ENDS[ends]
    judge.lose(lost)
    assert judge.living() == tuple(rank for rank in range(3) if rank not in lost)
    for record in records:
        judge.apply(record)

    assert judge.verdict(1.0, running=False) == expected


def test_a_job_is_done_when_all_that_are_not_dead_have_finished_and_ended(judge):
    judge.apply(ended(1, -9))
    for rank in (0, 2):
        judge.apply(finished(rank))
    assert judge.verdict(1.0, running=True) is None

    for rank in (0, 2):
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(0))


def test_only_new_steps_are_progress():
    judge, seen = JobState("train.py"), []
    for steps in ((0, 1), (0, 1), (), (2,), (1, 2)):
        judge.begin((0,))
        for step in steps:
            judge.apply(some(StepCommitted, step=step))
        seen.append(judge.restarts_in_vain)

    assert seen == [0, 1, 2, 0, 1]


def test_a_worker_that_the_others_have_lost_is_asked_for_until_its_end_is_recorded(judge):
    judge.apply(recovered(0, (1,)))
    assert judge.lost_without_end() == {1}

    judge.apply(ended(1, -9))
    assert judge.lost_without_end() == set()


def test_a_script_that_never_trains_is_told_so():
    judge = JobState("train.py")
    judge.begin((0, 1))
    judge.apply(ended(0, 0, step=-1))

    verdict = judge.verdict(1.0, running=True)

    assert isinstance(verdict, JobBroken)
    assert verdict.message == "train.py ended without training: it never ran session.steps(...)"


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


@pytest.mark.parametrize("other", [at(step=5), at(slice_=1), at("recovery"), at("allreduce"), None, "injected"])
def test_deaths_elsewhere_and_injected_ones_blame_nobody(judge, other):
    for rank, place in ((0, at()), (1, other), (2, at())):
        if other == "injected":
            judge.apply(killed(rank))
        judge.apply(ended(rank, -9), at() if place == "injected" else place)

    assert isinstance(judge.verdict(1.0, running=True), JobLost)


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

GROWN = recovered(0, survivors=(0, 1, 2, 3), decision="grow", joined=(3,))


def test_a_newcomer_counts_once_the_others_have_let_it_in(judge):
    judge.wait_for(3)
    assert (judge.waiting, judge.living(), judge.highest) == ({3}, (0, 1, 2), 3)

    judge.apply(GROWN)

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
    judge.apply(GROWN)
    assert judge.living() == (0, 1, 2)

    for rank in (0, 1, 2):
        judge.apply(finished(rank) if rank in alive else ended(rank, -9))
    for rank in alive:
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(alive[0]))


def test_a_newcomer_that_was_let_in_must_not_leave_training_early(judge):
    judge.wait_for(3)
    judge.apply(started(3))
    judge.apply(GROWN)
    judge.apply(ended(3, 0))

    assert isinstance(judge.verdict(1.0, running=True), JobBroken)


def test_a_newcomer_that_still_waits_when_the_others_are_done_does_not_keep_the_job(judge):
    judge.wait_for(3)
    for rank in range(3):
        judge.apply(finished(rank))
        judge.apply(ended(rank, 0))

    assert judge.verdict(1.0, running=True) == JobCompleted(finished(0))


def test_a_worker_that_leaves_in_order_is_no_failure_and_not_started_again(judge):
    judge.apply(left(1))
    judge.apply(ended(1, 0))
    assert judge.verdict(1.0, running=True) is None
    assert judge.living() == (0, 2)

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


@pytest.fixture
def beginning():
    judge = JobState("train.py", all_connect=True)
    judge.begin((0, 1, 2))
    judge.connect([0])
    return judge


@pytest.mark.parametrize(
    ("all_connect", "connected", "record", "expected"),
    [
        (True, [0], ended(1, -9), JobLost("rank 1 was killed by SIGKILL before all workers were connected")),
        (True, [0, 1, 2], ended(1, -9), None),  # one to recover from
        (False, [], ended(1, -9), None),  # other fabrics begin without it
        (True, [0], failed(1), BROKEN),
    ],
)
def test_a_death_before_all_are_connected_loses_the_start_where_a_fabric_connects_all_or_none(
    all_connect, connected, record, expected
):
    judge = JobState("train.py", all_connect=all_connect)
    judge.begin((0, 1, 2))
    judge.connect(connected)
    judge.apply(record)

    assert judge.verdict(1.0, running=True) == expected
    assert judge.ranks_left() == ((0, 1, 2) if record == failed(1) else (0, 2))


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
        [recovered(0, lost=(1,), t_s=10.0)],  # with its node: nobody has seen it end
        [left(1, t_s=10.0)],
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
    for record in [*map(finished, range(3)), ended(1, 0), recovered(0, lost=(1,), t_s=10.0)]:
        judge.apply(record)
    judge.apply(replace(finished(1), sha256="x"))

    assert "rank 1: x, state" in judge.differing()
