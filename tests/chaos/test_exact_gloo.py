"""The same bits, whatever happens, over Gloo: the faults of test_exact_ulfm.py and the same judge."""

import pytest
from exact import SCRIPT, check_decided_again, check_forward_lost_one_slice, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report
from train_reference import train

pytestmark = pytest.mark.chaos
MESSAGES = {"HOLDFAST_SHARED_BYTES": "0"}


def run(tmp_path, *words, kills=(), **expected):
    inject = [word for kill in kills for word in ("--inject", f"kill:{kill}")]
    return run_report(tmp_path, "--fabric", "gloo", *inject, *words, **expected)


@pytest.mark.parametrize(
    ("model", "optimizer", "killed", "kills"),
    [
        ("cnn", "adam", (0, 1, 3), ["rank=0,step=0", "rank=3,step=5,phase=allreduce,bucket=0", "rank=1,step=9,phase=optimizer"]),
        ("mlp", "adam", (0, 2, 3), ["rank=0,step=4,phase=backward", "rank=3,step=4,phase=backward", "rank=2,step=4,phase=recovery"]),
    ],
    ids=["first-step-bucket-optimizer", "two-at-once-and-in-recovery"],
)  # fmt: skip
def test_killed_workers_change_no_bit(tmp_path, model, optimizer, killed, kills):
    report = run(tmp_path, "-n", 4, SCRIPT, model, optimizer, kills=kills)

    check_nothing_lost(report, reference_hash(model, optimizer), [r for r in range(4) if r not in killed])
    assert_landed(report, *killed)
    assert [f["injected"] for f in report["failures"]] == [True] * len(killed)
    check_decided_again(report)
    assert report["restarts"] == 0


def test_a_worker_of_many_slices_that_dies_among_them_changes_no_bit(tmp_path):
    """Rank 1 dies in its backward pass; the survivor's slices are other groups than before."""
    script = ("--order", "tree", SCRIPT, "mlp", "adam", "--slices", 8)
    kills = ["rank=1,step=5,phase=backward"]

    report = run(tmp_path, "-n", 2, *script, kills=kills, env=MESSAGES)

    assert_landed(report, 1)
    _, state = train("mlp", "adam", workers=1, order="tree", slices=8)
    check_nothing_lost(report, state, [0])
    assert state != reference_hash("mlp", "adam", (), 8), "the order shows"


def test_forward_goes_on_over_the_survivors_and_lists_what_it_lost(tmp_path):
    kills = ["rank=1,step=4,phase=allreduce,bucket=0"]

    report = run(tmp_path, "-n", 4, "--strategy", "forward", SCRIPT, "mlp", "sgd", kills=kills)

    assert_landed(report, 1)
    check_forward_lost_one_slice(report)
    check_decided_again(report)


def test_when_everybody_dies_the_job_is_started_again_and_the_bits_are_the_same(tmp_path):
    """A checkpoint after every third step; step 8 is redone from 6, by those whom the launcher starts."""
    saving = ("--checkpoint-dir", tmp_path / "ckpt", "--checkpoint-every", 3)
    kills = ["rank=0,step=8", "rank=1,step=8", "rank=2,step=8"]

    report = run(tmp_path, "-n", 3, "--slices", 4, *saving, SCRIPT, "cnn", "sgd", kills=kills)

    check_nothing_lost(report, reference_hash("cnn", "sgd"), report["workers"]["ranks_finished"])
    assert report["restarts"] == 1
    killed = [e["rank"] for e in report["_events"] if e["event"] == "WorkerEnded" and e["exit_code"] == -9]
    assert sorted(killed) == [0, 1, 2]
    (restarted,) = [e for e in report["_events"] if e["event"] == "JobRestarted"]
    assert restarted["step"] < 9
