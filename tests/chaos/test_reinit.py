"""Applications that are built again after a failure: real processes, really killed, and the hash of the reference."""

from pathlib import Path

import pytest
from exact import check_nothing_lost, reference_hash
from jobs import assert_landed, exit_codes, run_report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_reinit.py"
SPLIT_SCRIPT = SCRIPT.with_name("train_split.py")
LIMIT_S = 300


def run(tmp_path, *words, inject=(), die=(), script=()):
    """A report of the job, and its undisturbed hash."""
    faults = [word for spec in inject for word in ("--inject", f"kill:{spec}")]
    deaths = [word for death in die for word in ("--die", death)]
    return run_report(
        tmp_path, "--strategy", "reinit", *words, *faults, SCRIPT, *deaths, *script, timeout=LIMIT_S
    )  # fmt: skip


def check(report, survivors, *, applications):
    """Nothing was lost, not a bit; old applications were let go; the lead has built so many."""
    state = reference_hash("cnn", "adam")
    check_nothing_lost(report, state, survivors)
    assert f"state {state} after {applications} applications" in report["_stdout"] + report["_stderr"]
    assert "an old model is still there" not in report["_stdout"] + report["_stderr"]


def test_survivors_build_the_application_again_though_one_dies_while_it_does_and_one_while_it_loads(tmp_path):
    report = run(
        tmp_path, "-n", 4, "--reinit-from", "root", inject=["rank=0,step=3,phase=optimizer"], die=["build:2", "load:3"]
    )  # fmt: skip

    assert_landed(report, 0, 2, 3)
    check(report, [1], applications=len(report["reinitialised"]) + 1)
    assert {r["form"] for r in report["reinitialised"]} == {"survivors"}
    assert {r["source"] for r in report["reinitialised"]} == {"root"}
    assert {f["decision"] for f in report["failures"]} == {"reinit"}
    assert all(r[part] > 0 for r in report["reinitialised"] for part in ("snapshot_s", "rebuild_s", "load_s"))


def test_new_workers_build_the_application_once_and_build_it_again_with_the_others(tmp_path):
    report = run(
        tmp_path, "-n", 2, "--fabric", "gloo", "--respawn", "--max-respawns", 1,
        inject=["rank=0,step=1", "rank=1,step=13"], script=["--await-at", 5],
    )  # fmt: skip

    assert exit_codes(report) == {0: -9, 1: -9, 2: 0}
    assert [joining["rank"] for joining in report["joined"]] == [2]
    check(report, [2], applications=2)


def test_without_the_optimizers_state_in_the_snapshot_the_bits_are_others(tmp_path):
    """The negative control: the hash sees what a snapshot lacks."""
    report = run(tmp_path, "-n", 2, inject=["rank=0,step=3"], script=["--forget"])

    assert_landed(report, 0)
    assert report["replicas"]["state_sha256"] != reference_hash("cnn", "adam")


@pytest.mark.soak
def test_who_keeps_the_old_model_is_found_out(tmp_path):
    """The control: otherwise nobody would know whether the check for old models finds any."""
    report = run(tmp_path, "-n", 2, inject=["rank=0,step=3"], script=["--leak"])

    assert "an old model is still there" in report["_stdout"] + report["_stderr"]


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
@pytest.mark.parametrize("source", ["own", "root", "checkpoint"])
@pytest.mark.parametrize("phase", ["forward", "backward", "allreduce", "optimizer", "checkpoint"])
def test_the_bits_are_the_same_wherever_the_fault_strikes(tmp_path, fabric, source, phase):
    report = run(
        tmp_path, "-n", 4, "--fabric", fabric, "--reinit-from", source,
        "--checkpoint-dir", tmp_path / "ckpt", "--checkpoint-every", 3,
        inject=[f"rank=0,step={9 if phase == 'checkpoint' else 8},phase={phase}", "rank=2,step=11"],
    )  # fmt: skip

    assert_landed(report, 0, 2)
    check(report, [1, 3], applications=3)
    assert report["reinitialised"][0]["source"] == source


@pytest.mark.soak
def test_spares_fill_the_places_of_the_dead(tmp_path):
    report = run(tmp_path, "-n", 3, "--spares", 1, inject=["rank=0,step=3", "rank=1,step=5"])

    check(report, [2, 3], applications=3)
    assert [r["form"] for r in report["reinitialised"]] == ["replaced", "survivors"]


@pytest.mark.parametrize("kind", ["pipeline", pytest.param("sharded", marks=pytest.mark.soak)])
def test_a_split_model_is_built_again_by_those_left_and_goes_on_from_the_checkpoint(tmp_path, kind):
    report = run_report(
        tmp_path, "-n", 4, "--strategy", "reinit", "--reinit-from", "checkpoint", "--checkpoint-dir", tmp_path / "saved",
        "--checkpoint-every", 3, "--inject", "kill:rank=1,step=8", SPLIT_SCRIPT, kind, timeout=LIMIT_S,
    )  # fmt: skip
    undisturbed = run_report(tmp_path, "-n", 2, SPLIT_SCRIPT, kind, timeout=LIMIT_S)

    assert_landed(report, 1)
    assert undisturbed["replicas"]["state_sha256"] == report["replicas"]["state_sha256"]
    assert report["samples"] == undisturbed["samples"]
    assert report["workers"]["ranks_finished"] == [0, 2, 3]
    assert [(r["source"], r["form"]) for r in report["reinitialised"]] == [("checkpoint", "survivors")]
    (failure,) = report["failures"]
    assert (failure["decision"], failure["redone_steps"]) == ("reinit", 3), "from step 6 to the one in progress"
