"""Campaigns for tests: free trials that do what their cell says, and trials that train."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from holdfast_lab.studies.campaign import run_campaign
from holdfast_lab.studies.campaign_plan import Campaign, Cell, StopRule
from holdfast_lab.studies.outcomes import ACCR, NAN, RWC, are_finite, digest, outcome_of
from holdfast_lab.studies.warm import HeldTraining

DEADLINE_S = 60


def rows_of(value):
    return [{"value": int(value)}] * 2


def leave_open(settings):
    """Leave a directory to be removed, by a process that runs as long as it is allowed to."""
    left = tempfile.TemporaryDirectory(dir=settings["place"])
    _left.append(left)
    (Path(left.name) / "left").touch()
    time.sleep(settings["takes_s"])
    return [{"value": left.name}]


_left: list[Any] = []


def prepare_toy(settings):
    if "refuses" in settings:
        raise ValueError(settings["refuses"])
    return dict(settings)


def toy(settings, seed):
    """Draw an outcome from the seed; for some seeds, first carry out the settings' instructions."""
    chance = random.Random(seed)
    if "notes" in settings:
        with Path(settings["notes"]).open("a") as file:
            file.write(f"{os.getpid()} {seed}\n")
    time.sleep(settings.get("takes_s", 0))
    drawn = chance.random()
    if drawn < settings.get("dies", 0):
        os.kill(os.getpid(), signal.SIGSEGV)
    if drawn < settings.get("raises", 0):
        msg = f"{drawn:.6f}"
        raise RuntimeError(msg)
    if settings.get("waits") and Path(settings["notes"]).read_text().count(f" {seed}\n") == 1:
        time.sleep(DEADLINE_S)  # to be killed in the first attempt
    outcome = chance.choices((RWC, ACCR, NAN), settings.get("weights", (6, 3, 1)))[0]
    return {"outcome": outcome, "accuracy": chance.random(), "loss": float("nan") if outcome == NAN else 0.5}


def campaign_of(
    cells: dict[str, dict[str, Any]], *, seed=1, width=0.0, batch=10, least=10, most=30, **others: Any
) -> Campaign:
    return Campaign(
        name="toy",
        seed=seed,
        cells=[Cell(name, settings) for name, settings in cells.items()],
        stop=StopRule(width=width, batch=batch, least=least, most=most),
        **{"prepare": prepare_toy, "trial": toy} | others,
    )


# --------------------------------------------------------------------------------------------- trials that train


class Training:
    """A small network with all kinds of state that must be restored: normalisation, dropout, momentum, a schedule."""

    def __init__(self):
        torch.manual_seed(3)
        self.x, self.y = torch.randn(64, 6), torch.randint(0, 3, (64,))
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 3),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.losses: list[float] = []
        self.train(4)

    def train(self, steps):
        for _ in range(steps):
            order = torch.randperm(64)[:32]
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(self.x[order]), self.y[order])
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.losses.append(float(loss.detach()))

    def accuracy(self):
        self.model.eval()
        return float((self.model(self.x).argmax(1) == self.y).float().mean())

    def held(self):
        return HeldTraining(self.model, self.optimizer, self.schedule)


def prepare_training(settings):
    training = Training()
    held = training.held()
    training.train(3)
    undisturbed = training.accuracy(), digest(training.model.state_dict())
    return training, held, undisturbed


def trial_of_training(warm, seed):
    training, held, undisturbed = warm
    held.restore()
    return _disturbed(training, undisturbed, seed)


def trial_that_forgets_the_optimizer(warm, seed):
    """A faulty trial that restores only the weights."""
    training, held, undisturbed = warm
    moved = copy.deepcopy(training.optimizer.state_dict())
    held.restore()
    training.optimizer.load_state_dict(moved)
    return _disturbed(training, undisturbed, seed)


def _disturbed(training, undisturbed, seed):
    training.losses.clear()
    chance = random.Random(seed)
    bits = chance.choice(list(training.model.parameters())).data.view(torch.int32).view(-1)
    bit = chance.randrange(32)
    bits[chance.randrange(len(bits))] ^= -(2**31) if bit == 31 else 1 << bit
    training.train(3)
    accuracy = training.accuracy()
    state = training.model.state_dict()
    return {
        "outcome": outcome_of(accuracy, undisturbed[0], finite=are_finite(training.losses, state.values())),
        "accuracy": accuracy,
        "bit": bit,
        "digest": digest(state),
        "losses": list(training.losses),
    }


# --------------------------------------------------------------------------------------------- in a separate process


def long_one(notes: str) -> Campaign:
    """A campaign of a few seconds, with trials of every kind."""
    cells = {"plain": {}, "raising": {"raises": 0.2}, "dying": {"dies": 0.05}}
    every = {"takes_s": 0.03, "notes": notes}
    return campaign_of({name: settings | every for name, settings in cells.items()}, width=0.12, least=20, most=50)


def endless_one(notes: str) -> Campaign:
    """A campaign of trials that do not end while a test watches."""
    return campaign_of({"a": {"takes_s": 600, "notes": notes}})


if __name__ == "__main__":
    run_campaign({"long": long_one, "endless": endless_one}[sys.argv[1]](sys.argv[3]), Path(sys.argv[2]), 2)
