"""What ``report.json`` says about histories made by hand."""

import dataclasses
import json
import subprocess
import sys

import pytest
import usual_records as usual

from holdfast.errors import ConfigError
from holdfast.observe.report_text import headline
from holdfast.observe.terminal.table import summary_lines
from holdfast.records.files import load_events
from holdfast.records.types import (
    CheckpointSaved,
    DeviceLost,
    FailureSeen,
    FaultFired,
    JobRestarted,
    Left,
    Recovered,
    SamplesLost,
    ScriptFailed,
    SettingChanged,
    StragglerSeen,
    ValuesAltered,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.build import build_report
from holdfast.summary.files import load_report, write_report
from holdfast_lab.pages.demo import checked_results, demo_rows


def started(t_s, ranks, step=0, **settings):
    fixed = {"fabric": "virtual", "seed": 3, "workers": len(ranks), "steps_planned": 10, "samples_planned": 400}
    return [usual.started(rank, t_s=t_s, step=step, **fixed | settings) for rank in ranks]


def committed(t_s, step, rank=0, **metrics):
    metrics = metrics or {"loss": 1.0 - step / 10}
    return usual.committed(step, t_s=t_s, rank=rank, samples=40, workers=4, metrics=metrics)


def fired(t_s, rank, step, phase="allreduce", kind="kill"):
    return FaultFired(t_s=t_s, rank=rank, step=step, fault=0, kind=kind, phase=phase)


def seen(t_s, rank, step, phase="allreduce"):
    return FailureSeen(t_s=t_s, rank=rank, step=step, phase=phase)


def recovered(t_s, rank, step, lost, survivors, decision="redo", redone_steps=1, generation=1, **more):
    how = {"decision": decision, "redone_steps": redone_steps, "generation": generation}
    return usual.recovered(rank, t_s=t_s, step=step, lost=lost, survivors=survivors, **how, **more)


def ended(t_s, rank, exit_code=-9, step=-1):
    return WorkerEnded(t_s=t_s, rank=rank, step=step, exit_code=exit_code, pid=100 + rank)


def finished(t_s, ranks, outcome="done", bits="ab", **fields):
    numbers = {"sha256": bits, "state_sha256": bits * 2, "planned": 400, "committed": 400, "metrics": {"accuracy": 0.9}}
    return [usual.finished(rank, t_s=t_s, step=10, outcome=outcome, **numbers | fields) for rank in ranks]


def report_of(records, workers=4, **how):
    return build_report(records, started=range(workers), wall_s=3.0, seed=3, **how)


def flipped(t_s, rank, step):
    values = ({"path": "fc.weight", "index": 7, "bit": 30, "before": 0.5, "after": 1.7e38},)
    return [
        fired(t_s, rank, step, kind="flip"),
        ValuesAltered(t_s=t_s, rank=rank, step=step, fault=0, target="weights", count=1, values=values),
    ]


def undisturbed():
    return [
        *started(1.0, range(4)),
        *(committed(1.1 + 0.1 * step, step) for step in range(10)),
        *finished(2.2, range(4)),
    ]


def one_kill():
    return [
        *started(1.0, range(4)),
        *(committed(1.1 + 0.1 * step, step) for step in range(5)),
        fired(1.55, 1, 5),
        seen(1.57, 2, 5),
        seen(1.56, 0, 5),
        seen(1.58, 3, 5),
        *(recovered(1.59 + rank / 1000, rank, 5, (1,), (0, 2, 3)) for rank in (0, 2, 3)),
        ended(1.6, 1),
        *(committed(1.65 + 0.1 * (step - 5), step) for step in range(5, 10)),
        *finished(2.3, (0, 2, 3)),
    ]


def test_an_undisturbed_run_has_every_promised_key():
    report = report_of(undisturbed(), faults_not_fired=["kill:rank=1,step=99"])

    assert (report["schema"], report["api"], report["outcome"]) == (1, "session", "done")
    assert None not in (*report["samples"].values(), *report["replicas"].values(), report["checkpoints"])
    assert (report["fabric"], report["strategy"], report["seed"]) == ("virtual", "rollback", 3)
    assert report["workers"] == {
        "started": 4,
        "ranks_started": [0, 1, 2, 3],
        "spares": 0,
        "ranks_spare": [],
        "finished": 4,
        "ranks_finished": [0, 1, 2, 3],
    }
    assert (report["steps"], report["wall_s"], report["restarts"], report["failures"]) == (10, 3.0, 0, [])
    assert report["step_s"] == {"p50": pytest.approx(0.1), "p99": pytest.approx(0.1)}
    assert report["train_s"] == pytest.approx(0.9)
    assert (report["slices"], report["split"], report["order"]) == (4, "slices", "fold")
    assert report["samples"] == {"planned": 400, "committed": 400, "lost": 0, "repeated": 0}
    assert report["replicas"] == {"identical": True, "sha256": "ab", "state_sha256": "abab"}
    assert report["metrics"] == {"loss": pytest.approx(0.1), "accuracy": 0.9}
    assert report["faults_not_fired"] == ["kill:rank=1,step=99"]
    assert "did not strike: kill:rank=1,step=99" in summary_lines(report)
    assert (report["nodes"], report_of(undisturbed(), nodes=3)["nodes"]) == (1, 3)
    assert json.loads(json.dumps(report)) == report


def test_an_injected_kill_counts_from_the_fault():
    report = report_of(one_kill())

    (failure,) = report["failures"]
    assert (report["step_s"]["p99"], report["steps_redone"]) == (pytest.approx(0.1), 1), "the pace leaves that step out"
    assert failure == {
        "rank": 1, "kind": "kill", "step": 5, "phase": "allreduce", "injected": True, "t_s": 1.55,
        "detect_s": pytest.approx(0.01), "recover_s": pytest.approx(0.10), "decision": "redo", "redone_steps": 1,
        "lost_samples": 0, "recovery": 0, "silent_s": None, "why": "", "stack": "", "orders": {}, "times_s": {},
        "unnoticed_s": None,
    }  # fmt: skip


def test_a_failure_says_what_the_survivors_did_and_what_the_slowest_took():
    done = {"orders": {"Revoke": 1, "Agree": 3}, "times_s": {"Revoke": 0.1, "Agree": 0.2}}
    told = {"orders": {"Agree": 2, "MoveParts": 1}, "times_s": {"Agree": 0.7, "MoveParts": 0.5}}
    quiet = [r for r in one_kill() if not isinstance(r, Recovered)]
    said = [recovered(1.57, rank, 5, (1,), (0, 2, 3), **more) for rank, more in ((0, done), (2, told), (3, told))]

    (failure,) = report_of([*quiet, *said])["failures"]

    assert failure["orders"] == {"Revoke": 1, "Agree": 3, "MoveParts": 1}
    assert failure["times_s"] == {"Revoke": 0.1, "Agree": 0.7, "MoveParts": 0.5}


def test_a_commit_before_the_survivors_decided_is_not_the_recovery():
    records = [
        *started(1.0, range(2)),
        committed(1.1, 0),
        fired(1.15, 1, 1, "optimizer"),
        committed(1.151, 1),
        seen(1.17, 0, 2),
        recovered(1.18, 0, 2, (1,), (0,)),
        committed(1.3, 2),
    ]

    (failure,) = report_of(records, workers=2)["failures"]

    assert failure["recover_s"] == pytest.approx(0.15)


def test_a_kill_from_outside_counts_from_the_first_survivor_that_knew():
    records = [r for r in one_kill() if not isinstance(r, FaultFired)]

    (failure,) = report_of(records)["failures"]

    assert not failure["injected"]
    assert (failure["rank"], failure["kind"], failure["step"], failure["phase"]) == (1, "kill", 5, "allreduce")
    assert failure["detect_s"] is None
    assert failure["recover_s"] == pytest.approx(0.09)


def test_a_loss_that_nobody_noticed_for_long_is_said_beside_the_time_of_the_recovery():
    """A lost node counts as lost once its lease has ended; the recovery itself takes milliseconds."""
    lost_s = 9.0
    records = [
        dataclasses.replace(record, t_s=record.t_s + lost_s) if record.t_s > 1.55 else record
        for record in one_kill()
        if not isinstance(record, FaultFired | WorkerEnded)
    ]

    report = report_of(records)

    (failure,) = report["failures"]
    assert failure["unnoticed_s"] == pytest.approx(lost_s + 0.06)
    assert failure["recover_s"] == pytest.approx(0.09)
    assert "; noticed only after 9.06 s; training resumed after 90 ms. " in headline(report)
    assert "; noticed only after 9.06 s; next step committed after 90 ms; " in "".join(summary_lines(report))


@pytest.mark.parametrize(("ended_s", "unnoticed_s"), [(10.55, 0.01), (10.6, 0.0), (8.0, 2.56)])
def test_a_pause_without_steps_is_no_time_in_which_a_death_was_not_noticed(ended_s, unnoticed_s):
    """Such as an evaluation: the worker died at its end, as its watcher has recorded."""
    records = [
        dataclasses.replace(record, t_s=record.t_s + 9.0) if record.t_s > 1.55 else record
        for record in one_kill()
        if not isinstance(record, FaultFired | WorkerEnded)
    ]

    report = report_of([*records, ended(ended_s, 1)])

    assert report["failures"][0]["unnoticed_s"] == pytest.approx(unnoticed_s)
    assert ("noticed only after" in headline(report)) == (unnoticed_s > 1)


def test_a_hang_counts_from_the_last_step_because_the_launcher_ended_it():
    records = [record for record in one_kill() if not isinstance(record, FaultFired)]
    fence = WorkerFenced(t_s=1.555, rank=1, step=5, silent_s=3.0, reason="it hung", stack="")

    (failure,) = report_of([*records, fence])["failures"]

    assert failure["kind"] == "hang"
    assert failure["unnoticed_s"] == pytest.approx(0.06)


@pytest.mark.parametrize("how", ["killed", "with its node", "left", "in the next loop"])
def test_the_bits_of_an_earlier_loop_are_not_those_of_the_end(how):
    """Both loops have ten steps; worker 1 has passed the first gate only."""
    gone = {
        "killed": [ended(2.5, 1)],
        "with its node": [recovered(2.5, 0, 5, (1,), (0, 2, 3))],
        "left": [Left(t_s=2.5, rank=1, step=5)],
        "in the next loop": [],
    }[how]
    begun = [*started(2.3, (0, 2, 3)), *(started(2.3, (1,)) if how == "in the next loop" else ())]

    report = report_of([*undisturbed(), *begun, *gone, *finished(3.0, (0, 2, 3), bits="cd")])

    assert report["workers"]["ranks_finished"] == [0, 2, 3]
    assert report["replicas"]["identical"]


def test_two_killed_at_once_share_the_recovery():
    records = [
        *started(1.0, range(4)),
        committed(1.1, 0),
        fired(1.15, 1, 1),
        fired(1.16, 3, 1, "backward"),
        seen(1.17, 0, 1),
        recovered(1.2, 0, 1, (1, 3), (0, 2)),
        recovered(1.21, 2, 1, (1, 3), (0, 2)),
        committed(1.3, 1),
        *finished(2.0, (0, 2)),
    ]

    first, second = report_of(records)["failures"]

    assert (first["rank"], second["rank"]) == (1, 3)
    assert first["recovery"] == second["recovery"] == 0
    assert first["recover_s"] == pytest.approx(0.15)
    assert second["recover_s"] == pytest.approx(0.14)
    assert report_of(records)["steps_redone"] == 1


def test_one_that_dies_in_the_recovery_is_not_a_survivor_that_knew():
    records = [
        *started(1.0, range(3)),
        committed(1.1, 0),
        fired(1.15, 2, 1),
        seen(1.16, 1, 1),
        fired(1.17, 1, 1, "recovery"),
        seen(1.18, 0, 1),
        recovered(1.2, 0, 1, (1, 2), (0,)),
        committed(1.3, 1),
    ]

    first, second = report_of(records, workers=3)["failures"]

    assert first["detect_s"] == pytest.approx(0.03)
    assert (second["phase"], second["detect_s"]) == ("recovery", pytest.approx(0.01))


def test_forward_names_what_it_lost():
    records = [
        *started(1.0, range(2), strategy="forward"),
        committed(1.1, 0),
        fired(1.15, 1, 1),
        seen(1.17, 0, 1),
        recovered(1.2, 0, 1, (1,), (0,), "continue", 0),
        SamplesLost(t_s=1.201, rank=0, step=1, epoch=0, ids=(7, 9), buckets=(1,)),
        SamplesLost(t_s=1.202, rank=0, step=1, epoch=0, ids=(7, 11), buckets=(2,)),
        committed(1.3, 1),
        *finished(2.0, (0,), committed=397, lost=3),
    ]

    report = report_of(records, workers=2)

    assert report["failures"][0]["lost_samples"] == 3
    assert report["failures"][0]["redone_steps"] == 0
    assert report["lost"][0] == {"step": 1, "epoch": 0, "ids": [7, 9], "buckets": [1]}
    assert report["samples"]["lost"] == 3
    assert "Of 400 samples, 3 lost." in headline(report)


def test_load_counts_until_the_lost_step_is_reached_again():
    records = [
        *started(1.0, range(2), strategy="restart"),
        *(committed(1.1 + step / 10, step) for step in range(4)),
        fired(1.45, 1, 4),
        recovered(1.5, 0, 2, (1,), (0,), "load", 3),
        *(committed(1.6 + (step - 2) / 10, step, loss=5.0) for step in range(2, 6)),
    ]

    report = report_of(records, workers=2)

    assert report["failures"][0]["recover_s"] == pytest.approx(0.35)
    assert report["steps"] == 6
    assert report["metrics"]["loss"] == 5.0


def restarted_job():
    return [
        *started(1.0, range(3)),
        CheckpointSaved(t_s=1.15, rank=0, step=1, path="ck", size_bytes=1, seconds=0.1),
        *(committed(1.1 + step / 10, step) for step in range(3)),
        fired(1.35, 1, 3),
        *(ended(1.5, rank) for rank in (1, 0, 2)),
        JobRestarted(t_s=2.0, rank=-1, step=-1, restart=1, workers=(0, 2), reason="the runtime ended the job"),
        *started(3.0, (0, 2), step=1),
        *(committed(3.1 + (step - 1) / 10, step) for step in range(1, 10)),
        *finished(5.0, (0, 2)),
    ]


def test_a_restart_of_the_job_answers_a_death_that_nobody_recovered():
    report = report_of(restarted_job(), workers=3)

    (failure,) = report["failures"]
    assert report["restarts"] == 1
    assert (failure["decision"], failure["detect_s"], failure["redone_steps"]) == ("restart", None, 3)
    assert failure["recover_s"] == pytest.approx(3.3 - 1.35)
    assert report["checkpoints"] == 1
    assert report["workers"]["ranks_finished"] == [0, 2]
    assert "the job was restarted" in headline(report)


def test_a_worker_that_is_missing_after_a_restart_was_lost():
    records = [r for r in restarted_job() if not isinstance(r, FaultFired)]

    (failure,) = report_of(records, workers=3)["failures"]

    assert (failure["rank"], failure["injected"], failure["step"]) == (1, False, 3)
    assert failure["recover_s"] == pytest.approx(3.3 - 1.5)


def test_one_rank_killed_in_two_lives_is_two_failures():
    records = [
        *started(1.0, (0,)),
        fired(1.1, 0, 0),
        JobRestarted(t_s=2.0, rank=-1, step=-1, restart=1, workers=(0,), reason="r"),
        *started(2.1, (0,)),
        fired(2.2, 0, 0),
        JobRestarted(t_s=3.0, rank=-1, step=-1, restart=2, workers=(0,), reason="r"),
        *started(3.1, (0,)),
        committed(3.2, 0),
    ]

    report = report_of(records, workers=1)

    assert [(f["t_s"], f["recovery"]) for f in report["failures"]] == [(1.1, 0), (2.2, 1)]
    assert "Workers were killed 2 times" in headline(report)


def test_a_run_that_gave_up_says_where_its_state_is():
    records = [
        *started(1.0, range(2)),
        committed(1.1, 0),
        fired(1.2, 1, 1),
        seen(1.21, 0, 1),
        recovered(1.22, 0, 1, (1,), (0,), "stop", 0),
        *finished(1.4, (0,), outcome="gave-up", checkpoint="ck/step-1"),
    ]

    report = report_of(records, workers=2)

    assert report["outcome"] == "gave-up"
    assert report["failures"][0]["recover_s"] is None
    assert report["checkpoint"] == "ck/step-1"
    assert "Too few workers were alive after 1 step, so it stopped; the state is in ck/step-1." in headline(report)
    assert "no step was committed after it" in "\n".join(summary_lines(report))


def test_the_only_worker_killed_from_outside_is_a_failure():
    records = [*started(1.0, (0,)), committed(1.1, 0), ended(1.5, 0)]

    report = report_of(records, workers=1)

    assert report["outcome"] == "failed"
    assert [(f["rank"], f["step"], f["recover_s"]) for f in report["failures"]] == [(0, 1, None)]


def test_a_script_that_raises_is_an_error_and_not_a_kill():
    records = [
        *started(1.0, (0,)),
        ScriptFailed(t_s=1.2, rank=0, step=0, exit_code=1, message="ValueError: no", traceback=""),
        ended(1.3, 0, exit_code=1),
    ]

    report = report_of(records, workers=1)

    assert (report["outcome"], report["failures"]) == ("failed", [])
    assert report["error"] == {"rank": 0, "step": 0, "exit_code": 1, "message": "ValueError: no"}
    assert "ValueError: no" in headline(report)


def test_a_kill_after_the_gate_of_the_others_is_a_failure_that_cost_nothing():
    report = report_of([*undisturbed()[:-1], ended(2.3, 3)])

    assert [(f["rank"], f["recovery"], f["recover_s"]) for f in report["failures"]] == [(3, None, None)]
    assert report["steps_redone"] == 0


def test_a_worker_that_dies_after_training_has_not_finished():
    ends = [ended(2.3, 1), *(ended(2.5, rank, exit_code=0) for rank in (0, 2, 3))]

    report = report_of([*undisturbed(), *ends])

    assert report["workers"]["ranks_finished"] == [0, 2, 3]
    assert [(f["rank"], f["kind"], f["step"], f["t_s"]) for f in report["failures"]] == [(1, "kill", None, 2.3)]
    said = headline(report)
    assert said.startswith("Worker 1 of 4 was lost after training. The three survivors ended with the same bits.")
    assert "3 of 4 workers finished" in "\n".join(summary_lines(report, None))


def test_workers_that_the_launcher_ends_after_training_are_not_lost_one_by_one():
    report = report_of([*undisturbed(), *(ended(2.5, rank) for rank in range(4))])

    assert report["workers"]["finished"] == 0
    assert report["outcome"] == "failed"
    assert report["failures"] == []


@pytest.mark.parametrize("later", [[], [committed(2.6, 10)]])
def test_a_worker_that_has_begun_another_loop_has_not_finished(later):
    """However it ends: the end of these workers is not recorded."""
    report = report_of([*undisturbed(), *started(2.5, range(4), step=10), *later])

    assert (report["workers"]["finished"], report["outcome"]) == (0, "failed")


def test_an_empty_run_is_a_report_too():
    never = report_of([ended(1.0, 0, exit_code=1)])
    assert (never["api"], never["samples"]["planned"]) == (None, None)
    report = report_of([], workers=2)

    assert (report["outcome"], report["steps"], report["failures"]) == ("failed", 0, [])
    assert report["replicas"] == {"identical": None, "sha256": None, "state_sha256": None}
    assert report["step_s"] == {"p50": None, "p99": None}
    assert summary_lines(report)


def test_replicas_with_other_bits_are_not_identical():
    report = report_of([*started(1.0, range(2)), *finished(2.0, (0,)), *finished(2.0, (1,), bits="cd")], workers=2)

    assert report["replicas"]["identical"] is False
    assert "do not hold the same bits" in headline(report)
    assert any("REPLICAS DIFFER" in line for line in summary_lines(report))
    records = undisturbed()
    records[-1] = dataclasses.replace(records[-1], sha256="other")
    assert report_of(records)["replicas"]["identical"] is False, "in the weights alone"


def test_a_step_that_is_committed_twice_counts_once():
    report = report_of([*started(1.0, (0, 1)), committed(1.1, 0, loss=9.0), committed(1.11, 0, rank=1, loss=4.0)])

    assert (report["steps"], report["metrics"], report["samples"]["committed"]) == (1, {"loss": 4.0}, 40)
    assert report_of([*started(1.0, (0,)), committed(1.1, 0, loss=float("nan"))])["metrics"] == {"loss": None}


def test_what_is_written_is_what_is_loaded(tmp_path):
    records = one_kill()

    report = write_report(list(reversed(records)), tmp_path / "out", started=range(4), wall_s=3.0, seed=3)

    assert load_report(tmp_path / "out") == report
    assert load_events(tmp_path / "out") == sorted(records, key=lambda r: (r.t_s, r.rank))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no report.json in"),
        ("{", "cannot be read"),
        ("[]", "must be an object, got list"),
        ('{"schema": 2}', "schema must be 1, got 2"),
        ('{"schema": 1}', "'workers' is missing or of the wrong type"),
    ],
)
def test_a_damaged_report_is_one_clear_error(tmp_path, text, message):
    if text is not None:
        (tmp_path / "report.json").write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_report(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "Unheard"}\n',
        b'{"event": "StepCommitted", "t_s": 1.0, \xff\n',
        b'{"event": "WorkerEnded", "t_s": "soon", "rank": 1, "returncode": -9}\n',
        b'{"event": "WorkerEnded", "t_s": 1.0, "rank": null, "returncode": -9}\n',
    ],
)
def test_a_damaged_event_is_named_by_its_line(tmp_path, line):
    write_report(one_kill(), tmp_path, started=range(4), wall_s=3.0, seed=3)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line)

    with pytest.raises(ConfigError, match=f"line {len(one_kill()) + 1}: not a record"):
        load_events(tmp_path)


