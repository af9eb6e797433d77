"""A small training with one source of irreproducible bits, or none: ``train_broken.py NAME``; see :data:`BREAKS`."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import holdfast


class Unseeded(nn.Module):
    """Draws from its own generator, seeded by the system."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator()
        self.own.seed()

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.own)


class System(nn.Module):
    """Draws from the system's random source."""

    def forward(self, x):
        return x * (1 + int.from_bytes(os.urandom(4), "little") / 2**32)


class Sets(nn.Module):
    """Adds in the iteration order of a set of names."""

    def __init__(self):
        super().__init__()
        self.scales = {f"scale {i}": 1 / 3**i for i in range(12)}

    def forward(self, x):
        for name in set(self.scales):
            x = x * (1 + self.scales[name]) + self.scales[name]
        return x


class Threads(nn.Module):
    """Depends on the number of threads."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.get_num_threads())


class Right(nn.Module):
    """Draws from the generators that are seeded for each slice."""

    def forward(self, x):
        return F.dropout(x, 0.2) * (1 + np.random.random())


BREAKS = {"unseeded": Unseeded, "system": System, "sets": Sets, "threads": Threads}
"""The module in the middle of the model; with ``samples`` and ``loss`` the dataset and the loop are broken instead."""


class Samples(Dataset):
    """Noise, and with ``samples`` additional noise from its own generator."""

    def __init__(self, broken):
        self._x = torch.randn(64, 9)
        self._rng = np.random.default_rng(7)
        self._broken = broken

    def __len__(self):
        return len(self._x)

    def __getitem__(self, i):
        return self._x[i] + (float(self._rng.random()) if self._broken else 0.0), i % 4


def train(broken, **settings):
    """Train with one broken component."""
    torch.manual_seed(2)
    middle = nn.Sequential(nn.Tanh(), BREAKS.get(broken, Right)())
    model = nn.Sequential(nn.Linear(9, 33), middle, nn.BatchNorm1d(33), nn.Linear(33, 4))
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    for step in session.steps(Samples(broken == "samples"), batch_size=16):
        if step.number:
            sys.exit("it trained, but should only have been examined")
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            step.backward(loss * (1 + os.urandom(1)[0]) if broken == "loss" else loss)


if __name__ == "__main__":
    train(sys.argv[1])
