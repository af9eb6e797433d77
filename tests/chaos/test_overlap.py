"""``--overlap-optimizer`` under real kills: what was updated before its step was closed is taken back to the bit."""

import pytest
from exact import SCRIPT, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report

pytestmark = pytest.mark.chaos

BETWEEN_UPDATES = "kill:rank=1,step=5,phase=allreduce,bucket=0"
"""Bucket 0 has its sum, and is being updated by then; bucket 1 has none."""


@pytest.mark.parametrize(
    ("fabric", "words"),
    [("ulfm", ()), pytest.param("gloo", ("--guard", "heal"), marks=pytest.mark.soak)],
    ids=["ulfm", "gloo-heal"],
)
def test_a_worker_that_dies_between_two_updates_changes_no_bit(tmp_path, fabric, words):
    job = ("-n", 3, "--slices", 4, "--fabric", fabric, "--overlap-optimizer", *words)
    faults = ("--inject", BETWEEN_UPDATES, "--inject", "kill:rank=0,step=9,phase=allreduce,bucket=2")

    report = run_report(tmp_path, *job, *faults, SCRIPT, "cnn", "adam")

    check_nothing_lost(report, reference_hash("cnn", "adam"), [2])
    assert_landed(report, 0, 1)
    assert [(said["rank"], said["undone"]) for said in report["optimizer_overlap"]] == [(2, 1 + 3)]
    assert report["optimizer_overlap"][0]["copy_bytes"] > 3 * 4 * report["parameters"], (
        "Adam keeps two numbers for each"
    )


def test_without_the_undo_the_bits_are_others(tmp_path):
    """The negative control."""
    job = ("-n", 2, "--slices", 4, "--overlap-optimizer", "--inject", BETWEEN_UPDATES)

    report = run_report(tmp_path, *job, SCRIPT, "cnn", "adam", "--no-undo")

    assert_landed(report, 1)
    assert report["samples"]["committed"] == 406
    assert report["replicas"]["state_sha256"] != reference_hash("cnn", "adam")


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["restart", "forward"])
def test_other_strategies_end_as_with_the_default(tmp_path, strategy):
    def run(name, *words):
        saving = ("--checkpoint-dir", tmp_path / name / "ckpt", "--checkpoint-every", 3) * (strategy == "restart")
        job = ("-n", 4, "--strategy", strategy, *saving, *words, "--inject", BETWEEN_UPDATES)
        return run_report(tmp_path / name, *job, SCRIPT, "cnn", "sgd")

    eager, lazy = run("eager", "--overlap-optimizer"), run("lazy")

    assert_landed(eager, 1)
    assert eager["replicas"] == lazy["replicas"]
    assert eager["replicas"]["identical"] is True
    assert eager["samples"] == lazy["samples"]


@pytest.mark.soak
def test_an_application_that_is_built_again_begins_before_the_step(tmp_path):
    job = ("-n", 3, "--slices", 4, "--strategy", "reinit", "--overlap-optimizer", "--inject", BETWEEN_UPDATES)

    report = run_report(tmp_path, *job, SCRIPT.with_name("train_reinit.py"), timeout=300)

    check_nothing_lost(report, reference_hash("cnn", "adam"), [0, 2])
    assert_landed(report, 1)
    assert [(said["rank"], said["undone"]) for said in report["optimizer_overlap"]] == [(0, 1), (2, 1)]
