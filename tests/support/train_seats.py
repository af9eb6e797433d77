"""A DDP script whose newcomers take the seats of failed ranks: ``train_seats.py FOLDER [--newcomers N] [--strike CASE]``.

Each process notes the samples of its steps and its final weights in FOLDER. Survivors wait before step 8 until as many
newcomers are about to register as ranks have failed, so that all of them train together in the end.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from holdfast.distributed import alive, is_lead, register

SAMPLES, BATCH, EPOCHS = 120, 4, 3
STEPS_EPOCH = SAMPLES // 3 // BATCH
WAIT_BEFORE, NAP_S, WAIT_S = 8, 0.1, 90


def samples_of(seat, step):
    """The samples of a rank in a step, counted over all epochs."""
    epoch, batch = divmod(step, STEPS_EPOCH)
    sampler = DistributedSampler(range(SAMPLES), num_replicas=3, rank=seat, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)[batch * BATCH : (batch + 1) * BATCH]


def strike():
    os.kill(os.getpid(), signal.SIGKILL)


class Position:
    """Where the loop is. Asked for its state, the process dies if it is the one to strike then, and was asked before."""

    def __init__(self, strikes):
        self.epoch = self.batch = self.asked = 0
        self._strikes = strikes

    def state_dict(self):
        self.asked += 1
        if self._strikes and self.asked > 1:
            strike()
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newcomers", type=int, default=0, help="for how many the survivors wait")
    # "newcomer" dies before it registers, "giver" when it gives its state, "late" registers after the end
    parser.add_argument("--strike", default="", choices=("", "newcomer", "giver", "late"))
    given = parser.parse_args()
    is_new = int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("holdfast")
    seat = dist.get_rank()
    torch.manual_seed(seat)
    dataset = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.0001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    position = Position(strikes=given.strike == "giver" and seat == 0 and not is_new)
    first = given.folder / "first"
    if is_new:
        if given.strike == "newcomer" and not first.exists():
            first.touch()
            strike()
        while given.strike == "late" and len(list(given.folder.glob("ended-*"))) < 2:
            time.sleep(0.05)
        (given.folder / f"new-{os.getpid()}").touch()
    register(model, optimizer, position, schedule=schedule)
    steps = {}
    for epoch in range(position.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, (numbers, x) in enumerate(loader):
            if (epoch, batch) < (position.epoch, position.batch):
                continue
            position.epoch, position.batch = epoch, batch
            step = epoch * STEPS_EPOCH + batch
            if step == WAIT_BEFORE:
                ends_s = time.monotonic() + WAIT_S
                while len(list(given.folder.glob("new-*"))) < given.newcomers and time.monotonic() < ends_s:
                    time.sleep(0.05)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            schedule.step()
            steps[step] = numbers.tolist()
            time.sleep(NAP_S if given.newcomers else 0)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    told = {
        "seat": seat,
        "size": dist.get_world_size(),
        "alive": list(alive()),
        "is_new": is_new,
        "is_lead": is_lead(),
        "steps": steps,
        "rate": schedule.get_last_lr(),
        "weights": hashlib.sha256(weights).hexdigest(),
    }
    (given.folder / f"ended-{os.getpid()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
