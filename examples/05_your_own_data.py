"""Use your own dataset, with random augmentation, and still get bit-identical weights.

What you will see: a sine is learned from noisy samples. The noise is drawn anew in every epoch, yet it is the same
noise after a kill: random numbers are seeded by the slice of a step, not by the worker that computes it.

Run:
    holdfast run -n 4 --inject kill:rank=0,step=50,phase=allreduce examples/05_your_own_data.py
    holdfast run -n 4 examples/05_your_own_data.py                    undisturbed: compare the sha256

*Covers:* any object with ``len`` and ``[]``, randomness inside it, a worker 0 that dies.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

BATCH_SIZE = 64  # samples of one step, over all workers
EPOCHS = 30
SAMPLES = 1000

torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
torch.manual_seed(0)


class NoisySine:
    """Points of a sine, each with fresh noise."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.tensor([2 * math.pi * index / SAMPLES])
        return x + 0.02 * torch.randn(1), torch.sin(x)


model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
session = holdfast.Session(model, torch.optim.Adam(model.parameters(), lr=1e-2))
for step in session.steps(NoisySine(), batch_size=BATCH_SIZE, epochs=EPOCHS):
    for x, y in step:
        step.backward(F.mse_loss(model(x), y))

x = torch.linspace(0, 2 * math.pi, 100).unsqueeze(1)
with torch.no_grad():
    error = (model(x) - torch.sin(x)).abs().max().item()
session.log(largest_error=error)
if session.is_lead:
    print(f"{session.step} steps by {session.world_size} workers, largest error {error:.3f}")
