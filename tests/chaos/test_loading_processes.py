"""Processes that load data: one that the system ends in a DDP script, and one that imports a script without a guard."""

import re

import pytest
from jobs import holdfast, run_report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info
import holdfast.distributed

rank = int(os.environ["RANK"])

class Hungry(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        if str(rank) in sys.argv[1:] and get_worker_info().id == 1 and i > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), float(i))

def main():
    dist.init_process_group("holdfast")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = Hungry()
    for x in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    print("weights", [p.detach().sum().item() for p in model.parameters()])

if __name__ == "__main__":
    main()
"""
LINE = (
    "A process that loads data was killed, most often for want of memory; give the job more, or set num_workers lower"
)


def run(tmp_path, *ranks, exit_code):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return run_report(tmp_path, "-n", 3, "--fabric", "gloo", script, *ranks, exit_code=exit_code)


def test_the_others_continue_without_its_rank(tmp_path):
    report = run(tmp_path, 1, exit_code=0)

    assert re.search(
        rf"\[1\] holdfast: {LINE} \(train\.py, line \d+\); this rank ends", report["_stdout"] + report["_stderr"]
    )
    assert "Traceback" not in report["_stderr"]
    assert report["workers"]["ranks_finished"] == [0, 2]
    assert [failure["rank"] for failure in report["failures"]] == [1]
    assert len(set(re.findall(r"weights (\[.*\])", report["_stdout"]))) == 1


def test_where_every_rank_loses_its_own_the_job_ends_with_one_line_and_may_be_tried_again(tmp_path):
    report = run(tmp_path, 0, 1, 2, exit_code=1)

    assert LINE in report["_stderr"]
    assert "Traceback" not in report["_stderr"]


BARE = """
import torch, holdfast
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(24, 4))
model, optimizer, loader = holdfast.prepare(
    model, optimizer, DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn")
)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
print("trained")
"""


def test_a_script_without_a_guard_whose_loading_process_imports_it_ends_with_what_to_do(tmp_path):
    """The process has the worker's environment: it would connect as the same rank, and both would wait."""
    script = tmp_path / "bare.py"
    script.write_text(BARE)

    done = holdfast("run", "-n", 2, "--fabric", "gloo", script)

    assert done.returncode == 93
    assert "this process was started by the script of a worker, imports the script again" in done.stdout + done.stderr
    assert 'what trains must stand under `if __name__ == "__main__":`' in done.stderr
    assert "are restarted" not in done.stdout + done.stderr
    assert "trained" not in done.stdout


BARE_DDP = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("holdfast")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for (x,) in DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8, num_workers=1, multiprocessing_context="spawn"):
    model(x).pow(2).mean().backward()
print("trained")
"""


def test_such_a_ddp_script_is_at_fault_itself_and_no_rank_ends_in_its_place(tmp_path):
    script = tmp_path / "bare.py"
    script.write_text(BARE_DDP)

    done = holdfast("run", "-n", 2, "--fabric", "gloo", script)

    assert done.returncode == 93
    assert "this process was started by the script of a worker, imports the script again" in done.stdout + done.stderr
    assert "the others continue" not in done.stdout + done.stderr
    assert "trained" not in done.stdout
