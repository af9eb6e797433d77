"""Trains a model whose parameters are bfloat16, and prints the hash of its state: ``train_bf16.py [SLICES]``."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.models.training_state import model_sha256


def train(**settings):
    """Train eight steps; return the sha256 of the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 4)).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = holdfast.Session(model, optimizer, **({"slices": 6, "bucket_bytes": 1024} | settings))
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(192, 16, generator=drawn).bfloat16(), torch.randint(4, (192,), generator=drawn)
    for step in session.steps(TensorDataset(x, y), 24, 1):
        for given, targets in step:
            step.backward(F.cross_entropy(model(given).float(), targets))
    return model_sha256(model)


if __name__ == "__main__":
    sys.stdout.write(f"weights {train()}\n")
