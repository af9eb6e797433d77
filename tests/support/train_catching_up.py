"""A script that trains slowly while a worker is missing, so that a newcomer can follow: batch norm, clipping, schedulers.

    train_catching_up.py [flip|giver|newcomer|late MARKER]

The script changes an option of the optimizer by hand, too. With ``flip`` a bit of the first state that a newcomer receives
is wrong, as after a fault on the way. With ``giver`` the first worker that sends its state dies in the middle of it, with
``newcomer`` the first one that receives it; with ``late`` that one stops to receive for longer than the training takes.
MARKER is a file that is created then.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import holdfast

WORKERS, STEPS, FEATURES, WIDTH = 3, 80, 16, 400
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


def go_wrong(what, marker):
    """Prepare what goes wrong in the first stream of state, whichever process takes part in it."""
    from holdfast.state import catch_up, streams

    receive, send = catch_up.receive_body, streams.send_message

    def is_first():
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def receive_wrong(connection, tensors):
        tensors = list(tensors)
        receive(connection, tensors[:1])
        if is_first():
            if what == "newcomer":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "late":
                time.sleep(60.0)
            receive(connection, tensors[1:])
            max(tensors, key=len)[100] ^= 4
        else:
            receive(connection, tensors[1:])

    def send_half(connection, header, body, secrets):
        if "state" in header and is_first():
            body.take(torch.empty(body.size_bytes // 2, dtype=torch.uint8))
            connection.sendall(bytes(1000))
            os.kill(os.getpid(), signal.SIGKILL)
        send(connection, header, body, secrets)

    if what == "giver":
        streams.send_message = send_half
    else:
        catch_up.receive_body = receive_wrong


def train(**settings):
    """Train, and return the model."""
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    model = Net(WIDTH)
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
    if sys.argv[1:]:
        go_wrong(*sys.argv[1:])
    train()
