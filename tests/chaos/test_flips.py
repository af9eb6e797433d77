"""The same flips on real workers and on virtual ones: the same values are altered, and every worker ends with the same bits."""

from pathlib import Path

import pytest
from exact import SCRIPT, reference_hash
from jobs import assert_landed, run_report

pytestmark = pytest.mark.chaos

SPLIT = Path(__file__).parents[1] / "support" / "train_split.py"

IN_THE_SUM = [
    "flip:rank=1,step=1,target=activations,at=3,count=3",
    "flip:rank=2,step=2,target=message,bucket=1,count=3,bits=exponent,finite",
    "flip:rank=3,step=3,target=gradients,at=5.weight,percent=1,scale=-2",
]
AT_ONE = [
    "flip:rank=1,step=4,target=weights,count=5,bits=mantissa",
    "flip:rank=0,step=5,target=optimizer,percent=1,bits=exponent,finite",
]
OF_PARTS = [
    "flip:rank=1,step=1,target=activations,count=3",
    "flip:rank=2,step=2,target=message,count=3,bits=mantissa",
    "flip:rank=3,step=3,target=gradients,scale=-2",
    *AT_ONE,
]


def run(tmp_path, fabric, specs, *words, guard="off", exit_code=1):
    inject = [word for spec in specs for word in ("--inject", spec)]
    options = ("-n", 4, "--fabric", fabric, "--guard", guard, *inject)
    return run_report(tmp_path, *options, *words, exit_code=exit_code)


def ends(report):
    """By worker, what it ended with."""
    return {e["rank"]: (e["sha256"], e["state_sha256"]) for e in report["_events"] if e["event"] == "Finished"}


def flips(report):
    return {flip["fault"]: {**flip, "t_s": None} for flip in report["flips"]}


def test_real_workers_are_altered_as_virtual_ones_are(tmp_path):
    job = ([*IN_THE_SUM, *AT_ONE, "kill:rank=2,step=6"], SCRIPT, "cnn", "adam")

    virtual, report = run(tmp_path / "virtual", "virtual", *job), run(tmp_path / "real", "gloo", *job)

    assert_landed(report, 2)
    assert report["faults_not_fired"] == []
    assert flips(report) == flips(virtual)
    assert [flip["count"] for flip in report["flips"]] == [3, 3, 51, 5, 105]
    assert ends(report) == ends(virtual)
    assert len(set(ends(report).values())) == 3, "two that were altered, and one that was not"
    assert report["replicas"]["identical"] is False
    assert "training is complete, but the replicas hold different weights (" in report["_stderr"]


def test_what_goes_into_the_sum_leaves_replicas_equal_and_wrong(tmp_path):
    report = run(tmp_path, "gloo", IN_THE_SUM, SCRIPT, "cnn", "adam", guard="stop", exit_code=0)

    assert report["replicas"]["identical"] is True
    assert report["replicas"]["state_sha256"] != reference_hash("cnn", "adam")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "specs", "code", "different"),
    [("pipeline", [*OF_PARTS, "flip:rank=0,step=6,target=handover,percent=9"], 0, 1), ("sharded", OF_PARTS, 1, 3)],
)
def test_parts_of_split_models_are_altered_as_virtual_ones_are(tmp_path, kind, specs, code, different):
    """A stage has one holder, so its replicas cannot differ; those of a shard's holders do."""
    (tmp_path / "virtual").mkdir()
    expected = run(tmp_path / "virtual", "virtual", specs, SPLIT, kind, exit_code=code)

    report = run(tmp_path, "gloo", specs, SPLIT, kind, exit_code=code)

    assert report["faults_not_fired"] == []
    assert flips(report) == flips(expected)
    assert ends(report) == ends(expected)
    assert len(set(ends(report).values())) == different
