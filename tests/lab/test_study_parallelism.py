from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_lab.pages.study import render_study, shown_section
from holdfast_lab.studies.base import FAILED, MEASURED, NOT_RUN, Claim, Options
from holdfast_lab.studies.parallelism.claims import hold_claims
from holdfast_lab.studies.parallelism.elastic import ElasticCase, cases, elastic_row
from holdfast_lab.studies.parallelism.jobs import SCRIPTS, ParallelismOutcome, ParallelismRun, TrainingScale, carry_out
from holdfast_lab.studies.parallelism.needs import OMISSIONS, need_rows
from holdfast_lab.studies.parallelism.page import sections
from holdfast_lab.studies.parallelism.rows import STRUCTURES, data_row, row_of, structure_rows
from holdfast_lab.studies.parallelism.study import STUDY

SCALE = TrainingScale(
    dataset="digits", side=None, samples=256, batch=32, epochs=1, slices=4, kills=(3,), checkpoint_every=2
)  # fmt: skip
JOB = ParallelismRun(kind="pipeline", strategy="rollback", network="cnn", workers=2, scale=SCALE, kills=((1, 3),))
CALM = dataclasses.replace(JOB, kills=())


# ---------------------------------------------------------------------------------------------
# Rows, from reports as runs leave them


def outcome(*, lost: bool = False, steps: int = 8, failed: str = "", **said: Any) -> ParallelismOutcome:
    failure = {
        "decision": "redo",
        "detect_s": 0.25,
        "recover_s": 0.75,
        "orders": {"Revoke": 1, "Agree": 4, "Shrink": 1, "ShareProgress": 1, "MoveParts": 1, "AdoptPlacement": 1},
        "times_s": {
            "Revoke": 0.01,
            "Agree": 0.02,
            "Shrink": 0.03,
            "ShareProgress": 0.04,
            "MoveParts": 0.5,
            "AdoptPlacement": 0.25,
        },
    }
    samples = {"planned": 256, "committed": 256, "lost": 0, "repeated": 0}
    report = {
        "outcome": "done",
        "steps_planned": 8,
        "steps_redone": int(lost),
        "restarts": 0,
        "parameters": 99,
        "failures": [failure] if lost else [],
        "restored": [],
        "samples": samples,
        "replicas": {"identical": True, "sha256": "ab", "state_sha256": "cd"},
        "metrics": {"accuracy": 0.9},
    }
    commits = [{"event": "StepCommitted", "step": step, "metrics": {"noise": step / 8}} for step in range(steps)]
    note = {"step_s": 1.0, "compute_s": 0.5, "optimizer_s": 0.125, "communication_s": 0.375, "buffers_sha256": "ef"}
    notes = [note, {**note, "step_s": 3.0}]
    return ParallelismOutcome(report={**report, **said}, events=commits, notes=notes, failed=failed)


def killed_row(job: ParallelismRun = JOB, **said: Any) -> dict[str, Any]:
    return row_of(job, outcome(lost=True, **said), row_of(dataclasses.replace(job, kills=()), outcome(), None))


def test_a_row_says_what_a_recovery_took_and_asked_of_mpi():
    row = killed_row()

    assert (row["detect_s"], row["recover_s"], row["redone_steps"]) == (0.25, 0.75, 1)
    assert (row["revoke_s"], row["agree_s"], row["shrink_s"], row["share_s"]) == (0.01, 0.02, 0.03, 0.04)
    assert row["transfer_s"] == 0.75
    assert row["load_s"] is None
    assert [row[f"MPI_Comm_{call}"] for call in ("revoke", "agree", "shrink")] == [1, 4, 1]
    assert (row["kind"], row["kill_rank"], row["kill_step"], row["form"]) == ("pipeline", 1, 3, "survivors only")
    assert row["step_s"] == 2.0
    assert (row["differs"], row["same_bits"], row["accuracy_loss"]) == ("nothing", True, 0.0)


@pytest.mark.parametrize(
    ("said", "differs"),
    [
        ({"replicas": {"identical": True, "sha256": "ab", "state_sha256": "??"}}, "state_sha256"),
        ({"samples": {"planned": 256, "committed": 248, "lost": 8, "repeated": 0}}, "committed"),
        ({"steps": 7}, "noise_sha256"),
    ],
)
def test_a_row_names_what_is_not_as_it_was_without_the_kill(said, differs):
    assert killed_row(**said)["differs"] == differs


