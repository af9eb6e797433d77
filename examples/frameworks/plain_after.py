"""The same loop, which now survives failures: two more lines.

$ holdfast run -n 3 --fabric gloo --inject kill:rank=1,step=5 examples/frameworks/plain_after.py
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, :8].sum(1) > inputs[:, 8:].sum(1)).long())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
loader = DataLoader(samples(240, 1), batch_size=24, shuffle=True)
model, optimizer, loader, scheduler = holdfast.prepare(model, optimizer, loader, scheduler)

for _ in range(3):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
