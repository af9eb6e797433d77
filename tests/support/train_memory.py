"""Trains a few steps for each case, and prints what memory they take: ``train_memory.py ORDER SLICES PATH ...``."""

import gc
import json
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.models import gradients as layout
from holdfast_lab.memory import memory_in_use

WIDTH = 256


def layers():
    """Each weight is a bucket; the one before the last holds the bias alone."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=number == 3) for number in range(4)))


def all_storages():
    """The bytes of all memory of tensors in this process, by address; a page or less does not matter."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in found.items() if size > 4096}


def train(order, slices, path):
    """Train three steps, and print the memory in the third."""
    before = all_storages()  # of earlier cases, and of other workers
    model = layers()
    session = holdfast.Session(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        order=order,
        slices=slices,
        shared_bytes=-1 if path == "shared" else 0,
        bucket_bytes=1 << 16,
    )
    x = torch.zeros(3 * slices, WIDTH)
    for step in session.steps(TensorDataset(x, x), slices, 1):
        gradients = 0
        for given, _ in step:
            step.backward(F.mse_loss(model(given), given))
            if step.number == 2:
                part, adds = session._trainable.whole, session._job.loops.sum
                gradients = memory_in_use(part, adds)["gradients"]  # of the last slice
        if step.number == 2:
            found = memory_in_use(part, adds) | {"gradients": gradients}
            after = {address: size for address, size in all_storages().items() if before.get(address) != size}
            case = {"case": [order, slices, path], "rank": session.rank, "row": part.size_bytes}
            data = x.nbytes * (x.nbytes > 4096)
            sys.stdout.write(json.dumps(case | {"memory": found, "all": sum(after.values()) - data}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    layout.SMALL_BYTES = 0  # gradients are moved one by one, as those of a large model
    for order, slices, path in zip(*[iter(sys.argv[1:])] * 3, strict=True):
        train(order, int(slices), path)
