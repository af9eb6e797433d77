"""Trains a model, and can hold a backward pass in its middle, when some all-reduces have begun.

``train_begun.py [--prepare] [--hold] [--raise]`` prints ``says RANK EARLY STATE``: how many buckets were begun early, and a
hash. With ``--hold`` rank 0 stays in the middle of its last backward pass of the fourth step, for half a minute, and prints
``held`` and ``let go``. With ``--raise`` it raises after the pass.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.models.backward_overlap import BackwardOverlap

HOLD_S, HELD = 30.0, 2 * 4
"""Rank 0 has two slices in each step."""
PASSES = []
RANK = os.environ.get("HOLDFAST_RANK")
EARLY = []


class Held(torch.autograd.Function):
    """Passes everything on; holds the backward pass."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        PASSES.append(1)
        if RANK == "0" and "--hold" in sys.argv and len(PASSES) == HELD:
            print("held", flush=True)
            time.sleep(HOLD_S)
            print("let go", flush=True)
        return gradient


class Model(nn.Module):
    """Three layers; the gradients of two of them are complete in the middle of the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.third(self.second(Held.apply(self.first(x.flatten(1)))))


def count_early():
    finish = BackwardOverlap.finish

    def counted(overlap, bucket):
        result = finish(overlap, bucket)
        EARLY.extend([bucket] * (result is not None))
        return result

    BackwardOverlap.finish = counted


def main():
    torch.set_num_threads(1)
    torch.manual_seed(5)
    count_early()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"seed": 7, "slices": 4, "bucket_bytes": 4096}
    x, y = reference.data()
    dataset = TensorDataset(x[:160], y[:160])
    if "--prepare" in sys.argv:
        model, optimizer, loader = holdfast.prepare(model, optimizer, DataLoader(dataset, batch_size=32), **settings)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    else:
        session = holdfast.Session(model, optimizer, **settings)
        for step in session.steps(dataset, 32, shuffle=False):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                if "--raise" in sys.argv and step.number == 3 and RANK == "0":
                    raise ValueError("the script has a bug")
    print(f"says {RANK or 0} {len(EARLY)} {reference.state_hash(model, optimizer)}", flush=True)


if __name__ == "__main__":
    main()
