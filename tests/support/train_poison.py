"""A dataset with one sample that kills the process that reads it."""

import os
import signal

import torch
from torch.nn import functional as F

import holdfast

POISON = 77


class Data:
    def __len__(self):
        return 200

    def __getitem__(self, i):
        if i == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 2


if __name__ == "__main__":
    model = torch.nn.Linear(4, 2)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(Data(), batch_size=40, shuffle=False):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
