"""Jobs that lose a rank with a part of their state: ``lost_parts.py PLAY FOLDER``, three ranks; rank 1 dies."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import holdfast.distributed

folder = Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("holdfast")
me = dist.get_rank()
torch.manual_seed(0)


def note(name, **fields):
    with (folder / f"rank-{me}.jsonl").open("a") as out:
        out.write(json.dumps({"name": name} | fields) + "\n")


def die():
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def tried(call):
    """The message of the error of ``call()``, "" if there is none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


class Columns(nn.Module):
    """A layer of which each rank has some inputs, by hand: without its rank, a sum is of too few."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 4), me + 1.0))

    def forward(self, x):
        y = F.linear(x, self.weight)
        dist.all_reduce(y)
        return y


def tensor_parallel():
    """Rank 1 dies before an evaluation, in which nothing carries gradients."""
    layer = Columns()
    layer(torch.ones(3, 4)).sum().backward()
    dist.barrier()
    die()
    with torch.no_grad():
        note("evaluation", says=tried(lambda: layer(torch.ones(3, 4))))
    note("figure", says=tried(lambda: dist.all_reduce(torch.ones(1))))


def tensor_parallel_after_ddp():
    """Rank 1 dies in a sum of DDP, which continues; the layer beside it must not."""
    layer, model = Columns(), DistributedDataParallel(nn.Linear(4, 4))
    model(layer(torch.ones(3, 4)).repeat(1, 2)).sum().backward()
    dist.barrier()
    die()
    for parameter in model.parameters():
        parameter.grad = None
    model(torch.ones(3, 4)).sum().backward()
    note("ddp", alive=holdfast.distributed.alive(), grad=model.module.weight.grad[0, 0].item())
    note("layer", says=tried(lambda: layer(torch.ones(3, 4))))


def contrastive():
    """Features are gathered with gradients, by torch's function and by hand; rank 1 dies in a sum of DDP before."""
    encoder = DistributedDataParallel(nn.Linear(4, 3))
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(me))

    def by_torch():
        return torch.cat(with_gradients.all_gather(encoder(inputs)))

    def by_hand():
        own = encoder(inputs)
        rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        rows[me] = own
        return torch.cat(rows)

    by_torch().sum().backward()
    dist.barrier()
    die()
    encoder(inputs).sum().backward()
    for gather in (by_torch, by_hand):
        for time in ("first", "again"):
            note(f"{gather.__name__}, {time}", says=tried(gather))


def zero():
    """Rank 1 dies in the sums of a step with a sharded optimizer: in the first one, or a later one."""
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    last = int(os.environ.get("STEPS", "0"))
    for step in range(last + 1):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        if step == last:
            die()
        before = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
        says = tried(loss.backward)
        after = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
        if says:
            note("step", step=step, says=says, same=before == after, weights=after)
            return
        optimizer.step()
    note("step", step=last, says="")


def low_rank():
    """Rank 1 dies in the sums of a hook that compresses, of which the second is made in a callback; then hooks of a script."""

    def gradient(model):
        model.zero_grad()
        model(torch.full((1, 8), (1.0, 2.0, 6.0)[me])).sum().backward()

    def summed(_, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    def sum_gradient(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    model = DistributedDataParallel(nn.Linear(8, 8))
    # Without the feedback of errors, which are lost with their rank, this mean is exact.
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, use_error_feedback=False)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(6):
        if step == 4:
            die()
        gradient(model)
        note(f"step {step}", alive=len(holdfast.distributed.alive()), grads=model.module.weight.grad.view(-1).tolist())
    own = DistributedDataParallel(nn.Linear(8, 8))
    own.register_comm_hook(None, summed)
    gradient(own)
    note("own hook of DDP", grads=own.module.weight.grad.view(-1).tolist())
    layer = nn.Linear(8, 8)
    layer.weight.register_post_accumulate_grad_hook(sum_gradient)
    gradient(layer)
    note("own hook of a parameter", grads=layer.weight.grad.view(-1).tolist())


def told():
    """Rank 1 dies in a sum of DDP; the script sums a figure after it, twice."""
    model, figure = DistributedDataParallel(nn.Linear(4, 3)), torch.ones(1)
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(figure)
    die()
    model(torch.ones(2, 4)).sum().backward()
    note("ddp", alive=holdfast.distributed.alive())
    for time in ("first", "again"):
        figure = torch.ones(1)
        note(time, says=tried(lambda: dist.all_reduce(figure)), figure=figure.item())  # noqa: B023


def fsdp():
    """Rank 1 dies in its first start; the error is not caught."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 3)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    died = folder / "died"
    for step in range(4):
        if step == 2 and me == 1 and not died.exists():
            died.touch()
            die()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    note("trained", size=dist.get_world_size())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
