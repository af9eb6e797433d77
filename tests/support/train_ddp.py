"""A script with plain DistributedDataParallel: ``train_ddp.py FOLDER [--naps] [--control] [--deep]``. It names Holdfast once.

Each rank writes its final weights. :func:`by_hand` computes the same in one process.
"""

import argparse
import copy
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 37), nn.Tanh(), nn.Linear(37, 23), nn.Tanh(), nn.Linear(23, 5))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model, rank, step):
    """A loss of very different size from rank to rank, so that the order of adding is visible."""
    source = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 20, generator=source), torch.randint(0, 5, (16,), generator=source)
    return F.cross_entropy(model(x), y) * 3.0**rank


def numbers(rank):
    return torch.randn(1003, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def by_hand(ranks, *, order=None, dead=None, dies_in=STEPS):
    """The weights when the gradients of the ranks are added one after another.

    Args:
        ranks: Number of ranks.
        order: Order in which they are added, if not ascending.
        dead: A rank that fails.
        dies_in: The step in which it fails.
    """
    model = make()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        alive = [rank for rank in order or range(ranks) if rank != dead or step < dies_in]
        gradients = []
        for rank in alive:
            own = copy.deepcopy(model)
            loss_of(own, rank, step).backward()
            gradients.append([p.grad * (1 / ranks) for p in own.parameters()])
        for p, first, *others in zip(model.parameters(), *gradients, strict=True):
            p.grad = first
            for other in others:
                p.grad += other
            if len(alive) < ranks:
                p.grad /= len(alive) / ranks
        optimizer.step()
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Deeper(torch.autograd.Function):
    """Runs a backward pass inside a backward pass."""

    @staticmethod
    def forward(ctx, x, depth, loss):
        ctx.depth, ctx.loss = depth, loss[0]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        backward(ctx.loss, ctx.depth - 1)
        return grad, None, None


DEEP = 61
"""Autograd runs the backward pass of this level in a thread of its own, where no Python frame is below it, as on a GPU."""


def backward(loss, depth=0):
    """Run the backward pass, so many levels deep."""
    if depth == 0:
        loss.backward()
        return
    with torch.enable_grad():
        Deeper.apply(torch.ones(1, requires_grad=True), depth, [loss]).backward()


def frames_below_a_deep_hook():
    """The Python frames that called the hook of a gradient, so deep in backward passes: None where autograd's own thread did."""
    frames = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: frames.append(sys._getframe().f_back))
    backward(weight.sum(), DEEP)
    return [frame and frame.f_code.co_name for frame in frames]


def train(*, naps, depth=0):
    model = DistributedDataParallel(make(), bucket_cap_mb=0.002)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        if naps and dist.get_rank() == 1:
            time.sleep(random.random() / 20)
        optimizer.zero_grad()
        backward(loss_of(model, dist.get_rank(), step), depth)
        optimizer.step()
    return weights(model.module)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--naps", action="store_true")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--deep", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("holdfast")
    ended = {"weights": train(naps=False, depth=DEEP if given.deep else 0)}
    if given.naps:
        ended["weights with naps"] = train(naps=True)
    if given.control:
        for backend in ("holdfast", "gloo"):
            ended[backend] = numbers(dist.get_rank())
            dist.all_reduce(ended[backend], group=dist.new_group(backend=backend))
    torch.save(ended, given.folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
