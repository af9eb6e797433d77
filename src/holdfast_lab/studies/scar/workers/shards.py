"""A sharded network, as a script for ``holdfast run``; the partial recovery study kills workers of this job.

Every step logs ``evaluation``, the loss on a fixed set of samples before the step, and the loss of the mini-batch.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast_lab.workloads import load_dataset

EVALUATED = 500
"""Size of the fixed set: the first samples of the training set."""
HIDDEN = 64


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--optimizer", choices=("adam", "momentum"), required=True)
    parser.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load_dataset("digits").train
    pixels, labels = dataset[:EVALUATED]
    torch.manual_seed(holdfast.Settings.from_env().seed)
    layers = (nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    model = nn.Sequential(nn.Flatten(), *layers)
    make = {
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=options.rate),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=options.rate, momentum=0.9),
    }[options.optimizer]
    session = holdfast.Session(holdfast.Sharded(model, options.shards), make)
    for step in session.steps(dataset, options.batch, options.epochs):
        with torch.no_grad():
            evaluation = F.cross_entropy(model(pixels), labels)
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            step.log(evaluation=evaluation)
            step.backward(loss)


if __name__ == "__main__":
    main()
