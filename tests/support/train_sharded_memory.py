"""Train a large sharded model, and print each worker's memory by use: ``memory {...}``, in bytes."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

WIDTH, LAYERS = 1024, 8


def memory_of(tensors):
    """Return the bytes that tensors occupy; shared storage counts once, and only the used part of it."""
    return sum({t.data_ptr(): min(t.untyped_storage().nbytes(), t.nbytes) for t in tensors}.values())


def private_memory():
    """Return the private memory of this process, as reported by Linux."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size) << 10 for name, size, *_ in (line.split() for line in lines)}
    return {"private": sizes["Private_Clean:"] + sizes["Private_Dirty:"], "pss": sizes["Pss:"]}


class Probe:
    """Its state is requested between two steps, before any memory is lent."""

    def __init__(self, model):
        self.model = model
        self.seen = []

    def state_dict(self):
        self.seen.append(memory_of(self.model.parameters()))
        return {}

    def load_state_dict(self, state):
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    tiny = nn.Linear(1, 1)
    holdfast.Session(tiny, torch.optim.Adam(tiny.parameters()))  # so that imports do not count
    before = private_memory()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    size = sum(p.nbytes for p in model.parameters())
    optimizers = []

    def make_optimizer(parameters):
        optimizers.append(torch.optim.Adam(parameters))
        return optimizers[-1]

    session = holdfast.Session(holdfast.Sharded(model), make_optimizer, slices=4)
    probe = Probe(model)
    session.register(probe=probe)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, WIDTH, generator=generator), torch.randint(9, (64,), generator=generator))
    in_a_step, found = 0, {}
    for step in session.steps(data, 16):
        in_a_step = memory_of(model.parameters())
        if step.number == 3:
            found = {name: value - before[name] for name, value in private_memory().items()}
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    state = [value for made in optimizers for of_one in made.state.values() for value in of_one.values()]
    found |= {
        "model": size,
        "parameters_between_steps": max(probe.seen[2:]),
        "parameters_in_a_step": in_a_step,
        "optimizer": memory_of(state),
        "whole_at_the_end": memory_of(model.parameters()) >= size and bool(model[-1].weight.std() > 0),
    }
    sys.stdout.write(f"memory {json.dumps(found)}\n")
