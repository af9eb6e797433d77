"""A script that trains slowly while a worker is missing, so that a newcomer can follow: batch norm, clipping, schedulers.

    train_catching_up.py [--wide] [--flip] [--state FILE]

The learning rate also changes by hand. ``--wide`` adds a large layer, and ``--flip`` flips a bit of the first state that a
newcomer receives, as a faulty network card would.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import holdfast

WORKERS, STEPS, FEATURES = 3, 60, 16
PAUSE_S = 0.12


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)
        )
        self.last = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean()
        return self.last(torch.relu(self.layers(x)))


def flip_first_state():
    """Let this worker receive one wrong bit, if it is a newcomer."""
    from holdfast.state import catch_up

    receive = catch_up.receive_body

    def receive_wrong(connection, tensors):
        receive(connection, tensors)
        catch_up.receive_body = receive
        max(tensors, key=len)[100] ^= 4

    catch_up.receive_body = receive_wrong


def train(*, wide=False, **settings):
    """Train, and return the model."""
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    model = Net(1200 if wide else 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    session = holdfast.Session(
        model, optimizer, scheduler=scheduler, clip_grad_norm=0.5, average=average, seed=5, **settings
    )
    x = torch.randn(STEPS * 12, FEATURES, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    for step in session.steps(data, batch_size=12):
        for xs, ys in step:
            step.backward(nn.functional.mse_loss(model(xs), ys))
        if session.world_size < WORKERS and settings.get("workers") is None:
            time.sleep(PAUSE_S)
        if step.number % 7 == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step.number
    return model


if __name__ == "__main__":
    if "--flip" in sys.argv:
        flip_first_state()
    train(wide="--wide" in sys.argv)