def test_a_demo_compares_with_its_first_run_and_its_rows_have_names(tmp_path):
    ends = finished(3.0, (0,), metrics={"accuracy": 0.85})
    slower = [*started(1.0, (0,)), committed(1.1, 0), committed(2.9, 9), *ends]

    first, second = demo_rows([("undisturbed", report_of(undisturbed())), ("slower", report_of(slower))])["rows"]

    assert (first["name"], first["overhead"], first["accuracy_loss"]) == ("undisturbed", None, None)
    assert second["overhead"] == pytest.approx(1.0)
    assert second["accuracy_loss"] == pytest.approx(0.05)
    with pytest.raises(ConfigError, match="row 0: a row of a demo must have a name"):
        checked_results({"rows": [report_of(undisturbed())]}, tmp_path)


def test_report_table_and_page_load_neither_torch_nor_matplotlib():
    code = (
        "import sys, holdfast.summary.files, holdfast.observe.terminal.table, holdfast.observe.page.html;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib', 'jinja2', 'numpy')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_summary_holds_nothing_that_a_terminal_obeys():
    report = report_of(one_kill()) | {"metrics": {"\x1b[31mred\nab": 1.0, "\ud800": 2.0, "größe": 3.0}}

    text = "".join(summary_lines(report))

    assert "\\x1b[31mred\\nab 1, \\ud800 2, größe 3" in text
    assert text.isprintable()


def test_the_summary_is_a_few_lines():
    lines = summary_lines(report_of(one_kill()))

    assert lines == [
        "Worker 1 of 4 was killed at step 5; training resumed after 100 ms. "
        "The three survivors ended with the same bits. Every sample counted exactly once.",
        "10 steps in 3.00 s (100 ms a step), 3 of 4 workers finished; loss 0.1, accuracy 0.9",
        "worker 1 lost at step 5, allreduce; detected after 10 ms; next step committed after 100 ms; 1 step recomputed",
        "goodput  31.9% useful (957 ms); start up 1.00 s, idle 950 ms, step redone 50 ms, agreement 33 ms, detection 10 ms",
        "samples  400 of 400 committed, 0 lost and 0 repeated",
        "sha256   ab",
    ]


# ---------------------------------------------------------------------------------------------
# Workers that come, go, hang or are slow


def replaced():
    """Worker 1 is killed in step 5; worker 4 takes its place before step 8."""
    before, after = one_kill()[:-7], one_kill()[-7:]
    grown = [
        recovered(1.87 + rank / 1000, rank, 8, (), (0, 2, 3, 4), "grow", 0, 2, joined=(4,), held_s=0.01 + rank / 1000)
        for rank in (0, 2, 3)
    ]
    return [*before, *after[:-3], *grown, *started(1.875, [4], step=8), *finished(2.3, (0, 2, 3, 4))]


def left_early():
    return [
        *started(1.0, range(4)),
        *(committed(1.1 + 0.1 * step, step) for step in range(5)),
        Left(t_s=1.52, rank=1, step=5),
        *(recovered(1.53, rank, 5, (1,), (0, 2, 3), redone_steps=0) for rank in (0, 2, 3)),
        ended(1.6, 1, exit_code=0),
        *(committed(1.65 + 0.1 * (step - 5), step) for step in range(5, 10)),
        *finished(2.3, (0, 2, 3)),
    ]


def hung(*faults):
    kill = [r for r in one_kill() if not isinstance(r, FaultFired)]
    fence = WorkerFenced(t_s=1.555, rank=1, step=5, silent_s=0.7, reason="no sign of life for 0.7 s")
    return [*faults, fence, *kill]


def test_a_newcomer_is_no_failure_and_says_when_it_came_and_what_it_cost():
    report = report_of(replaced())

    assert report["joined"] == [{"rank": 4, "step": 8, "t_s": 1.875, "held_s": 0.013}]
    assert [f["rank"] for f in report["failures"]] == [1]
    assert report["workers"]["started"] == 4
    assert report["workers"]["ranks_finished"] == [0, 2, 3, 4]
    lines = summary_lines(report)
    assert lines[0] == (
        "Worker 1 of 4 was killed at step 5; training resumed after 100 ms. Worker 4 joined at step 8. "
        "The four remaining workers ended with the same bits. Every sample counted exactly once."
    )
    assert "4 of 5 workers finished" in lines[1]
    assert "worker 4 joined at step 8; the other workers waited 13 ms" in lines


def test_a_worker_that_left_in_order_is_no_failure():
    report = report_of(left_early())

    assert report["failures"] == []
    assert report["left"] == [{"rank": 1, "step": 5, "t_s": 1.52}]
    assert report["steps_redone"] == 0
    assert headline(report) == (
        "4 workers trained for 10 steps and none was lost. Worker 1 left before step 5, after SIGTERM. "
        "The three remaining workers ended with the same bits. Every sample counted exactly once."
    )


def test_a_worker_that_left_is_not_missed_after_a_restart():
    records = [
        *started(1.0, range(4)), Left(t_s=1.2, rank=1, step=1), ended(1.3, 1, exit_code=0), ended(1.4, 0),
        JobRestarted(t_s=1.5, rank=-1, step=1, restart=1, workers=(2, 3), reason="lost"), *started(1.6, (2, 3)),
    ]  # fmt: skip

    assert [f["rank"] for f in report_of(records)["failures"]] == [0]


def test_a_newcomer_that_dies_at_the_end_is_a_failure():
    records = [*replaced()[:-1], ended(2.31, 4)]

    assert [f["rank"] for f in report_of(records)["failures"]] == [1, 4]


def test_spares_are_counted_beside_those_that_share_the_work():
    report = report_of([*started(1.0, (4, 5)), *one_kill()])

    assert report["workers"] | {"finished": 3, "ranks_finished": [0, 2, 3]} == report["workers"]
    counted = [report["workers"][name] for name in ("started", "spares", "ranks_spare")]
    assert counted == [4, 2, [4, 5]]


@pytest.mark.parametrize(("faults", "kind"), [((), "hang"), ([fired(1.5, 1, 5, "forward", "gil")], "gil")])
def test_a_worker_that_was_fenced_says_for_how_long_it_was_silent(faults, kind):
    report = report_of(hung(*faults))

    (failure,) = report["failures"]
    assert (failure["kind"], failure["silent_s"], failure["why"]) == (kind, 0.7, "no sign of life for 0.7 s")
    assert headline(report).startswith("Worker 1 of 4 got stuck at step 5 and was ended; training resumed after")
    assert "ended by the launcher after 700 ms without a sign of life" in summary_lines(report)[2]


@pytest.mark.parametrize(
    ("faults", "kind"), [((), "device"), ([fired(1.5, 1, 5, "forward", "gpu-error")], "gpu-error")]
)
def test_a_worker_that_lost_its_device_says_why(faults, kind):
    lost = DeviceLost(t_s=1.51, rank=1, step=5, what="lost", message="CUDA error: unspecified launch failure", gpu="3")
    kill = [r for r in one_kill() if not isinstance(r, FaultFired)]

    (failure,) = report_of([*faults, lost, *kill])["failures"]

    assert (failure["kind"], failure["injected"]) == (kind, bool(faults))
    assert failure["why"] == "CUDA error: unspecified launch failure"


@pytest.mark.parametrize("kind", ["hang", "gpu-oom"])
def test_a_hang_or_a_want_of_memory_that_passed_is_no_failure(kind):
    assert report_of([fired(1.5, 1, 5, "forward", kind), *undisturbed()])["failures"] == []


def a_node_is_struck(kind, *after):
    strikes = FaultFired(t_s=1.5, rank=2, step=5, fault=0, kind=kind, phase="forward", node=1, workers=(2, 3))
    return [*started(1.0, range(4)), *(committed(1.1 + 0.1 * step, step) for step in range(5)), strikes, *after]


@pytest.mark.parametrize("kind", ["nodeloss", "partition"])
def test_with_a_node_all_its_workers_are_lost_to_the_injected_fault(kind):
    lost = [
        *(seen(3.5, rank, 5) for rank in (0, 1)),
        *(recovered(3.6, rank, 5, (2, 3), (0, 1)) for rank in (0, 1)),
        *(committed(3.7 + 0.1 * (step - 5), step) for step in range(5, 10)),
        *finished(4.3, (0, 1)),
    ]
    report = report_of(a_node_is_struck(kind, *lost))

    assert [(f["rank"], f["kind"], f["injected"], f["step"], f["detect_s"]) for f in report["failures"]] == [
        (rank, kind, True, 5, 2.0) for rank in (2, 3)
    ]
    assert ("were killed" in headline(report)) == (kind == "nodeloss")


def test_a_node_that_was_cut_off_for_a_moment_is_no_failure():
    well = [*(committed(2.7 + 0.1 * (step - 5), step) for step in range(5, 10)), *finished(3.3, range(4))]

    assert report_of(a_node_is_struck("partition", *well))["failures"] == []


def test_a_node_that_is_lost_with_the_whole_job_is_a_failure_though_nobody_recovered():
    report = report_of(a_node_is_struck("nodeloss"))

    assert [(f["rank"], f["kind"]) for f in report["failures"]] == [(2, "nodeloss"), (3, "nodeloss")]


def test_what_every_worker_says_of_a_change_is_told_once():
    said = [SettingChanged(t_s=1.5 + r / 100, rank=r, step=4, name="lr", value="0.01") for r in range(4)]
    said += [SettingChanged(t_s=1.7 + r / 100, rank=r, step=6, name="lr", value="0.02") for r in range(4)]

    report = report_of([*undisturbed(), *said])

    assert [(c["step"], c["name"], c["value"], c["t_s"]) for c in report["changed"]] == [
        (4, "lr", 0.01, 1.5), (6, "lr", 0.02, 1.7),
    ]  # fmt: skip
    assert "lr was 0.01 from step 4 on" in summary_lines(report)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("workers", "6", "6 workers were requested before step 4"),
        ("workers", "1", "1 worker was requested before step 4"),
        ("speeds", '{"0": 1.0, "1": 0.5}', "slices were assigned by the workers' speed from step 4 on"),
    ],
)
def test_a_change_that_is_no_setting_of_training_is_told_in_words(name, value, words):
    said = SettingChanged(t_s=1.5, rank=0, step=4, name=name, value=value)

    assert words in summary_lines(report_of([*undisturbed(), said]))


