"""The reference: training in one process, in plain torch, written without Holdfast.

All random numbers are seeded by their position in the computation. Slices are computed one by one, gradients are added
by autograd's own ``+=`` in slice order, buffers are averaged over the slices. Holdfast must always end with these bits.
"""

import contextlib
import functools
import hashlib
import random
import struct

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SAMPLES, BATCH, EPOCHS, SLICES, SEED = 203, 32, 2, 4, 7
STEPS = EPOCHS * -(-SAMPLES // BATCH)
MODELS, OPTIMIZERS = ("mlp", "cnn"), ("sgd", "adam")
ROWS = "rows"
"""A further model of layers whose rows do not mix, without randomness."""
FEATURES = ("augment", "loaders", "clip", "scaler", "ema", "average", "scheduler", "evaluate")
"""Additional features of a training. Loaders and evaluation do not affect the bits, so they are absent here."""
LARGEST_NORM, DECAY = 0.5, 0.9


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)


def make_model(name):
    torch.manual_seed(5)
    if name == ROWS:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def make_optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-3)


class Noisy(torch.utils.data.Dataset):
    """The samples, each with noise from all three generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x, y = data_once()
        return x[number] + 0.1 * torch.randn(x[number].shape) + float(np.random.normal(0, 0.1)) + random.uniform(
            -0.1, 0.1
        ), y[number]


@functools.cache
def data_once():
    return data()


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def make_scaler():
    """A scaler with so large a scale that the first steps overflow and are skipped."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)


def make_ema(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def lower_precision(features):
    return torch.autocast("cpu", torch.bfloat16) if "scaler" in features else contextlib.nullcontext()


def key(*parts):
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def model_hash(model):
    """sha256 over parameters and buffers in path order."""
    digest = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        digest.update(tensors[name].detach().numpy().tobytes())
    return digest


def state_hash(model, optimizer, average=None):
    """Hash of the model, then of an average kept by the session, then of the optimizer's state by number and name."""
    digest = model_hash(model)
    if average is not None:
        digest.update(model_hash(average).digest())
    state = optimizer.state_dict()["state"]
    for number in sorted(state):
        for name in sorted(state[number]):
            value = state[number][name]
            if value is not None:
                digest.update(value.numpy().tobytes() if torch.is_tensor(value) else struct.pack("<d", value))
    return digest.hexdigest()


def seed_all(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def ema_hash(ema):
    """48 bits of the hash of the averaged weights, which fit a float."""
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ema.module.parameters()))
    return int(digest.hexdigest()[:12], 16)


def in_tree(terms, first, size):
    """The sum of numbered tensors in a binary tree from ``first`` on; None if there are none."""
    if size == 1:
        return terms.get(first)
    left, right = in_tree(terms, first, size // 2), in_tree(terms, first + size // 2, size // 2)
    return left if right is None else right if left is None else left + right


def in_order(terms):
    total = None
    for number in sorted(terms):
        total = terms[number] if total is None else total + terms[number]
    return total


def train(model_name, optimizer_name, features=(), slices=SLICES, order="fold"):
    """Train, and return the hash of the state; also the hash of an average of its own, if any."""
    add = in_order if order == "fold" else functools.partial(in_tree, first=0, size=1 << (slices - 1).bit_length())
    torch.set_num_threads(1)
    x, y = data()
    model = make_model(model_name)
    optimizer = make_optimizer(optimizer_name, model)
    scheduler = make_scheduler(optimizer) if "scheduler" in features else None
    scaler = make_scaler() if "scaler" in features else None
    ema = make_ema(model) if {"ema", "average"} & set(features) else None
    step = 0
    for epoch in range(EPOCHS):
        visited = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(key("order", SEED, epoch)))
        for first in range(0, SAMPLES, BATCH):
            ids = visited[first : first + BATCH]
            optimizer.zero_grad()
            start = [b.clone() for b in model.buffers()]
            ends, gradients = {}, {}
            for number in range(slices):
                part = ids[number * len(ids) // slices : (number + 1) * len(ids) // slices]
                if not len(part):
                    continue
                for buffer, begin in zip(model.buffers(), start, strict=True):
                    buffer.copy_(begin)
                inputs, labels = x[part], y[part]
                if "augment" in features:
                    seed_all(key("slice", SEED, step, number))
                    inputs, labels = torch.utils.data.default_collate([Noisy()[i] for i in part.tolist()])
                seed_all(key("slice", SEED, step, number))
                with lower_precision(features):
                    loss = F.cross_entropy(model(inputs), labels)
                total = loss * len(part)
                (total if scaler is None else scaler.scale(total)).backward()
                ends[number] = [b.clone() for b in model.buffers()]
                if order == "tree":  # autograd adds in order
                    gradients[number] = [p.grad for p in model.parameters()]
                    optimizer.zero_grad()
            for i, (buffer, begin) in enumerate(zip(model.buffers(), start, strict=True)):
                if buffer.is_floating_point():
                    buffer.copy_(add({number: end[i] for number, end in ends.items()}) / len(ends))
                else:
                    buffer.copy_(begin + 1)
            for i, parameter in enumerate(model.parameters()):
                if order == "tree":
                    parameter.grad = add({number: mine[i] for number, mine in gradients.items()})
                parameter.grad /= len(ids)
            if "clip" in features:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            if ema is not None:
                ema.update_parameters(model)
            step += 1
    assert step == STEPS
    state = state_hash(model, optimizer, ema if "average" in features else None)
    return (state, ema_hash(ema)) if "ema" in features else state
