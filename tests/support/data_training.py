"""Trains a tiny model on virtual workers, and returns the samples that it was trained on."""

from typing import NamedTuple

import torch
from planned import faults

import holdfast

KILLS = ("kill:rank=1,step=2,phase=allreduce,bucket=0", "kill:rank=2,step=7,phase=optimizer")


class Trained(NamedTuple):
    """A training: the samples of each committed step, in order, the final weights, and the account."""

    steps: dict[int, list[int]]
    weights: list[float]
    account: tuple[int, int, int, int]

    @property
    def samples(self):
        return [number for step in sorted(self.steps) for number in self.steps[step]]


def train(
    data, *sizes, kills=(), numbers=lambda inputs: inputs[1], epochs=2, workers=3, options=None, steps=None, **settings
):
    """Train on virtual workers.

    Args:
        data: What to train on, with samples of a tensor and a number, or something else that ``numbers`` understands.
        sizes: The size of a mini-batch, if ``data`` does not have it.
        kills: Planned faults.
        numbers: Returns the numbers of the samples in a batch.
        epochs: Passes over the data.
        workers: Number of workers.
        options: More arguments of ``session.steps``.
        steps: Receives the samples of each step, also of a training that is stopped.
        settings: Settings of the session.
    """
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.1)
    given = {"workers": workers, "slices": 4, "seed": 3, "faults": faults(*kills)} | settings
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=1e-3), **given)
    steps = {} if steps is None else steps
    for step in session.steps(data, *sizes, epochs=epochs, **(options or {})):
        steps[step.number] = []
        for inputs in step:
            mine = numbers(inputs)
            steps[step.number] += [int(number) for number in mine]
            step.backward(model(torch.as_tensor(mine, dtype=torch.float32).reshape(-1, 1).expand(-1, 3)).mean())
    totals = session._job.loops.totals
    account = (totals.planned, totals.committed, totals.lost, totals.repeated)
    return Trained(steps, model.weight.flatten().tolist() + model.bias.tolist(), account)