def test_a_straggler_is_named_with_its_score_and_has_one_line():
    def report(*scores, policy):
        seen = [
            StragglerSeen(t_s=1.5, rank=2, step=4 + n, score=score, policy=policy) for n, score in enumerate(scores)
        ]
        return report_of([*undisturbed(), *seen])

    once, thrice = report(3.14159, policy="rebalance"), report(2.5, 7.25, 3.0, policy="warn")

    assert once["stragglers"] == [{"rank": 2, "step": 4, "t_s": 1.5, "score": 3.14, "policy": "rebalance"}]
    assert [line for each in (once, thrice) for line in summary_lines(each) if "slow" in line] == [
        "worker 2 was slow at step 4: it takes 3.1 times as long as the other workers; it gets fewer slices",
        "worker 2 was slow 3 times, first at step 4, most at step 5: it takes 7.2 times as long as the other workers",
    ]


# ---------------------------------------------------------------------------------------------
# A script that speaks to torch.distributed: the backend knows neither samples, model nor plan


def ddp_started(t_s, ranks):
    return started(t_s, ranks, **usual.DDP)


def ddp_committed(t_s, step, rank=0):
    return usual.committed(step, t_s=t_s, rank=rank, samples=0, workers=4)


def ddp_finished(t_s, ranks, steps):
    return [usual.finished(rank, t_s=t_s, step=steps, planned=0, committed=0) for rank in ranks]


