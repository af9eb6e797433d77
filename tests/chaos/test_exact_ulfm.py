"""The same bits, whatever happens: real processes over real MPI, really killed, against the torch-only reference."""

import shlex

import pytest
from exact import SCRIPT, check_decided_again, check_nothing_lost, reference_hash
from jobs import assert_landed, exit_codes, run_report

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    ("model", "optimizer", "killed", "specs"),
    [
        ("cnn", "adam", (1, 2), ["kill:rank=1,step=4,phase=backward", "kill:rank=2,step=4,phase=recovery"]),
        ("cnn", "sgd", (0, 3), ["kill:rank=0,step=13,phase=allreduce,bucket=2", "kill:rank=3,step=13,phase=optimizer"]),
    ],
)
def test_killed_workers_change_no_bit(tmp_path, model, optimizer, killed, specs):
    inject = [word for spec in specs for word in ("--inject", spec)]

    report = run_report(tmp_path, "-n", 4, *inject, SCRIPT, model, optimizer)

    check_nothing_lost(report, reference_hash(model, optimizer), [r for r in range(4) if r not in killed])
    assert_landed(report, *killed)
    assert [f["injected"] for f in report["failures"]] == [True] * len(killed)
    check_decided_again(report)
    assert all(f["detect_s"] >= 0 and f["lost_samples"] == 0 for f in report["failures"])


def test_without_recovery_a_kill_ends_the_job(tmp_path):
    """The negative control: the same fault, with recovery turned off."""
    report = run_report(
        tmp_path,
        "-n", 4, "--max-restarts", 0, "--inject", "kill:rank=1,step=3,phase=optimizer",
        SCRIPT, "mlp", "sgd", "--no-recovery",
        exit_code=1,
    )  # fmt: skip

    assert report["outcome"] == "failed"
    assert report["replicas"]["sha256"] is None


def test_restart_goes_on_from_the_newest_checkpoint_and_ends_with_the_same_bits(tmp_path):
    report = run_report(
        tmp_path,
        "-n", 4, "--strategy", "restart", "--checkpoint-dir", tmp_path / "ckpt", "--checkpoint-every", 3,
        "--inject", "kill:rank=1,step=8,phase=backward",
        "--inject", "kill:rank=0,step=9,phase=checkpoint",
        SCRIPT, "cnn", "adam",
    )  # fmt: skip

    check_nothing_lost(report, reference_hash("cnn", "adam"), [2, 3])
    assert_landed(report, 0, 1)
    first = report["failures"][0]
    assert (first["rank"], first["decision"], first["redone_steps"]) == (1, "load", 3)
    check_decided_again(report)


def test_a_sample_that_kills_whoever_reads_it_stops_the_job_and_is_named(tmp_path):
    report = run_report(tmp_path, "-n", 4, "--slices", 8, SCRIPT.with_name("train_poison.py"), exit_code=93)

    last = report["_stderr"].strip().splitlines()[-1]
    assert "slice 7 of step 1" in last
    assert last.endswith("75, 76, 77, 78, 79")
    assert list(exit_codes(report).values()).count(-9) >= 3
    assert report["steps"] == 1
    assert "slice 7 of step 1" in report["error"]["message"], "the report says why, too"


def test_too_few_workers_stop_and_the_printed_command_goes_on(tmp_path):
    report = run_report(
        tmp_path,
        "-n", 4, "--min-workers", 3, "--checkpoint-dir", tmp_path / "ckpt",
        "--inject", "kill:rank=0,step=4", "--inject", "kill:rank=2,step=6,phase=allreduce",
        SCRIPT, "cnn", "adam",
        exit_code=1,
    )  # fmt: skip
    command = next(line for line in report["_stderr"].splitlines() if "--resume" in line)
    words = shlex.split(command[command.index("holdfast run") :])[2:]
    assert_landed(report, 0, 2)

    resumed = run_report(tmp_path / "again", *[w for w in words if w != "--report" and not w.endswith("/report")])

    assert resumed["replicas"]["state_sha256"] == reference_hash("cnn", "adam")
    assert resumed["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
    assert resumed["_events"][0]["step"] == 6
