"""A rank of torch.distributed whose script ends, or calls something else, while the others wait for it in a collective."""

import pytest
from jobs import exit_codes, run_report

pytestmark = pytest.mark.chaos

SCRIPT = """
import pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how, folder = sys.argv[1], pathlib.Path(sys.argv[2])
dist.init_process_group("holdfast")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = {"shorter": 6 - min(rank, 1), "barrier": 6 - rank // 2}.get(how, 6)
for step in range(batches):
    if how == "late" and rank == 0 and step == 4:
        time.sleep(8)  # it evaluates, and the others wait
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
(folder / f"own-{rank}").touch()
if how == "barrier":
    dist.barrier()
if how == "late" and rank == 1:
    time.sleep(8)  # it saves, and the others have ended their scripts
print(f"rank {rank} is through", flush=True)
"""


def run(folder, how, exit_code):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    # so short that a rank which is done would be taken for stuck after a minute
    report = run_report(
        folder, "-n", 3, "--fabric", "gloo", "--hang-timeout", 1, script, how, folder, exit_code=exit_code
    )
    assert not {e["event"] for e in report["_events"]} & {"WorkerFenced", "JobRestarted"}, (
        "a rank that is done was ended"
    )
    return report


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shorter", "ranks 1 and 2 have ended their scripts after 5 steps; rank 0 waits for them in all_reduce(SUM)"),
        ("barrier", "the ranks call different collectives as number"),
    ],
)
def test_the_others_end_within_seconds_and_say_why(tmp_path, how, message):
    report = run(tmp_path, how, exit_code=93)

    last = report["_stderr"].splitlines()[-1]
    assert message in last
    assert "(train.py, line 17)" in last, "the line at which they wait"
    assert "uneven data" in last
    assert "model.join()" in last or how == "barrier"
    assert (tmp_path / "own-2").exists(), "what ranks have written stays"


def test_ranks_that_are_late_for_a_collective_or_for_the_end_are_waited_for(tmp_path):
    report = run(tmp_path, "late", exit_code=0)

    assert exit_codes(report) == {0: 0, 1: 0, 2: 0}
    kinds = [e["event"] for e in report["_events"]]
    assert kinds.count("ScriptEnded") == 3
    whats = {e["what"] for e in report["_events"] if e["event"] == "CollectiveAwaited"}
    assert whats == {"all_reduce(SUM)", ""}, "the wait was published, and its end"
