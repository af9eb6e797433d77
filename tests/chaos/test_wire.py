"""Gradients in 16 bits on the wire: killed workers change no bit of a result that has bits of its own."""

import pytest
from exact import SCRIPT, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report
from train_reference import train

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("order", ["fold", "tree-bf16-2"])
def test_killed_workers_change_no_bit(tmp_path, order):
    kills = [
        word
        for kill in ("rank=2,step=3,phase=allreduce,bucket=0", "rank=0,step=7")
        for word in ("--inject", f"kill:{kill}")
    ]
    env = {"HOLDFAST_SHARED_BYTES": "0", "HOLDFAST_BUCKET_BYTES": "4096"}

    report = run_report(
        tmp_path,
        "-n",
        4,
        "--fabric",
        "gloo",
        "--wire",
        "bf16",
        "--order",
        order,
        *kills,
        SCRIPT,
        "mlp",
        "adam",
        env=env,
    )

    expected = train("mlp", "adam", workers=4, wire="bf16", order=order)[1]
    check_nothing_lost(report, expected, [1, 3])
    assert_landed(report, 0, 2)
    assert report["order"] == ("fold-bf16" if order == "fold" else order)
    assert expected != reference_hash("mlp", "adam"), "the setting does something"
