"""A script that trains twice: each session has agreements of its own, in the same job."""

from __future__ import annotations

import pytest
from jobs import exit_codes, run_report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = """
import torch
import torch.nn.functional as F

import holdfast

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, torch.arange(64) % 4)
for number in range(2):
    torch.manual_seed(number)
    model = torch.nn.Linear(8, 4)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in session.steps(data, batch_size=16, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "twice.py"
    path.write_text(SCRIPT)
    return path


def test_a_second_session_over_gloo_ends_with_the_same_bits_also_after_a_kill(script, tmp_path):
    undisturbed = run_report(tmp_path / "a", "-n", 1, "--fabric", "virtual", "--slices", 3, script)
    killed = run_report(tmp_path / "b", "-n", 3, "--fabric", "gloo", "--inject", "kill:rank=2,step=5", script)

    assert killed["outcome"] == "done"
    assert exit_codes(killed)[2] == -9
    assert killed["replicas"]["state_sha256"] == undisturbed["replicas"]["state_sha256"]
    assert killed["workers"]["ranks_finished"] == [0, 1]