def test_a_step_that_was_done_again_counts_once_and_one_that_is_missing_is_a_gap():
    twice = outcome()
    twice.events.append({"event": "StepCommitted", "step": 3, "metrics": {"noise": 3 / 8}})

    assert row_of(CALM, twice, None)["in_order"]
    assert row_of(CALM, twice, None)["noise_sha256"] == row_of(CALM, outcome(), None)["noise_sha256"]
    assert not row_of(CALM, outcome(steps=7), None)["in_order"]


def test_a_snapshot_taken_at_the_fault_and_the_application_built_again_are_in_the_row():
    ended = outcome(lost=True)
    for seconds in (1.0, 3.0):
        ended.events.append({"event": "Reinitialised", "snapshot_s": seconds, "rebuild_s": 10 * seconds, "load_s": 0.5})

    row = row_of(dataclasses.replace(JOB, strategy="reinit"), ended, None)

    assert (row["snapshot_s"], row["reinit_s"], row["load_s"]) == (3.0, 30.0, 0.5)


def test_a_job_that_hung_counts_against_the_claim_that_training_completes():
    row = row_of(JOB, ParallelismOutcome(failed="was not done after 60 s"), None)

    assert row["status"] == NOT_RUN
    assert claim([row, killed_row()], "Any worker may be killed").holds is False


def test_a_job_that_refuses_to_start_says_why_and_breaks_no_page():
    refused = outcome(steps=0, failed="ended with 2: a split model cannot", outcome="failed")
    row = row_of(JOB, refused, row_of(CALM, outcome(), None))

    page = render_study({"study": "s", "settings": {}, "rows": [row], "claims": [], "page": sections([row])})

    assert (row["completes"], row["why"], row["decision"]) == (False, "ended with 2: a split model cannot", None)
    assert "Result of each recovery" in page
    assert claim([row], "Any worker may be killed").holds is False


def test_what_cannot_be_compared_is_no_difference():
    failed = row_of(CALM, outcome(failed="ended with 1: a bug"), None)
    row = row_of(JOB, outcome(lost=True), failed)

    assert (failed["status"], failed["why"]) == (FAILED, "ended with 1: a bug")
    assert row["differs"] == "not compared"
    assert claim([row], "When the survivors redo the iteration").holds is None


@pytest.mark.parametrize(
    ("held", "once"), [(([0, 1], [2, 3]), True), (([0, 1], [1, 2, 3]), False), (([0, 1], [3]), False)]
)
def test_the_blocks_of_the_survivors_are_the_whole_data_set_each_once(held, once):
    ended = outcome(lost=True)
    for note, blocks, step in zip(ended.notes, held, (0, 3), strict=True):
        note |= {"held": blocks, "reads": [{"step": step, "seconds": 0.5, "samples": 64, "blocks": blocks}]}

    row = data_row(dataclasses.replace(JOB, kind="replicated", blocks=True), ended)

    assert row["held_once"] is once
    assert (row["reread_samples"], row["reread_s"], row["resident_lost"]) == (64, 0.5, 128)


def bare_row(redone_steps: int = 4) -> dict[str, Any]:
    return {**killed_row(), "part": "bare", "decision": "load", "redone_steps": redone_steps}


def test_parts_need_a_checkpoint_only_where_nobody_has_a_copy_and_the_rest_never():
    rows = {row["structure"]: row for row in structure_rows("pipeline", killed_row(), bare_row(2), bare_row())}

    of_parts = {name: row["needs"] for name, row in rows.items() if row["needs"] != "no"}
    assert rows.keys() == STRUCTURES.keys()
    assert of_parts == dict.fromkeys(("weights", "optimizer state", "buffers"), "without a copy")
    assert rows["weights"]["pipeline"].startswith(
        "no: a standby has it; without it yes, 2 of 4 iterations redone; without both, 4"
    )
    assert rows["random numbers"]["pipeline"] == "no: drawn from seed, iteration and slice"
    assert all(row["in_memory"] for row in rows.values())


RESTORED = {"part": 1, "step": 3, "by": 0, "source": "backup", "optimizer": "saved"}


def partial_row(**said: Any) -> dict[str, Any]:
    ages = [(4, 3, 3), (2, 9, 9)]  # blocks, mean and largest age
    restored = [{**RESTORED, "blocks": n, "stale_steps": {"mean": mean, "max": most}} for n, mean, most in ages]
    job = dataclasses.replace(JOB, strategy="partial")
    other_bits = {"identical": True, "sha256": "??", "state_sha256": "??"}
    return killed_row(job, **{"restored": restored, "replicas": other_bits, "metrics": {"accuracy": 0.89}, **said})