def ddp_kill(step=5):
    """Ten steps, the last of which is written down when the script ends, a second later."""
    killed_s = 1.15 + 0.1 * step
    return [
        *ddp_started(1.0, range(4)),
        *(ddp_committed(1.2 + 0.1 * k, k) for k in range(step)),
        fired(killed_s, 1, step),
        *(seen(killed_s + 0.02, rank, step) for rank in (0, 2, 3)),
        *(recovered(killed_s + 0.03, rank, step, (1,), (0, 2, 3), "continue", 0) for rank in (0, 2, 3)),
        *(ddp_committed(1.25 + 0.1 * k, k) for k in range(step, 9)),
        ended(killed_s + 0.09, 1),
        ddp_committed(3.1, 9),
        *ddp_finished(3.1, (0, 2, 3), 10),
    ]


def ddp_without_steps(*deaths):
    """Collectives, but no DistributedDataParallel: the backend says at the end that it was there."""
    left = [rank for rank in range(3) if rank not in deaths]
    return [
        *(seen(1.02, rank, 0) for rank in left if deaths),
        *(recovered(1.03, rank, 0, deaths, tuple(left), "continue", 0) for rank in left if deaths),
        *(ended(1.1, rank) for rank in deaths),
        *ddp_started(2.0, left),
        *ddp_finished(2.0, left, 0),
    ]


