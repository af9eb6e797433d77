"""Training on the first GPU, with deterministic kernels; both workers of a job may share it: ``train_cuda.py [--prepared]``."""

import os
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main():
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator))
    optimizer = torch.optim.Adam(model.parameters())
    if "--prepared" in sys.argv:
        train_prepared(model, optimizer, dataset)
        return
    session = holdfast.Session(model, optimizer, slices=4, bucket_bytes=1024)
    for step in session.steps(dataset, 8, 1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x.cuda()), y.cuda()))


def train_prepared(model, optimizer, dataset):
    """The usual loop over prepared objects."""
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model, optimizer, loader = holdfast.prepare(model, optimizer, loader, slices=4, bucket_bytes=1024)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()


main()
