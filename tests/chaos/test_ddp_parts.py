"""Jobs whose ranks hold parts of a state: a death of one is never taken for that of a replica."""

import json

import pytest
from jobs import ROOT, assert_landed, exit_codes, run_report

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "lost_parts.py"
JOB_S = 150
AGAIN = "start again from a checkpoint (holdfast run --max-restarts N does so by itself)"


def run(folder, play, *options, exit_code=0, **env):
    report = run_report(
        folder, "-n", 3, "--fabric", "gloo", *options, SCRIPT, play, folder, exit_code=exit_code, timeout=JOB_S, env=env
    )
    said = {}
    for path in folder.glob("rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            said.setdefault(line["name"], {})[int(path.stem[5:])] = line
    return report, said


def test_a_layer_of_a_script_that_is_split_over_ranks_is_never_scaled(tmp_path):
    report, said = run(tmp_path, "tensor_parallel")

    assert_landed(report, 1)
    for rank in (0, 2):
        assert "all_reduce(SUM) did not complete: rank 1 has failed; alive: 0, 2. " in said["evaluation"][rank]["says"]
        assert AGAIN in said["evaluation"][rank]["says"]
    assert report["seats_filled"] == []
    assert "multiplied" not in report["_stdout"]


def test_a_sum_of_ddp_that_continues_does_not_hide_the_death_from_a_layer_beside_it(tmp_path):
    _, said = run(tmp_path, "tensor_parallel_after_ddp")

    for rank in (0, 2):
        assert said["ddp"][rank]["alive"] == [0, 2]
        assert said["ddp"][rank]["grad"] == pytest.approx(3.0), "a mean over the survivors"
        assert "features or activations of rank 1 are lost" in said["layer"][rank]["says"]


def test_no_feature_of_a_survivor_stands_in_for_those_of_the_dead(tmp_path):
    _, said = run(tmp_path, "contrastive")

    assert sorted(said) == ["by_hand, again", "by_hand, first", "by_torch, again", "by_torch, first"]
    for lines in said.values():
        assert sorted(lines) == [0, 2]
        for line in lines.values():
            assert "all_gather did not complete" in line["says"]
            assert "The tensors carry gradients, and the features or activations of rank 1 are lost" in line["says"]
            assert "parameter shards" not in line["says"]


def test_with_a_sharded_optimizer_the_error_comes_before_any_update(tmp_path):
    _, said = run(tmp_path, "zero", STEPS="2")

    lines = said["step"]
    assert sorted(lines) == [0, 2]
    for line in lines.values():
        assert line["step"] == 2
        assert line["same"]
        assert "Rank 1 held a part of the optimizer's state, and this step has updated no parameter" in line["says"]
    assert lines[0]["weights"] == lines[2]["weights"]


def test_gradients_that_a_hook_compresses_or_sums_by_itself_stay_means_over_the_survivors(tmp_path):
    report, said = run(tmp_path, "low_rank")

    assert_landed(report, 1)
    for rank in (0, 2):
        for step in range(6):
            line = said[f"step {step}"][rank]
            assert line["alive"] == (3 if step < 4 else 2)
            assert line["grads"] == pytest.approx([3.0 if step < 4 else 3.5] * 64, rel=1e-4)
        for hook in ("own hook of DDP", "own hook of a parameter"):
            assert said[hook][rank]["grads"] == pytest.approx([3.5] * 64)


def test_with_raise_a_script_hears_once_of_a_death_in_a_sum_of_ddp(tmp_path):
    report, said = run(tmp_path, "told", "--empty-seats", "raise")

    assert_landed(report, 1)
    for rank in (0, 2):
        assert said["ddp"][rank]["alive"] == [0, 2]
        assert "rank 1 has failed; alive: 0, 2. --empty-seats is raise" in said["first"][rank]["says"]
        assert (said["again"][rank]["says"], said["again"][rank]["figure"]) == ("", 2.0)


def test_a_job_that_lost_a_shard_starts_again(tmp_path):
    report, said = run(tmp_path, "fsdp", "--max-restarts", 1)

    assert report["restarts"] == 1
    assert exit_codes(report)
    assert len(said["trained"]) >= 2


def test_without_restarts_it_ends_with_what_was_lost_and_what_to_do(tmp_path):
    report, said = run(tmp_path, "fsdp", "--max-restarts", 0, exit_code=1)

    assert said == {}
    assert "lost rank 1; ranks 0, 2 are left" in report["_stderr"]
    last = report["_stderr"].strip().splitlines()[-1]
    assert (
        "the job was lost once, and --max-restarts is 0: all_gather_into_tensor did not complete: rank 1 has failed"
        in last
    )
    assert f"Rank 1 held a shard of the state: {AGAIN}, or give HSDP a second replica (lost_parts.py, line" in last


UNEVEN = """
import os, sys, signal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from holdfast.distributed import is_lead
dist.init_process_group("holdfast")
me = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with model.join(divide_by_initial_world_size=sys.argv[1] == "initial"):
    for step in range(20 - 4 * me):
        if me == 0 and step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)  # the others wait in join's count, those without data in its answer
        optimizer.zero_grad()
        model(torch.full((2, 4), me + 1.0)).sum().backward()
        optimizer.step()
if is_lead() or me != 0:
    print("weights", [p.tolist() for p in model.parameters()])
"""


@pytest.mark.parametrize(("divides_by", "step"), [("initial", 14), ("effective", 18)])
def test_ranks_that_have_run_out_of_data_and_those_that_have_not_survive_a_death(tmp_path, divides_by, step):
    """Of three ranks with 20, 16 and 12 steps, rank 0 dies before a step."""
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)

    report = run_report(tmp_path, "-n", 3, "--fabric", "gloo", script, divides_by, step, timeout=JOB_S)

    assert exit_codes(report) == {0: -9, 1: 0, 2: 0}
    lines = report["_stdout"].splitlines()
    weights = {line.split("]", 1)[1] for line in lines if "weights" in line}
    assert len(weights) == 1
    assert sum("weights" in line for line in lines) == 2