def test_what_torch_distributed_does_not_know_is_null():
    report = report_of(ddp_kill())

    assert report["api"] == "torch.distributed"
    unknown = (
        "slices", "split", "seed", "steps_planned", "num_buckets", "parameters", "lost", "checkpoints", "checkpoint",
    )  # fmt: skip
    assert {name: report[name] for name in unknown} == dict.fromkeys(unknown)
    assert set(report["samples"].values()) == set(report["replicas"].values()) == {None}
    assert report["failures"][0]["lost_samples"] is None
    assert (report["strategy"], report["batch"], report["rescale"]) == ("forward", "local", "survivors")
    assert (report["outcome"], report["steps"], report["steps_redone"]) == ("done", 10, 0)
    (failure,) = report_of([r for r in ddp_kill() if not isinstance(r, FaultFired)])["failures"]
    assert (failure["step"], failure["phase"]) == (5, ""), "nor where a death struck that was not injected"
    assert json.loads(json.dumps(report)) == report


def test_the_summary_of_torch_distributed_says_nothing_of_bits_and_samples():
    assert summary_lines(report_of(ddp_kill())) == [
        "Rank 1 of 4 was killed at step 5; training resumed after 100 ms. The three survivors finished.",
        "10 steps in 3.00 s (100 ms a step), 3 of 4 ranks finished",
        "rank 1 lost at step 5, allreduce; detected after 20 ms; next step committed after 100 ms",
        "goodput  66.8% useful (2.07 s); start up 1.00 s, detection 20 ms, agreement 10 ms",
    ]


