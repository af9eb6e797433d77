"""``holdfast run`` of a script that speaks to torch.distributed: what is printed and written is what is known."""

import pytest
from jobs import exit_codes, run_report

BEGIN = """
import torch
import torch.distributed as dist
dist.init_process_group("holdfast")
"""

TRAIN = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""

LEAD = """
import holdfast.distributed
if holdfast.distributed.is_lead():
    print("saved")
"""

UNKNOWN = ("slices", "split", "seed", "steps_planned", "num_buckets", "parameters", "lost", "checkpoints", "checkpoint")


def assert_only_what_is_known(report):
    assert report["api"] == "torch.distributed"
    assert {name: report[name] for name in UNKNOWN} == dict.fromkeys(UNKNOWN)
    assert set(report["samples"].values()) == set(report["replicas"].values()) == {None}
    said = report["_stdout"].partition("\nreport ")[0]  # the last line names a folder
    for word in ("bits", "sample", "sha256", "worker"):
        assert word not in said


@pytest.mark.chaos
def test_a_ddp_job_that_loses_a_rank_ends_well_and_claims_nothing_more(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEGIN + TRAIN + LEAD)

    report = run_report(tmp_path, "-n", 3, "--inject", "kill:rank=0,step=3,phase=allreduce", script, page=True)

    assert exit_codes(report) == {0: -9, 1: 0, 2: 0}
    assert_only_what_is_known(report)
    assert report["steps"] == 8
    (failure,) = report["failures"]
    assert (failure["rank"], failure["step"], failure["decision"]) == (0, 3, "continue")
    assert failure["lost_samples"] is None
    assert "holdfast: 3 ranks: torch.distributed; all-reduces of DDP continue over the survivors\n" in report["_stderr"]
    assert "holdfast: lost rank 0; step 3 continues with ranks 1, 2\n" in report["_stderr"]
    said = report["_stdout"]
    assert "Rank 0 of 3 was killed at step 3; training resumed after " in said
    assert "The two survivors finished.\n" in said
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Only the script knows" in page


@pytest.mark.chaos
def test_a_script_without_ddp_ends_well_and_says_so(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(BEGIN + "dist.all_reduce(torch.ones(2))\n")

    report = run_report(tmp_path, "-n", 2, script)

    assert_only_what_is_known(report)
    assert (report["steps"], report["failures"]) == (0, [])
    said = "2 ranks ran, without a step of DistributedDataParallel, and none was lost. Both finished.\n"
    assert said in report["_stdout"]
