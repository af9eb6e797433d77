"""The figures of public DDP scripts, as these compute them, while ranks die in training and in the collectives themselves.

``ddp_figures.py FOLDER``, six ranks: rank 4 dies in training (``--inject``), ranks 0, 3, 5 and 1 each in one collective. Each rank
writes what it got, and what is right: what those alive give on average.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import FunctionType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from holdfast.distributed import alive, is_lead

folder = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("holdfast")
me, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
model = DistributedDataParallel(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def samples(rank):
    source = torch.Generator().manual_seed(rank)
    return torch.randn(8, 6, generator=source), torch.randint(2, (8,), generator=source)


def note(name, got, right):
    with (folder / f"rank-{me}.jsonl").open("a") as out:
        out.write(json.dumps({"name": name, "got": got, "right": right, "alive": alive()}) + "\n")


def mean(figure):
    """The mean of a figure over those alive, computed here."""
    return sum(map(figure, alive())) / len(alive())


def due(name, victim):
    """In this call, a rank dies instead of making it."""
    dist.barrier()
    if me == victim:
        (folder / f"died-{me}").write_text(name)
        os.kill(os.getpid(), signal.SIGKILL)


def reduce_tensor(tensor):  # timm
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


def distribute_bn():  # timm
    for name, buffer in net.named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(world_size)


class AverageMeter:  # imagenet
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count


def synchronize_between_processes(count, total):  # MetricLogger
    dist.barrier()
    t = torch.tensor([count, total], dtype=torch.float64)
    dist.all_reduce(t)
    t = t.tolist()
    return int(t[0]), t[1]


def own_gradients(weights):  # cleanrl
    flat = torch.cat([w.grad.view(-1) for w in weights])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    return flat / world_size


def statistics(whole, mine):
    dist.all_gather_into_tensor(whole, mine)
    dist.all_reduce(mine)


as_sync_batch_norm = FunctionType(statistics.__code__, {"__name__": "torch.nn.modules._functions", "dist": dist})
"""Calls as SyncBatchNorm does, which itself needs a GPU."""


def figure(rank):
    return rank * rank + 0.25


def gradient_of(rank):
    own = nn.Linear(6, 2)
    with torch.no_grad():
        for weight in own.parameters():
            weight.fill_(0.5)
    inputs, targets = samples(rank)
    F.cross_entropy(own(inputs), targets).backward()
    return own


def train():
    for _ in range(3):
        inputs, targets = samples(me)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def evaluate(victims):
    """Each figure once; in some, a rank dies."""
    due("reduce_tensor", victims.get("reduce_tensor"))
    got = reduce_tensor(torch.tensor(figure(me))).item()
    note("reduce_tensor", got, mean(figure))
    half = reduce_tensor(torch.tensor(figure(me), dtype=torch.bfloat16)).item()
    note("in 16 bits", half, mean(figure))

    with torch.no_grad():
        net[1].running_mean.fill_(figure(me))
    due("distribute_bn", victims.get("distribute_bn"))
    distribute_bn()
    note("distribute_bn", net[1].running_mean[0].item(), mean(figure))

    meter = AverageMeter()
    meter.update(figure(me), 4 + me)
    due("AverageMeter", victims.get("AverageMeter"))
    meter.all_reduce()
    note("AverageMeter", meter.avg, mean(lambda rank: figure(rank) * (4 + rank)) / mean(lambda rank: 4 + rank))
    note("its count", meter.count, world_size * mean(lambda rank: 4 + rank))

    due("MetricLogger", victims.get("MetricLogger"))
    _, total = synchronize_between_processes(10 * me, figure(me))
    note("MetricLogger", total, world_size * mean(figure))

    own = gradient_of(me)
    due("own gradients", victims.get("own gradients"))
    got = own_gradients(list(own.parameters()))
    grads = {rank: torch.cat([w.grad.view(-1) for w in gradient_of(rank).parameters()]) for rank in alive()}
    note("own gradients", got.tolist(), (sum(grads.values()) / len(grads)).tolist())

    correct, seen = torch.tensor(5 * me + 1), torch.tensor(8)
    due("accuracy", victims.get("accuracy"))
    dist.all_reduce(correct)
    dist.all_reduce(seen)
    note("accuracy", correct.item() / seen.item(), mean(lambda rank: 5 * rank + 1) / 8)

    results = [None] * world_size
    due("objects", victims.get("objects"))
    dist.all_gather_object(results, {"rank": me})
    lowest = alive()[0]
    places = [rank if rank in alive() else lowest for rank in range(world_size)]
    note("objects", [each["rank"] for each in results], places)

    counts, total = torch.full((world_size,), -1.0), torch.tensor([8.0])
    as_sync_batch_norm(counts, total)
    note(
        "SyncBatchNorm",
        [*counts.tolist(), total.item()],
        [8.0 * (rank in alive()) for rank in range(world_size)] + [8.0 * len(alive())],
    )

    at_root = torch.tensor([figure(me), 1.0])
    root = alive()[-1]
    dist.reduce(at_root, dst=root, op=dist.ReduceOp.SUM)
    if me == root:
        note("reduce", at_root[0].item(), world_size * mean(figure))
    average, most = torch.tensor(figure(me)), torch.tensor(me)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    note("AVG and MAX", [average.item(), most.item()], [mean(figure), max(alive())])
    best = torch.tensor(figure(me))
    dist.broadcast(best, src=root)
    listed = [{"best": figure(me)}]
    dist.broadcast_object_list(listed, src=root)
    note("broadcast", [best.item(), listed[0]["best"]], [figure(root)] * 2)


loss = train()
dist.all_reduce(loss)  # not detached
evaluate({"reduce_tensor": 0, "own gradients": 3})
train()
evaluate({"distribute_bn": 5, "objects": 1})
weights = torch.cat([p.detach().view(-1) for p in net.parameters()]).tolist()
note("weights", weights, weights)
dist.barrier()
is_lead()  # each rank notes its own figures: nothing is left to rank 0
dist.destroy_process_group()
