"""A tiny training of many steps: ``train.py STEPS``. The pace is that of the job, not of the model."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import holdfast

SAMPLES, BATCH, FEATURES = 4096, 32, 16


def main(steps: int) -> None:
    """Train for so many steps, whole epochs of 128."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, 4, generator=generator)).argmax(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session = holdfast.Session(model, optimizer)
    for step in session.steps(TensorDataset(x, y), batch_size=BATCH, epochs=-(-steps * BATCH // SAMPLES)):
        for features, labels in step:
            loss = F.cross_entropy(model(features), labels)
            step.backward(loss)
            step.log(loss=loss)


if __name__ == "__main__":
    main(int(sys.argv[1]))
