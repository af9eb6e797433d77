"""Collectives and DistributedDataParallel on the first GPU, which all ranks share: ``train_ddp_cuda.py FOLDER``."""

import os
import sys
from pathlib import Path

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def check_collectives(rank, size):
    """Sums and gathers of tensors that another kernel has just written; none may be read before it has."""
    for number in range(20):
        mine = torch.full((1 << 20,), float(rank), device="cuda") + number
        whole = torch.empty(size << 20, device="cuda")
        works = [dist.all_reduce(mine, async_op=True)]
        works[0].wait()
        assert torch.equal(mine, torch.full_like(mine, sum(range(size)) + size * number))
        dist.all_gather_into_tensor(whole, torch.full((1 << 20,), float(rank), device="cuda"))
        assert whole.view(size, -1)[:, 0].tolist() == list(range(size))


def main(folder):
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("holdfast")
    rank = dist.get_rank()
    check_collectives(rank, dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda())
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 16, generator=generator).cuda(), torch.randint(0, 4, (8,), generator=generator).cuda()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


main(sys.argv[1])
