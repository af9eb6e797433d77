"""Partial recovery: what the dead alone held comes back as it was saved last, and nothing else changes.

The bits say how old it was: a part that was saved in the step in which its holder dies is restored to the undisturbed run's
bits, and one that was saved before is not.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from jobs import assert_landed, assert_landed_for_good, holdfast, run_report

from holdfast.checkpoint.format import flatten
from holdfast.cli import main

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_split.py"
LIMIT_S = 300
NOTHING_LOST = {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
KINDS = ("sharded", "pipeline")
EVERY_4 = ("--mirror-every", 4)


@functools.cache
def undisturbed(kind):
    """The sha256 of the model at the end of training where nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        return run_report(folder, "-n", 4, "--fabric", "virtual", SCRIPT, kind)["replicas"]["sha256"]


def run(tmp_path, kind, *words, inject=(), strategy="partial", workers=4, script=(), **expected):
    """Train the model in parts, and return the report."""
    faults = [word for spec in inject for word in ("--inject", spec)]
    given = ("-n", workers, "--strategy", strategy, *words, *faults, SCRIPT, kind, *script)
    return run_report(tmp_path, *given, timeout=LIMIT_S, **expected)


def check_trained(report, finished):
    """All samples were trained on, by workers that agree."""
    assert report["outcome"] == "done"
    assert report["workers"]["ranks_finished"] == finished
    assert report["replicas"]["identical"] is True
    assert report["samples"] == NOTHING_LOST
    assert {event["decision"] for event in report["_events"] if event["event"] == "Recovered"} <= {
        "redo",
        "continue",
        "grow",
    }


LAST_SENT = {"sharded": "kill:rank=2,step=8,phase=allreduce,bucket=1", "pipeline": "kill:rank=0,step=8,phase=allreduce"}
"""Deaths of which the fault itself proves that everybody was past the beginning of the step, where parts are saved."""


@pytest.mark.parametrize(
    ("kind", "fabric"),
    [
        ("sharded", "gloo"),
        ("pipeline", "ulfm"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("sharded", "ulfm"), ("pipeline", "gloo"))),
    ],
)
def test_a_part_that_was_just_saved_is_restored_to_the_bit(tmp_path, kind, fabric):
    report = run(tmp_path, kind, "--fabric", fabric, *EVERY_4, inject=[LAST_SENT[kind]])

    rank = 2 if kind == "sharded" else 0
    assert_landed(report, rank)
    check_trained(report, [other for other in range(4) if other != rank])
    (restored,) = report["restored"]
    assert (restored["part"], restored["step"], restored["source"]) == (rank, 8, "backup")
    assert restored["stale_steps"]["blocks_of_age"] == {"0": restored["blocks"]}
    assert report["replicas"]["sha256"] == undisturbed(kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sharded", ("--fabric", "gloo", "--mirror-fraction", 0.25)),
        pytest.param("sharded", ("--fabric", "ulfm", "--mirror-optimizer", "reset"), marks=pytest.mark.soak),
        pytest.param(
            "pipeline",
            ("--fabric", "ulfm", "--mirror-fraction", 0.5, "--mirror-choice", "round-robin"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "pipeline",
            ("--fabric", "gloo", "--mirror-fraction", 0.5, "--mirror-predictor", "line", "--mirror-codec", "int8"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "sharded",
            (
                *("--fabric", "ulfm", "--mirror-fraction", 0.5, "--mirror-predictor", "calibrated"),
                *("--mirror-codec", "int8", "--mirror-distance", "scaled"),
            ),
        ),
    ],
)
def test_a_part_that_was_saved_before_is_as_old_as_the_report_says(tmp_path, kind, words):
    report = run(
        tmp_path,
        kind,
        *EVERY_4,
        *words,
        inject=["kill:rank=1,step=5,phase=allreduce", "kill:rank=3,step=11,phase=backward"],
    )

    assert_landed(report, 1, 3)
    check_trained(report, [0, 2])
    assert report["restored"][0]["step"] == 5
    assert {restored["source"] for restored in report["restored"]} == {"backup"}
    assert any(restored["stale_steps"]["max"] > 0 for restored in report["restored"])
    for restored in report["restored"]:
        assert sum(restored["stale_steps"]["blocks_of_age"].values()) == restored["blocks"] > 0
    assert report["replicas"]["sha256"] != undisturbed(kind)


@pytest.mark.parametrize(
    ("kind", "fabric"), [("sharded", "gloo"), pytest.param("pipeline", "ulfm", marks=pytest.mark.soak)]
)
def test_an_optimizer_that_is_kept_comes_back_as_it_was_with_parameters_that_are_older(tmp_path, kind, fabric):
    (tmp_path / "n").mkdir()
    kept = ("--fabric", fabric, *EVERY_4, "--mirror-optimizer", "kept")
    kill = LAST_SENT[kind].replace("step=8", "step=7")
    report = run(tmp_path, kind, *kept, inject=[kill], script=("--note", tmp_path / "n"))

    rank = 2 if kind == "sharded" else 0
    assert_landed(report, rank)
    check_trained(report, [other for other in range(4) if other != rank])
    (restored,) = report["restored"]
    assert restored["stale_steps"]["blocks_of_age"] == {"3": restored["blocks"]}
    assert (restored["optimizer"], restored["optimizer_stale_steps"]) == ("kept", 0)
    assert "its optimizer state 0 steps old" in report["_stdout"] + report["_stderr"]
    saved, lost, came = (
        torch.load(tmp_path / "n" / f"part-{rank}-step-{name}.pt", weights_only=False) for name in ("4-0", "7-0", "7-1")
    )
    assert same(came["optimizer"], lost["optimizer"])
    assert same(weights(came), weights(saved))
    assert not same(weights(lost), weights(saved))
    assert not same(lost["optimizer"], saved["optimizer"])


def weights(state):
    """Without batch norm's averages, which are as new as the optimizer's state."""
    return {name: value for name, value in state["model"].items() if name.endswith(("weight", "bias"))}


def same(a, b):
    a, b = flatten(a)[0], flatten(b)[0]
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[path]), torch.as_tensor(b[path])) for path in a)


