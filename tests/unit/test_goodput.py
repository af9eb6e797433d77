"""Where the time of a run went, for histories made by hand; and what the report says of it."""

import pytest
from some_records import some

from holdfast.observe.terminal.table import summary_lines
from holdfast.records.types import (
    CheckpointSaved,
    FailureSeen,
    FaultFired,
    Finished,
    JobRestarted,
    Recovered,
    RunStarted,
    StepCommitted,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary import goodput
from holdfast.summary.build import build_report
from holdfast.summary.goodput import TimeAccount, goodput_of


def started(t_s, step=0, rank=0, **settings):
    return some(
        RunStarted, t_s=t_s, rank=rank, step=step, **({"workers": 3, "steps_planned": 10, "parameters": 99} | settings)
    )


def committed(t_s, step):
    return some(StepCommitted, t_s=t_s, step=step, samples=40, workers=3)


def recovered(t_s, step, decision="redo", generation=1, rank=0, **more):
    how = {"lost": (2,), "survivors": (0, 1), "redone_steps": 1}
    return Recovered(t_s=t_s, rank=rank, step=step, decision=decision, generation=generation, **(how | more))


def finished(t_s, step):
    return some(Finished, t_s=t_s, step=step, outcome="done", sha256="a", state_sha256="b", planned=1, committed=1)


def uses(records, wall_s):
    """The uses of time that took any, rounded."""
    spent = goodput_of(records, wall_s)
    return {name: round(s, 6) for name, s in ({"useful": spent.useful_s} | dict(spent.badput_s)).items() if round(s, 6)}


def test_before_and_after_training_there_is_start_up_and_idleness():
    records = [started(2.0), started(2.5, rank=1), committed(3.0, 0), committed(4.0, 1), finished(4.5, 2)]

    assert uses(records, 5.0) == {"start_up": 2.0, "useful": 2.0, "idle": 1.0}


def test_a_second_training_loop_is_work_again():
    records = [started(0.0), committed(1.0, 0), finished(1.0, 1), started(3.0, step=1), committed(4.0, 1)]

    assert uses(records, 4.0) == {"useful": 2.0, "idle": 2.0}


def test_a_worker_that_hangs_is_a_stall_until_it_is_killed():
    hang = FaultFired(t_s=10.2, rank=2, step=1, fault=0, kind="hang", phase="forward")
    fenced = WorkerFenced(t_s=15.2, rank=2, step=1, silent_s=5.0, reason="")
    seen = FailureSeen(t_s=15.3, rank=0, step=1, phase="allreduce")
    times_s = {"Agree": 0.3, "Shrink": 0.1, "SendState": 0.1}
    records = [started(9.0), committed(10.0, 0), hang, fenced, seen, recovered(15.8, 1, times_s=times_s)]
    records += [committed(16.8, 1)]

    parts = {"stall": 5.0, "detection": 0.1, "agreement": 0.3, "rebuild": 0.1, "state_transfer": 0.1}
    assert uses(records, 16.8) == {"start_up": 9.0, "useful": 2.0, "step_redone": 0.2} | parts


def test_all_workers_that_wait_for_each_other_are_a_stall():
    steps = [committed(1.0 + step, step) for step in range(3)]
    ended = [WorkerEnded(t_s=63.5, rank=rank, step=3, exit_code=-9, pid=7) for rank in range(3)]
    again = JobRestarted(t_s=64.0, rank=-1, step=2, restart=1, workers=(0, 1, 2), reason="")
    records = [started(0.0), *steps, *ended, again, started(70.0, step=2), committed(71.0, 2)]

    lost = {"step_redone": 2.0, "stall": 59.5, "detection": 0.5, "restart": 6.0}
    assert uses(records, 71.0) == {"useful": 3.0} | lost


def test_the_next_failure_may_be_seen_before_others_have_decided_about_the_last():
    def seen(t_s, rank):
        return FailureSeen(t_s=t_s, rank=rank, step=1, phase="allreduce")

    first = [seen(2.0, 0), seen(2.1, 1), recovered(2.5, 1)]
    second = [seen(2.6, 0), recovered(2.7, 1, rank=1), recovered(3.0, 1, generation=2)]
    records = [started(0.0), committed(1.0, 0), *first, *second, committed(4.0, 1)]

    assert uses(records, 4.0) == {"useful": 2.0, "step_redone": 1.1, "agreement": 0.9}


def test_a_slow_worker_costs_the_time_by_which_it_is_slower_unless_its_slices_are_moved():
    steps = [committed(1.0, 0), committed(3.0, 1)]
    for policy, waited in (("warn", {"straggler_wait": 1.0}), ("rebalance", {})):
        slow = StragglerSeen(t_s=1.0, rank=1, step=0, score=2.0, policy=policy)
        assert uses([started(0.0), steps[0], slow, steps[1]], 3.0) == {"useful": 3.0 - sum(waited.values())} | waited


def test_of_old_steps_those_that_a_restart_may_go_back_to_are_kept(monkeypatch):
    records = [started(0.0)]
    for step in range(200):
        if step % 50 == 0:
            records.append(CheckpointSaved(t_s=float(step), rank=0, step=step, path="", size_bytes=1, seconds=0.0))
        records.append(committed(step + 1.0, step))
    records.append(JobRestarted(t_s=200.0, rank=-1, step=199, restart=1, workers=(0, 1), reason=""))
    records += [started(202.0, step=50), *(committed(203.0 + step, 50 + step) for step in range(10))]
    whole = uses(records, 212.0)
    monkeypatch.setattr(goodput, "_KEPT_STEPS", 8)
    account = TimeAccount()
    for record in records[:-12]:
        account.take(record)

    assert len(account._steps) < 24
    assert uses(records, 212.0) == whole == {"useful": 60.0, "step_redone": 150.0, "restart": 2.0}


def test_newcomers_hold_training():
    joins = {"lost": (), "joined": (2,), "survivors": (0, 1, 2), "redone_steps": 0, "held_s": 0.5}
    grown = recovered(1.6, 1, decision="grow", times_s={"SendState": 0.2}, **joins)
    records = [started(0.0), committed(1.0, 0), grown, committed(2.6, 1)]

    assert uses(records, 2.6) == {"useful": 2.1, "agreement": 0.3, "state_transfer": 0.2}


def test_the_report_and_the_summary_say_it():
    report = build_report([started(1.0), committed(4.0, 0), finished(4.0, 1)], started=range(3), wall_s=5.0, seed=3)

    assert report["goodput"]["ratio"] == 0.6
    assert report["goodput"]["useful_s"] + sum(report["goodput"]["badput_s"].values()) == pytest.approx(5.0)
    assert "goodput  60.0% useful (3.00 s); start up 1.00 s, idle 1.00 s" in summary_lines(report)


def test_the_summary_says_what_a_sink_missed():
    records = [started(1.0), committed(4.0, 0), finished(4.0, 1)]
    sinks = [{"name": "prometheus", "taken": 7, "dropped": 3}, {"name": "kubeflow", "taken": 10, "dropped": 0}]
    report = build_report(records, started=range(3), wall_s=5.0, seed=3, sinks=sinks)

    assert report["sinks"] == sinks
    assert [line for line in summary_lines(report) if "missed" in line] == ["prometheus missed 3 records of 10"]


def test_of_a_script_without_steps_that_holdfast_knows_it_is_unknown():
    script = started(1.0, parameters=0, steps_planned=0)

    assert goodput_of([script], 5.0) is None
    report = build_report([script], started=range(3), wall_s=5.0, seed=3)
    assert report["goodput"] is None
    assert not any("goodput" in line for line in summary_lines(report))
