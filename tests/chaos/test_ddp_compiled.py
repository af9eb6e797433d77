"""``torch.compile`` over DDP on the backend: Dynamo traces the script's model, and not the process group that DDP calls."""

import re

import pytest
from jobs import assert_landed, run_report

pytestmark = pytest.mark.chaos

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

class Net(nn.Module):  # of a Sequential of torch's own layers Dynamo makes no graph, also over Gloo
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

dist.init_process_group("holdfast")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
compiled, graphs = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    compiled(torch.randn(6, 8)).pow(2).mean().backward()
    optimizer.step()
print("weights", [p.sum().item() for p in model.parameters()], "graphs", bool(graphs))
"""


def test_a_compiled_model_is_trained_and_survives_a_death(tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(SCRIPT)

    report = run_report(tmp_path, "-n", 3, "--fabric", "gloo", "--inject", "kill:rank=1,step=4", script)

    assert_landed(report, 1)
    ends = re.findall(r"weights (\[.*\]) graphs (\w+)", report["_stdout"])
    assert len(ends) == 2
    assert len({weights for weights, _ in ends}) == 1
    assert {compiled for _, compiled in ends} == {"True"}
