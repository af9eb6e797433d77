"""torch.distributed with tensors on a device whose copies lag, in real processes; see tests/support/dist_staged.py."""

import json

import pytest
import torch
import train_ddp
from dist_checks import CHECKS
from jobs import ROOT, assert_landed, exit_codes, run_report

pytestmark = pytest.mark.chaos
SCRIPT = ROOT / "tests" / "support" / "dist_staged.py"
SOME = (
    "batches_of_sends_and_receives",
    "coalesced_collectives",
    "ddp_communication_hooks",
    "every_collective_is_asynchronous",
    "fully_sharded_training",
    "functional_collectives",
    "futures_chain",
    "objects",
    "receive_from_any_source",
    "reduce_to_every_root",
    "tensors_with_gaps",
    "tensors_without_dimensions",
    "tensors_without_elements",
    "the_coalescing_manager",
)


def train(tmp_path, *options, fabric="gloo", more=()):
    """Train with three ranks; return the report, and what each rank that is left ended with."""
    report = run_report(tmp_path, "-n", 3, "--fabric", fabric, *options, SCRIPT, "train", tmp_path, *more)
    return report, {int(path.stem): torch.load(path) for path in sorted(tmp_path.glob("*.pt"))}


def check(ended, ranks, expected):
    assert sorted(ended) == ranks
    for given in ended.values():
        assert given["copies"] > 2 * train_ddp.STEPS
        assert torch.equal(given["weights"], expected)


@pytest.mark.parametrize("fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)])
def test_a_killed_rank_gives_the_bits_of_host_memory(tmp_path, fabric):
    report, ended = train(tmp_path, "--inject", "kill:rank=1,step=2,phase=backward", fabric=fabric)

    assert_landed(report, 1)
    check(ended, [0, 2], train_ddp.by_hand(3, dead=1, dies_in=2))


def test_a_device_that_is_lost_during_a_copy_ends_its_rank_alone(tmp_path):
    report, ended = train(tmp_path, more=["lost"])

    assert exit_codes(report) == {0: 0, 1: -9, 2: 0}
    (lost,) = [event for event in report["_events"] if event["event"] == "DeviceLost"]
    assert (lost["rank"], lost["what"]) == (1, "lost")
    assert lost["message"] == "CUDA error: uncorrectable ECC error encountered"
    check(ended, [0, 2], train_ddp.by_hand(3, dead=1, dies_in=2))


def test_no_wait_can_be_left_out_however_a_script_learns_that_a_collective_has_completed(tmp_path):
    run_report(tmp_path, "-n", 2, "--fabric", "gloo", SCRIPT, "waits", tmp_path)

    for rank in (0, 1):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(said) == 12
        for case, is_right in said.items():
            assert is_right == case.endswith(" nothing"), case


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(CHECKS), marks=pytest.mark.soak)], ids=["some", "all"])
def test_the_contract_of_torch_distributed_holds(tmp_path, names):
    report = run_report(tmp_path, "-n", 2, "--fabric", "gloo", SCRIPT, "checks", *names)

    lines = [line for line in report["_stdout"].splitlines() if '"check"' in line]
    assert len(lines) == 2 * len(names)
    assert not [line for line in lines if '"error"' in line]
