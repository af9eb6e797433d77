"""A DDP script as people write it: ``train_as_people_do.py FOLDER [--lead] [--strike RANK:PLACE:EPOCH]``.

Rank 0 saves the model and appends to a log after each epoch; metrics are averaged by ``all_reduce`` and the world size; there
is an evaluation and a barrier. With ``--lead`` the lowest surviving rank saves and logs.

``--strike`` makes a rank announce, in the file ``here``, that it has come to a place, and wait there to be killed from outside.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast.distributed

EPOCHS = 4
PLACES = ("train", "evaluate", "metric", "save", "barrier")


def mean_over_ranks(value):
    """As timm, DeiT and many others do it."""
    reduced = torch.tensor(float(value))
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    return (reduced / dist.get_world_size()).item()


def main():
    from sklearn.datasets import load_digits  # tests that read the names above need not wait for it

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lead", action="store_true")
    parser.add_argument("--strike", default="")
    given = parser.parse_args()
    folder = given.folder
    torch.set_num_threads(1)
    dist.init_process_group("holdfast")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def writes():
        return holdfast.distributed.is_lead() if given.lead else rank == 0

    def come_to(place, epoch):
        if given.strike == f"{rank}:{place}:{epoch}":
            (folder / "here").write_text(str(os.getpid()))
            time.sleep(120)

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    dataset = TensorDataset(images[:960], labels[:960])
    held_out = images[960 + rank : 1680 : world_size], labels[960 + rank : 1680 : world_size]
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = {epoch: {} for epoch in range(EPOCHS)}

    def note(epoch, **values):
        own[epoch] |= values
        (folder / f"own-{rank}.json").write_text(json.dumps(own))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if batch == 2:
                come_to("train", epoch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        own_loss = sum(losses) / len(losses)
        come_to("metric", epoch)
        note(epoch, loss=own_loss)
        train_loss = mean_over_ranks(own_loss)
        model.eval()
        with torch.no_grad():
            correct = (model.module(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
        come_to("evaluate", epoch)
        note(epoch, accuracy=correct)
        accuracy = mean_over_ranks(correct)
        if writes():
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, folder / "model.tmp")
            come_to("save", epoch)
            os.replace(folder / "model.tmp", folder / "model.pt")
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({"epoch": epoch, "loss": train_loss, "accuracy": accuracy, "by": rank}) + "\n")
        else:
            come_to("save", epoch)
        come_to("barrier", epoch)
        dist.barrier()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.module.state_dict().values())
    (folder / f"end-{rank}").write_text(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