def test_what_was_restored_as_it_was_some_iterations_before_is_in_the_row_with_its_age():
    row = partial_row()

    assert (row["restored_parts"], row["restored_blocks"], row["restored_from"]) == (2, 6, "backup")
    assert (row["restored_age"], row["restored_oldest"]) == (5.0, 9)
    assert row["same_bits"] is False
    assert row["accuracy_loss"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("said", "is_told"), [({}, True), ({"restored": []}, False), ({"restarts": 1}, False)]
)  # fmt: skip
def test_a_backup_spares_parts_the_checkpoint_if_they_came_from_it(said, is_told):
    rows = {
        r["structure"]: r for r in structure_rows("pipeline", killed_row(), bare_row(2), backup=partial_row(**said))
    }

    told = [name for name, row in rows.items() if "with a delta standby no, but 5 iterations old" in row["pipeline"]]
    assert told == (["weights", "optimizer state", "buffers"] if is_told else [])


def test_a_run_that_went_back_to_the_beginning_shows_nothing_though_its_bits_are_the_same():
    went_back = {**killed_row(), "decision": "load"}

    rows = structure_rows("replicated", went_back)

    assert {row["needs"] for row in rows} == {"yes"}


def test_only_what_differs_is_lost():
    damaged = killed_row(replicas={"identical": True, "sha256": "ab", "state_sha256": "??"})

    needs = {row["structure"]: row["needs"] for row in structure_rows("replicated", damaged)}

    assert needs == {name: "yes" if name == "optimizer state" else "no" for name in STRUCTURES}


# ---------------------------------------------------------------------------------------------
# Claims and page


CASE = ElasticCase(scenario="same", comes="a new process", fabric="gloo", strategy="rollback", workers=2)


