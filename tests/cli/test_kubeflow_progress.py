"""`holdfast run` in a TrainJob of Kubeflow reports its progress."""

import json

import pytest
from jobs import holdfast
from trainer_server import TrainerServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

SCRIPT = """
import torch
from torch.utils.data import TensorDataset
import holdfast

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(TensorDataset(torch.ones(8, 2)), 4, epochs=3):
    for (x,) in step:
        step.backward(model(x).sum())
"""


def train(folder, name, env):
    """Train; return the sha256 of the state and what the launcher said."""
    words = ["--fabric", "virtual", "-n", 2, "--no-page", "--report", name, "train.py"]
    done = holdfast("run", *words, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / name / "report.json").read_text())
    assert report["steps"] == 6
    return report["replicas"]["state_sha256"], done.stderr


def test_a_job_reports_its_progress_and_ends_with_the_same_bits(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with TrainerServer(tmp_path / "server") as server:
        reported, said = train(tmp_path, "reported", server.env)
    plain, _ = train(tmp_path, "plain", {})

    assert reported == plain
    last = server.taken[-1]
    assert last["progressPercentage"] == 100
    assert {"name": "step", "value": "6"} in last["metrics"]
    assert "loss" in {each["name"] for each in last["metrics"]}
    assert server.refused == 0
    assert "Kubeflow" not in said
    assert "first-token" not in said
