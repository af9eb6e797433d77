"""Models that are not in host memory, with real workers that are killed; see tests/support/lagging.py and elsewhere.py."""

from pathlib import Path

import pytest
from exact import SCRIPT, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report

pytestmark = pytest.mark.chaos
ELSEWHERE = Path(__file__).parents[1] / "support" / "train_elsewhere.py"
KILLS = ("--inject", "kill:rank=1,step=4,phase=backward", "--inject", "kill:rank=0,step=6,phase=allreduce,bucket=1")


def test_killed_workers_change_no_bit_where_copies_lag(tmp_path):
    report = run_report(tmp_path, "--fabric", "gloo", "-n", 3, *KILLS, SCRIPT, "cnn", "adam", "--lagging", 1)

    check_nothing_lost(report, reference_hash("cnn", "adam"), [2])
    assert_landed(report, 0, 1)


def test_a_copy_that_never_ends_is_the_hang_of_its_worker_alone(tmp_path):
    """The others wait for this worker in the all-reduce; it waits for its device, which does not count as waiting."""
    script = (SCRIPT, "mlp", "sgd", "--lagging", 1, "--stuck", 2)

    report = run_report(tmp_path, "--fabric", "gloo", "-n", 3, "--hang-timeout", 2, *script)

    check_nothing_lost(report, reference_hash("mlp", "sgd"), [0, 1])
    assert_landed(report, 2)
    assert [(event["rank"]) for event in report["_events"] if event["event"] == "WorkerFenced"] == [2]
    (failure,) = report["failures"]
    assert failure["kind"] == "hang"
    assert failure["silent_s"] >= 2


def test_without_the_wait_for_terms_the_bits_are_others(tmp_path):
    """The negative control: the same training, in which workers add terms that may not have arrived."""
    script = (SCRIPT, "mlp", "sgd", "--lagging", 1, "--skips", "COPIED")

    report = run_report(tmp_path, "--fabric", "gloo", "-n", 2, "--guard", "off", *script)

    assert report["replicas"]["state_sha256"] != reference_hash("mlp", "sgd")


@pytest.mark.parametrize(
    ("kind", "more"),
    [("replicated", ()), ("replicated", ("--respawn",)), ("sharded", ()), ("pipeline", ())],
    ids=["replicated", "respawn", "sharded", "pipeline"],
)
def test_with_real_workers_a_model_stays_on_its_device_when_one_dies_and_when_one_joins(tmp_path, kind, more):
    pause = 1.0 if more else 0.0
    kill = ("--inject", "kill:rank=1,step=1,phase=allreduce,bucket=0")

    report = run_report(tmp_path, "--fabric", "gloo", "-n", 3, *more, *kill, ELSEWHERE, pause, kind)

    assert_landed(report, 1)
    assert report["workers"]["ranks_finished"] == ([0, 2, 3] if more else [0, 2])
    assert report["samples"] == {"planned": 64, "committed": 64, "lost": 0, "repeated": 0}
