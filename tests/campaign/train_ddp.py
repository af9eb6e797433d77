"""A plain script of DistributedDataParallel, small enough for thousands of runs: ``train_ddp.py [PAUSE_S]``."""

import hashlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast.distributed

EPOCHS = 2
pause_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
torch.set_num_threads(1)
dist.init_process_group("holdfast")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(192, 20), torch.randint(0, 5, (192,)))
sampler = DistributedSampler(dataset, seed=0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, 8, sampler=sampler):
        time.sleep(pause_s)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
holdfast.distributed.is_lead()  # each rank prints its own: nothing is left to rank 0
print(f"state {hashlib.sha256(weights).hexdigest()}", flush=True)
dist.destroy_process_group()