def elastic(*known: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the row of a run in which a worker died at 1.0 s; 0.25 s later that was seen, and 0.5 s after that all went on."""
    case = dataclasses.replace(CASE, **changes)
    job = case.job("cnn", SCALE, 0)
    is_killed = bool(job.kills)
    ended = outcome(lost=is_killed, joined=[], changed=[{"name": "workers", "t_s": 1.0}])
    for commit in ended.events:
        commit |= {"workers": case.workers}
    if is_killed:
        ended.report["failures"][0] |= {"rank": 1, "t_s": 1.0, "recover_s": 0.875}
        ended.report.update(changed=[], steps_redone=int(case.strategy != "forward"))
        went_on = {"event": "Recovered", "rank": 0, "lost": [1], "joined": [], "times_s": {}}
        ended.events.extend([{**went_on, "t_s": 1.5}, {**went_on, "t_s": 1.75}])
    if case.comes == "a new process":
        came = {
            "event": "Recovered",
            "lost": [],
            "joined": [2],
            "t_s": 4.0,
            "times_s": {"SendState": 0.5, "AdoptState": 0.25},
        }
        ended.events.extend([{**came, "rank": 0}, {**came, "rank": 2, "times_s": {"SendState": 9.0}}])
        ended.report["joined"] = [
            {"rank": 2 + n, "step": step, "t_s": 4.0 + n, "held_s": 1.0} for n, step in enumerate((5, 5, 6))
        ]
    return elastic_row(case, job, ended, known)


def elastic_rows() -> list[dict[str, Any]]:
    """Return what a whole study has of them: the undisturbed run, and each way of recovering."""
    calm = elastic(scenario="undisturbed", comes="nobody")
    ways = [("forward", "ulfm"), ("rollback", "ulfm"), ("restart", "gloo"), ("reinit", "gloo")]
    runs = [elastic(scenario="down", comes="nobody", strategy=strategy, fabric=fabric) for strategy, fabric in ways]
    runs += [elastic(), elastic(scenario="up")]
    of_horovod = [{**row, "recover_s": 9.0} if row["strategy"] == "reinit" else row for row in runs]
    return [calm, *({**row, "differs": "nothing", "same_bits": True} for row in of_horovod for _ in range(3))]


def test_the_time_until_the_next_commit_is_divided_and_who_came_held_the_others_once_a_step():
    row = elastic()

    assert (row["detect_s"], row["repair_s"], row["redo_s"]) == (0.25, 0.5, 0.125)
    assert sum((row["detect_s"], row["repair_s"], row["redo_s"])) == row["recover_s"]
    assert (row["joined"], row["held_s"], row["times_held"]) == (3, 2.0, 2)
    assert row["give_s"] == 0.75  # at those who were there, and not at the newcomer, who waits for them
    assert row["join_s"] == 5.0
    assert (row["scenario"], row["workers"], row["workers_at_end"], row["kills"]) == ("same", 2, 2, 1)


def test_a_job_that_grows_begins_with_half_and_asks_and_nobody_dies_in_it():
    job = dataclasses.replace(CASE, scenario="up", workers=8).job("cnn", SCALE, 0)

    words = job.words(Path("folder"))

    assert (job.workers, job.kills) == (4, ())
    assert " ".join(words).endswith("--wanted 8 --since 30 --ask")
    assert "--respawn" not in words
    assert elastic(scenario="up")["join_s"] == 5.0


def test_each_scenario_is_run_where_it_can_be():
    told = [(case.scenario, case.comes, case.fabric, case.strategy, case.workers) for case in cases((2, 4, 8))]

    assert told[0][0] == "undisturbed"
    assert ("down", "nobody", "ulfm", "forward", 8) in told
    assert not [case for case in told if case[1] == "a new process" and case[2] == "ulfm"]
    assert not [case for case in told if case[3] == "reinit" and case[2] == "ulfm"]
    assert {case[4] for case in told if case[1] in ("nobody", "a spare")} == {4, 8}
    assert {case[4] for case in told if case[0] == "up"} == {2, 4, 8}
    assert len(set(told)) == len(told)


def test_the_undisturbed_run_of_the_scenarios_is_not_that_of_the_other_parts():
    calm = elastic(scenario="undisturbed", comes="nobody")

    assert calm["part"] == "elastic"
    assert elastic(row_of(CALM, outcome(), None), calm)["differs"] == "nothing"
    assert elastic(row_of(CALM, outcome(), None))["differs"] == "not compared"


def test_a_scenario_that_did_not_end_counts_against_what_is_claimed_of_it():
    rows = elastic_rows()
    failed = {**elastic_row(CASE, CASE.job("cnn", SCALE, 0), ParallelismOutcome(failed="was not done after 60 s"), [])}

    assert failed["status"] == NOT_RUN
    assert claim([*rows, failed], "replaces another, or is added").holds is False


def rows_of_study() -> list[dict[str, Any]]:
    replicated = dataclasses.replace(JOB, kind="replicated")
    forward = [killed_row(dataclasses.replace(replicated, strategy="forward", kills=((n, 3),))) for n in range(3)]
    restart = dataclasses.replace(replicated, strategy="restart", checkpoints=True)
    reinit = dataclasses.replace(replicated, strategy="reinit", reinit_from="root")
    data = {**replicated.about(), "part": "data", "status": MEASURED, "held_once": True, "reread_s": 0.1}
    needs = {
        "part": "needs",
        "status": MEASURED,
        "call": "MPI_Comm_revoke",
        "instead": "nothing",
        "strategy": "rollback",
    }
    return [
        row_of(CALM, outcome(), None),
        killed_row(),
        *(killed_row(replicated) for _ in range(3)),
        *({**killed_row(reinit), "decision": "reinit", "recover_s": 3.0} for _ in range(3)),
        *forward,
        {**killed_row(restart), "decision": "load", "redone_steps": 3, "files": 5},
        bare_row(),
        data,
        {**needs, "breaks": True, "how": "deadlock: <somebody> waits", "workers": 3, "deaths": 1, "moves": 2},
        *structure_rows("pipeline", killed_row(), bare_row(), bare_row()),
        *(partial_row() for _ in range(3)),
        *elastic_rows(),
        {**JOB.about(), "part": "recovery", "status": NOT_RUN, "why": "cnn has 4 blocks"},
    ]


def claim(rows: list[dict[str, Any]], words: str) -> Claim:
    return next(c for c in hold_claims(rows, 0) if words in c.claim)


def test_every_claim_holds_of_runs_that_went_well():
    assert {c.claim: c.holds for c in hold_claims(rows_of_study() * 6, 0) if not c.holds} == {}


def test_a_claim_of_all_runs_is_undecided_after_the_first():
    rows = [row for row in rows_of_study() if row["part"] == "bare"]

    found = claim(rows, "takes its part of the model with it")

    assert (found.ours, found.ci, found.holds) == (1.0, pytest.approx((0.025, 1.0)), None)
    assert claim(rows * 6, "takes its part of the model with it").holds is True


@pytest.mark.parametrize(
    ("part", "changed", "words"),
    [
        ("recovery", {"completes": False}, "Any worker may be killed"),
        ("recovery", {"identical": False}, "Survivors end with the same weights"),
        ("recovery", {"in_order": False}, "No iteration is skipped"),
        ("recovery", {"files": 1, "kind": "replicated"}, "writes no checkpoint file"),
        ("recovery", {"differs": "sha256"}, "When the survivors redo the iteration"),
        ("recovery", {"each_once": False}, "Every sample contributes to the weights once"),
        ("recovery", {"restarts": 1}, "no data structure needs a checkpoint"),
        ("recovery", {"decision": "load"}, "The lost part is restored"),
        ("recovery", {"redone_steps": 99}, "redoes more iterations"),
        ("data", {"held_once": False}, "each block once"),
        ("bare", {"decision": "redo"}, "takes its part of the model with it"),
        ("needs", {"breaks": False}, "Without any one of the ULFM calls"),
    ],
)
def test_a_claim_does_not_hold_if_a_run_says_otherwise(part, changed, words):
    rows = rows_of_study()
    place = next(n for n, row in enumerate(rows) if row["part"] == part)
    rows[place] = {**rows[place], **changed}

    assert claim(rows * 2, words).holds is False


@pytest.mark.parametrize(
    ("chosen", "changed", "words"),
    [
        ({"strategy": "partial"}, {"accuracy_loss": 0.3}, "Restoring one part from some iterations earlier"),
        ({"strategy": "forward"}, {"redone_steps": 1}, "retry the failed all-reduce"),
        ({"scenario": "same"}, {"differs": "sha256"}, "replaces another, or is added"),
        ({"scenario": "up"}, {"workers_at_end": 1}, "replaces another, or is added"),
        ({"strategy": "reinit"}, {"recover_s": 0.1}, "as Elastic Horovod does"),
    ],
)
def test_what_is_claimed_of_some_runs_does_not_hold_if_they_say_otherwise(chosen, changed, words):
    part = "recovery" if chosen == {"strategy": "partial"} else "elastic"
    is_meant = {"part": part, **chosen}.items()
    rows = [{**row, **changed} if is_meant <= row.items() else row for row in rows_of_study()]

    assert claim(rows, words).holds is False


def test_two_runs_do_not_tell_what_going_on_costs():
    rows = [row for row in rows_of_study() if row.get("strategy") == "forward"][:2]

    assert claim(rows, "costs little accuracy").holds is None


def test_the_page_shows_every_part_and_its_sentences_lead_to_rows():
    rows = rows_of_study()
    results = {"study": "s", "settings": {}, "rows": rows, "claims": [c.to_dict() for c in hold_claims(rows, 0)]}

    page = render_study({**results, "page": sections(rows)})

    links = re.findall(r'href="#([^"]+)"', page)
    assert links
    assert [link for link in links if f'id="{link}"' not in page] == []
    for title in (
        "Duration of each recovery",
        "What breaks without each call",
        "Which data structure needs a checkpoint",
        "Parts restored from earlier iterations",
        "Down and same: the cost of losing a worker",
        "Same and up: the cost of joining processes",
    ):
        assert title in page
    assert "&lt;somebody&gt; waits" in page
    assert "cnn has 4 blocks" in page


def test_a_bar_of_several_runs_has_a_line_from_the_quickest_to_the_slowest():
    killed = [row for row in rows_of_study() if row["part"] == "recovery" and row["strategy"] == "rollback"][:1]
    three = [killed[0] | {"detect_s": detect_s} for detect_s in (0.1, 0.2, 0.9)]

    drawn = {}
    for runs in (killed, three):
        figure = next(section for section in sections(runs) if section["id"] == "times-figure")
        drawn[len(runs)] = shown_section(figure, runs)

    assert "A bar is one run" in drawn[1]["note"]
    assert "A bar is the median of 3 runs; its line spans the smallest" in drawn[3]["note"]
    assert drawn[3]["svg"].count("<path") > drawn[1]["svg"].count("<path")


# ---------------------------------------------------------------------------------------------
# What breaks without each call


@pytest.mark.parametrize(
    "omission", [o for o in OMISSIONS if o.workers < 4], ids=lambda o: f"{o.call}, {o.instead}".replace("MPI_", "")
)
def test_without_a_call_some_run_goes_wrong(omission):
    rows = need_rows(omission)

    assert [row["strategy"] for row in rows] == ["rollback", "forward", "restart"]
    assert any(row["breaks"] for row in rows)
    assert all(row["moves"] > 0 for row in rows if row["breaks"])
    assert not any(set("[({<") & set(row["how"]) for row in rows if row["breaks"]), "no names of orders in words"


def test_with_all_calls_nothing_goes_wrong():
    whole = dataclasses.replace(OMISSIONS[0], protocol=type(OMISSIONS[0]).__dataclass_fields__["protocol"].default)

    assert [row["breaks"] for row in need_rows(whole)] == [False, False, False]


def test_without_the_model_checker_the_study_says_in_one_line_that_this_part_needs_a_checkout(tmp_path, monkeypatch):
    wanted = Options(out=tmp_path, quick=True)
    whole = [task.key for task in STUDY.plan(wanted).tasks()]
    monkeypatch.setitem(sys.modules, "model.explorer", None)

    left = [task.key for task in STUDY.plan(wanted).tasks()]

    assert [key for key in whole if key not in left] == [key for key in whole if key.startswith("without MPI_")] != []
    assert "run this from a checkout of the repository" in STUDY.plan(wanted).left_out()[-1]
    assert need_rows(OMISSIONS[0]) == []


# ---------------------------------------------------------------------------------------------
# The workers' script, and the plan


def script() -> Any:
    spec = importlib.util.spec_from_file_location("parallel", SCRIPTS / "parallel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slices_read_contiguous_blocks_and_an_epoch_reads_every_sample_once(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(48))
    np.save(tmp_path / "y.npy", np.arange(48))
    blocks = script().BlockPolicy(tmp_path, samples=48, batch=12, blocks=4)
    blocks.hold(range(4), step=0)

    read = [int(blocks[place][0]) for place in range(48)]

    assert sorted(read) == list(range(48))
    for number in range(4):  # slice `number` of each mini-batch of 12: three places
        of_slice = [read[12 * step + 3 * number + j] for step in range(4) for j in range(3)]
        assert of_slice == list(range(12 * number, 12 * number + 12))


def test_only_blocks_that_are_not_here_are_read_and_the_others_go(tmp_path):
    for name in "xy":
        np.save(tmp_path / f"{name}.npy", np.arange(48))
    blocks = script().BlockPolicy(tmp_path, samples=48, batch=12, blocks=4)

    for step, numbers in enumerate([(0, 1), (0, 1), (1, 2)]):
        blocks.hold(numbers, step)

    assert [(read["step"], read["blocks"], read["samples"]) for read in blocks.reads] == [(0, [0, 1], 24), (2, [2], 12)]
    assert sorted(blocks.held) == [1, 2]


def test_the_whole_study_kills_in_iteration_300_and_every_rank_of_two(tmp_path):
    keys = [task.key for task in STUDY.plan(Options(out=tmp_path)).tasks()]

    for kind in ("replicated", "pipeline", "sharded"):
        for workers in (2, 4, 8):
            assert any(f"kill: {kind}, rollback, {workers} workers" in key and "iteration 300" in key for key in keys)
    assert not any("hybrid" in key and "2 workers" in key for key in keys)
    assert all(any(f"2 workers, rank {rank}" in key for key in keys) for rank in (0, 1))
    assert len(set(keys)) == len(keys)


@pytest.mark.chaos
@pytest.mark.timeout(180)
def test_the_blocks_of_a_killed_worker_are_read_again_by_the_survivors(tmp_path):
    job = ParallelismRun(
        kind="replicated", strategy="rollback", network="mlp", workers=3, scale=SCALE, kills=((1, 3),), blocks=True
    )  # fmt: skip

    ended = carry_out(job, None, 150)
    row, recovery = data_row(job, ended), row_of(job, ended, None)

    assert row["status"] == MEASURED, row
    assert row["held_once"]
    assert row["each_once"]
    assert row["reread_samples"] >= SCALE.samples // 4
    assert row["reread_s"] > 0
    assert (recovery["decision"], recovery["MPI_Comm_shrink"], recovery["MPI_Allreduce"]) == ("redo", 1, 1)
    assert recovery["MPI_Comm_agree"] >= 3
    assert recovery["shrink_s"] > 0
