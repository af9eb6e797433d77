"""A small training in which one worker has another platform: ``train_kinds.py RANK VARIABLE=VALUE [--wait]``.

With ``--wait`` the other workers wait at step 3 until that worker, a newcomer, has been refused.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__" and os.environ["RANK"] == sys.argv[1]:
    name, _, value = sys.argv[2].partition("=")
    os.environ[name] = value  # read by torch and OpenMP when they are loaded

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.records.paths import records_path

STEPS = 6
LIMIT_S = 120.0


def train(before_step=lambda session, number: None, **settings) -> holdfast.Session:
    """Train to the end; ``before_step`` is called with the session and each step's number."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 4))
    dataset = TensorDataset(torch.randn(48, 9), torch.arange(48) % 4)
    session = holdfast.Session(model, torch.optim.Adam(model.parameters()), **settings)
    for step in session.steps(dataset, batch_size=8):
        before_step(session, step.number)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    return session


def wait_for_refusal(session, number):
    """Wait at step 3 until the newcomer has recorded that it was refused."""
    path = records_path(Path(os.environ["HOLDFAST_RUN_DIR"]), sys.argv[1])
    ends_s = time.monotonic() + LIMIT_S
    with session.busy():
        while number == 3 and not (path.exists() and "WorkerRefused" in path.read_text()):
            if time.monotonic() > ends_s:
                sys.exit("the newcomer was not refused")
            time.sleep(0.05)


if __name__ == "__main__":
    train(*([wait_for_refusal] if "--wait" in sys.argv else []))
