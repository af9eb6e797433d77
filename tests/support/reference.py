"""The judge: training in one process, in plain torch, written without Holdfast.

Everything random is keyed by what is computed, slices are computed one by one, gradients are added by autograd's own
``+=`` in slice order, buffers are averaged over the slices. Whatever Holdfast does must end with these bits.
"""

import hashlib
import struct

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES, BATCH, EPOCHS, SLICES, SEED = 203, 32, 2, 4, 7
STEPS = EPOCHS * -(-SAMPLES // BATCH)
MODELS, OPTIMIZERS = ("mlp", "cnn"), ("sgd", "adam")


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)


def make_model(name):
    torch.manual_seed(5)
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


def key(*parts):
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def state_hash(model, optimizer):
    """sha256 over parameters and buffers in path order, then the optimizer's state by number and name."""
    digest = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        digest.update(tensors[name].detach().numpy().tobytes())
    state = optimizer.state_dict()["state"]
    for number in sorted(state):
        for name in sorted(state[number]):
            value = state[number][name]
            if value is not None:
                digest.update(value.numpy().tobytes() if torch.is_tensor(value) else struct.pack("<d", value))
    return digest.hexdigest()


def train(model_name, optimizer_name):
    """Train, and return the hash of the state."""
    torch.set_num_threads(1)
    x, y = data()
    model = make_model(model_name)
    optimizer = make_optimizer(optimizer_name, model)
    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(key("order", SEED, epoch)))
        for first in range(0, SAMPLES, BATCH):
            ids = order[first : first + BATCH]
            optimizer.zero_grad()
            start = [b.clone() for b in model.buffers()]
            ends = []
            for number in range(SLICES):
                part = ids[number * len(ids) // SLICES : (number + 1) * len(ids) // SLICES]
                if not len(part):
                    continue
                for buffer, begin in zip(model.buffers(), start, strict=True):
                    buffer.copy_(begin)
                torch.manual_seed(key("slice", SEED, step, number))
                (F.cross_entropy(model(x[part]), y[part]) * len(part)).backward()
                ends.append([b.clone() for b in model.buffers()])
            for i, (buffer, begin) in enumerate(zip(model.buffers(), start, strict=True)):
                if buffer.is_floating_point():
                    total = ends[0][i]
                    for end in ends[1:]:
                        total = total + end[i]
                    buffer.copy_(total / len(ends))
                else:
                    buffer.copy_(begin + 1)
            for parameter in model.parameters():
                parameter.grad /= len(ids)
            optimizer.step()
            step += 1
    assert step == STEPS
    return state_hash(model, optimizer)
