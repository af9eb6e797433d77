"""A script that takes its time: ``train_ray.py FOLDER``. Each worker writes ``FOLDER/rank-RANK`` at its first step.

Steps are slow until there is ``FOLDER/fast``, so that a test can disturb training in between.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import holdfast

STEPS = 240


def train(folder):
    torch.manual_seed(0)
    inputs, targets = torch.randn(STEPS * 8, 6), torch.randint(0, 3, (STEPS * 8,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session, fast = holdfast.Session(model, optimizer), Path(folder, "fast")
    for step in session.steps(torch.utils.data.TensorDataset(inputs, targets), batch_size=8, epochs=1):
        Path(folder, f"rank-{session.rank}").write_text(str(os.getpid()))
        if not fast.exists():
            time.sleep(0.5)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))


if __name__ == "__main__":
    train(sys.argv[1])