@pytest.mark.parametrize("kind", KINDS)
def test_backups_change_no_bit_as_long_as_nobody_dies(tmp_path, kind):
    report = run(tmp_path, kind, *EVERY_4, "--fabric", "gloo", "--mirror-fraction", 0.25)

    check_trained(report, [0, 1, 2, 3])
    assert report["restored"] == []
    assert report["replicas"]["sha256"] == undisturbed(kind)
    held = {line["rank"]: line for line in report["parts_held"]}
    assert [held[rank]["computes"] for rank in range(4)] == [[0], [1], [2], [3]]
    assert sorted(part for line in held.values() for part in line["backups"]) == [0, 1, 2, 3]
    assert all(line["mirrors"] == [] and line["copies_bytes"] > line["computes_bytes"] > 0 for line in held.values())


def test_with_mirrors_nothing_is_restored_and_no_bit_changes(tmp_path):
    report = run(tmp_path, "sharded", "--fabric", "gloo", "--mirror", 1, inject=["kill:rank=2,step=7,phase=backward"])

    assert_landed(report, 2)
    check_trained(report, [0, 1, 3])
    assert report["restored"] == []
    assert report["replicas"]["sha256"] == undisturbed("sharded")


# -- without a backup


def test_without_backups_only_the_lost_part_is_loaded(tmp_path):
    saving = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3)

    report = run(
        tmp_path,
        "sharded",
        "--fabric",
        "gloo",
        "--mirror",
        0,
        *saving,
        inject=["kill:rank=1,step=8"],
        script=("--pause", 0.1),
    )

    assert_landed(report, 1)
    check_trained(report, [0, 2, 3])
    (restored,) = report["restored"]
    assert (restored["part"], restored["source"]) == (1, "checkpoint")
    assert restored["stale_steps"]["mean"] == restored["stale_steps"]["max"] in (2, 5)  # the newest that was complete
    assert report["steps_redone"] <= 1


def test_a_stage_that_was_never_saved_begins_anew_and_a_shard_makes_the_job_begin_again(tmp_path):
    pipeline = run(tmp_path / "p", "pipeline", "--fabric", "gloo", "--mirror", 0, inject=["kill:rank=1,step=5"])
    sharded = run(tmp_path / "s", "sharded", "--fabric", "gloo", "--mirror", 0, inject=["kill:rank=1,step=5"])

    assert_landed(pipeline, 1)
    check_trained(pipeline, [0, 2, 3])
    assert [(r["source"], r["stale_steps"]["max"]) for r in pipeline["restored"]] == [("beginning", 5)]
    assert_landed_for_good(sharded, 1)
    assert sharded["restarts"] == 1  # what the script made was given away: nobody has it
    assert sharded["replicas"]["sha256"] == undisturbed("sharded")


