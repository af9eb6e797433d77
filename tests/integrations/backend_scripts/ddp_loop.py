"""A loop in the way of nanoGPT: DistributedDataParallel, accumulated gradients, and the loss of all ranks gathered."""

import torch
import torch.distributed as dist
from common import BACKEND, RANK, finished, samples, small_model
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(BACKEND)
size = dist.get_world_size()
model = DistributedDataParallel(small_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
x, y = samples(64).tensors
losses = []
for _ in range(8):
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        picked = torch.arange(2 * micro + RANK, 64, size)
        loss = (model(x[picked]) - y[picked]).square().mean() / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gathered = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(gathered, loss.detach())
    losses.append(torch.stack(gathered).mean().item())
finished(model.module, steps=8, losses=losses)
dist.destroy_process_group()