@pytest.mark.parametrize(("ranks", "who"), [(4, "All four"), (2, "Both")])
def test_an_undisturbed_torch_distributed_run_is_two_short_sentences(ranks, who):
    records = [*ddp_started(1.0, range(ranks)), ddp_committed(1.1, 0), *ddp_finished(2.0, range(ranks), 1)]

    said = headline(report_of(records, workers=ranks))

    assert said == f"{ranks} ranks trained for 1 step and none was lost. {who} finished."
    records = [*ddp_started(1.0, range(2)), fired(1.1, 1, 0), *ddp_finished(2.0, (0,), 1)]
    assert headline(report_of(records, workers=2)).endswith(" One rank survived and finished.")


def test_the_last_step_of_torch_distributed_has_no_time():
    """It is written down when the script ends, whatever that did after training."""
    report = report_of(ddp_kill())
    at_last = report_of(ddp_kill(step=9))

    assert report["step_s"]["p99"] == pytest.approx(0.1)
    assert report["train_s"] == pytest.approx(0.85)
    assert at_last["failures"][0]["recover_s"] is None
    assert headline(at_last) == "Rank 1 of 4 was killed at step 9. The three survivors finished."
    assert summary_lines(at_last)[-2] == "rank 1 lost at step 9, allreduce; detected after 20 ms; no later step began"