def test_with_too_few_workers_the_lost_part_is_restored_and_all_is_saved(tmp_path):
    saving = ("--checkpoint-dir", tmp_path / "c")

    report = run(
        tmp_path / "first",
        "pipeline",
        "--fabric",
        "gloo",
        *EVERY_4,
        *saving,
        "--min-workers",
        4,
        inject=["kill:rank=1,step=5,phase=backward"],
        exit_code=1,
    )

    assert_landed(report, 1)
    assert "too few workers are left to continue at step 5" in report["_stderr"]
    assert [restored["part"] for restored in report["restored"]] == [1]
    resumed = run(
        tmp_path / "second", "pipeline", "--fabric", "gloo", *saving, "--resume", strategy="rollback", workers=3
    )
    assert resumed["outcome"] == "done"
    assert resumed["samples"] == NOTHING_LOST


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["gloo", "ulfm"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_dead_are_replaced_and_die_again(tmp_path, kind, fabric):
    deaths = [
        "kill:rank=1,step=3,phase=handover",
        "kill:rank=0,step=6,phase=rehome",
        "kill:rank=2,step=6,phase=backward",
        "kill:rank=4,step=9",
    ]

    report = run(tmp_path, kind, "--fabric", fabric, *EVERY_4, "--mirror-fraction", 0.5, "--spares", 2, inject=deaths)

    assert_landed(report, 1, 0, 2, 4)
    assert report["outcome"] == "done"
    assert report["replicas"]["identical"] is True
    assert report["samples"] == NOTHING_LOST


# -- where the memory of those who have a copy is gone, too


def lose_both(tmp_path, kind, step, await_copy, **options):
    """Kill who holds part 2 and who keeps its copy in one step, once the copy of step 8 is written; return the report."""
    phase = "backward" if kind == "sharded" else "forward"  # nobody waits for anybody between the step before and it
    words = ("--fabric", "gloo", *EVERY_4, "--mirror-fraction", 0.5, "--mirror-choice", "round-robin")
    saving = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 5 if kind == "sharded" else 6)
    awaited = "copies/part-2/step-00000008" if await_copy else "step-00000005"
    report = run(
        tmp_path,
        kind,
        *words,
        *saving,
        inject=[f"kill:rank={rank},step={step},phase={phase}" for rank in (2, 3)],
        script=("--wait-for", 9, tmp_path / "c" / awaited / "manifest.json"),
        **options,
    )
    assert_landed(report, 2, 3)
    check_trained(report, [0, 1])
    return {restored["part"]: restored for restored in report["restored"]}, report


@pytest.mark.parametrize(("kind", "step"), [("sharded", 9), pytest.param("pipeline", 10, marks=pytest.mark.soak)])
def test_a_part_that_nobody_has_in_memory_comes_from_the_copy_that_its_backup_wrote(tmp_path, kind, step):
    restored, report = lose_both(tmp_path, kind, step, await_copy=True)

    assert {part: one["source"] for part, one in restored.items()} == {2: "copy", 3: "backup"}
    ages = restored[2]["stale_steps"]
    assert ages["blocks_of_age"].keys() == {str(step - 8), str(step - 6)}
    assert ages["mean"] < step - (5 if kind == "sharded" else 6)  # of the newest checkpoint
    assert "the file that its delta standby had written" in report["_stdout"] + report["_stderr"]


def test_where_no_copy_could_be_written_it_comes_from_the_checkpoint(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "copies").write_text("a file where a directory is to be")

    restored, report = lose_both(tmp_path, "sharded", 9, await_copy=False)

    assert {part: one["source"] for part, one in restored.items()} == {2: "checkpoint", 3: "backup"}
    assert restored[2]["stale_steps"]["blocks_of_age"] == {"4": restored[2]["blocks"]}
    said = report["_stdout"] + report["_stderr"]
    assert said.count("cannot write the copy of part 2 before step 0") == 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--strategy", "rollback", *EVERY_4), "--mirror-every above 1 needs strategy partial, got rollback"),
        (("--strategy", "partial", *EVERY_4, "--mirror-fraction", 0.01), "--mirror-fraction must be above 0"),
        (
            ("--strategy", "partial", *EVERY_4, "--mirror-choice", "best"),
            "--mirror-choice must be one of priority, round-robin, random",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys, words, what):
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "2", *map(str, words), str(SCRIPT), "sharded"])

    said = capsys.readouterr().err
    assert (ended.value.code, what in said, said.count("\n")) == (2, True, 1), said


def test_a_whole_model_has_no_part_to_restore(tmp_path):
    ended = holdfast("run", "-n", 2, "--fabric", "virtual", "--strategy", "partial", SCRIPT, "whole")

    assert ended.returncode != 0
    assert "strategy partial needs a model that is split" in ended.stderr
