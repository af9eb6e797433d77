"""A training loop as people write it, with ``holdfast.prepare``: ``train_prepared.py [PAUSE_S]``."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

EPOCHS = 2
pause_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(120, 8), torch.randint(0, 3, (120,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = DataLoader(data, batch_size=18, shuffle=True)
model, optimizer, loader = holdfast.prepare(model, optimizer, loader, slices=4)
for _ in range(EPOCHS):
    for x, y in loader:
        time.sleep(pause_s / 2)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
