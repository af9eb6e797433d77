"""Trains on a stream of numbers, and writes down the samples of each committed step: ``train_stream.py FOLDER [options]``."""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import holdfast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from train_pipeline import wait_for_newcomer


class Numbers(IterableDataset):
    """The numbers below ``count``, each with noise from the global generators, in an order that the epoch decides.

    ``splits`` gives each worker its part, which is forbidden; ``clocked`` shuffles by the system's random numbers, too.
    """

    def __init__(self, count, split=-1, clocked=False):
        self.count, self.split, self.clocked = count, split, clocked
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        rng = random.SystemRandom() if self.clocked else random.Random(self.epoch)
        block = list(range(min(1000, self.count)))
        for first in range(0, self.count, len(block)):
            rng.shuffle(block)
            yield from (first + number for number in block if first + number < self.count)

    def __iter__(self):
        for number in self.order():
            if self.split < 0 or number % 2 == self.split:
                yield {"x": torch.randn(4), "number": number}


class Stateful(Numbers):
    """The same in order, with a state."""

    def __init__(self, count):
        super().__init__(count)
        self.next = 0

    def __iter__(self):
        while self.next < self.count:
            self.next += 1
            yield {"x": torch.randn(4), "number": self.next - 1}
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def noted(folder, rank):
    """Return the file in which a worker writes the samples that it computed, one line for each slice."""
    return Path(folder) / f"samples-{rank}.jsonl"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--broken", choices=("split", "clock", "sampler"), default="")
    parser.add_argument("--await-at", type=int, default=-1, help="the lead waits for a newcomer in this step")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=1e-3), bucket_bytes=4)
    data = Stateful(options.count) if options.stateful else Numbers(options.count)
    if options.broken == "split":
        data = Numbers(options.count, split=session.rank % 2)
    elif options.broken == "clock":
        data = Numbers(options.count, clocked=True)
    loader = DataLoader(data, options.batch, num_workers=options.loaders)
    if options.broken == "sampler":
        loader = DataLoader(range(64), options.batch, sampler=range(session.rank, 64))
    with noted(options.folder, session.rank).open("a", buffering=1) as out:
        for step in session.steps(loader, epochs=options.epochs):
            if step.number == options.await_at and step.attempt == 0 and session.is_lead:
                wait_for_newcomer(session)
            for batch in step:
                line = {"step": step.number, "epoch": step.epoch, "numbers": batch["number"].tolist()}
                out.write(json.dumps(line) + "\n")
                step.backward(model(batch["x"]).square().mean())


if __name__ == "__main__":
    main()