def test_a_torch_distributed_script_without_ddp_has_no_steps():
    report = report_of(ddp_without_steps(), workers=3)

    assert (report["outcome"], report["api"], report["steps"]) == ("done", "torch.distributed", 0)
    assert summary_lines(report) == [
        "3 ranks ran, without a step of DistributedDataParallel, and none was lost. All three finished.",
        "over after 3.00 s, 3 of 3 ranks finished",
    ]


def test_a_rank_that_died_where_there_are_no_steps_died_at_none():
    report = report_of(ddp_without_steps(1), workers=3)

    (failure,) = report["failures"]
    assert (failure["step"], failure["phase"], failure["recover_s"]) == (None, "", None)
    assert summary_lines(report) == [
        "Rank 1 of 3 was lost. The two survivors finished.",
        "over after 3.00 s, 2 of 3 ranks finished",
        "rank 1 lost 1.02 s after the start",
    ]


def test_a_flip_is_in_the_report_and_is_no_failure():
    report = report_of([*undisturbed(), *flipped(1.55, 1, 5)])

    values = [{"path": "fc.weight", "index": 7, "bit": 30, "before": 0.5, "after": 1.7e38}]
    flip = {"fault": 0, "rank": 1, "step": 5, "target": "weights", "count": 1, "t_s": 1.55, "values": values}
    assert (report["failures"], report["flips"]) == ([], [flip])


def test_a_worker_that_is_killed_after_a_flip_did_not_die_of_it():
    records = [*(r for r in one_kill() if not isinstance(r, FaultFired)), *flipped(1.15, 1, 1)]

    (failure,) = report_of(records)["failures"]
    assert (failure["kind"], failure["injected"]) == ("kill", False)
