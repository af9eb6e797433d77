"""A session that torchrun starts: several processes are refused before they save anything, one process trains."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jobs import clean_env

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

SCRIPT = """
import torch, holdfast
from torch.utils.data import TensorDataset

model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint_dir="saved", checkpoint_every=1)
for step in session.steps(TensorDataset(torch.ones(4, 2)), 2):
    for (x,) in step:
        step.backward(model(x).sum())
"""


def torchrun(folder, processes):
    """Run the script in so many processes."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, "train.py"], cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=120, check=False
    )


def test_two_processes_are_refused_in_one_line_and_save_nothing(tmp_path):
    done = torchrun(tmp_path, 2)

    said = {line for line in done.stderr.splitlines() if "errors.ConfigError: " in line}
    assert done.returncode != 0
    assert len(said) == 1, done.stderr
    assert "WORLD_SIZE=2 (torchrun) says that this process is one of several" in said.pop()
    assert not (tmp_path / "saved").exists()


def test_one_process_trains_and_saves(tmp_path):
    done = torchrun(tmp_path, 1)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").is_dir()
