"""Training that a page watches: ``train_watched.py [STEPS] [STEP_S]``; each step takes so long at least, and prints its loss."""

import sys
import time

import torch
from torch.utils.data import TensorDataset

import holdfast

STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])
BATCH = 16

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(BATCH * STEPS, 8)
model = torch.nn.Linear(8, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.05), seed=0)
for step in session.steps(TensorDataset(x, x.sum(1, keepdim=True) + 0.5 * torch.randn(len(x), 1)), BATCH, epochs=1):
    time.sleep(STEP_S)
    for inputs, wanted in step:
        step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
    if step.number % 5 == 0:
        print(f"step {step.number}", flush=True)
