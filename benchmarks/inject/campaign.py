"""Trials an hour: a campaign with warm processes against a new process for each trial, on the same work.

    python benchmarks/inject/campaign.py [--trials 1000] [--alone 8] [--processes 2] [--rounds 3] [--json FILE]

The work: a small network on digits trains one epoch from a checkpoint, after one bit of one of its weights was flipped.
The baseline starts a new process for each trial, so it pays for the interpreter, torch, the data and the checkpoint
each time; it runs as many processes in parallel as the campaign, each with one thread. The campaign is timed as a
whole, including the start of its processes. The rows of both must be bit-identical, or nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import cells, command_line, interval, ratio, table, write_json

from holdfast_lab.studies.campaign import run_campaign
from holdfast_lab.studies.campaign_plan import Campaign, Cell, StopRule, seed_of
from holdfast_lab.studies.campaign_table import as_json, read_rows
from holdfast_lab.studies.outcomes import are_finite, digest, outcome_of
from holdfast_lab.studies.warm import HeldTraining
from holdfast_lab.workloads import load_dataset, make_model

EPOCHS = 3
"""Epochs before the checkpoint."""
SEED = 0
CELL = "one flip"


# ---------------------------------------------------------------------------------------------
# The work


class Training:
    """A small network on digits."""

    def __init__(self) -> None:
        train, test = load_dataset("digits")
        self.x, self.y = train[list(range(len(train)))]
        self.test_x, self.test_y = test[list(range(len(test)))]
        self.model = make_model("mlp", seed=SEED)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def epoch(self) -> list[float]:
        """Train one epoch, in an order from torch's generator, and return the losses."""
        losses = []
        for batch in torch.randperm(len(self.x)).split(64):
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch])
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of test samples that it classifies correctly."""
        return float((self.model(self.test_x).argmax(1) == self.test_y).float().mean())


def write_checkpoint(path: Path) -> None:
    """Train until the epoch of the restart, and one more epoch undisturbed."""
    torch.manual_seed(SEED)
    training = Training()
    for _ in range(EPOCHS):
        training.epoch()
    state = {
        "model": {name: tensor.clone() for name, tensor in training.model.state_dict().items()},
        "optimizer": training.optimizer.state_dict(),
        "generator": torch.get_rng_state(),
    }
    held = HeldTraining(training.model, training.optimizer)
    training.epoch()
    undisturbed = training.accuracy()
    held.restore()
    torch.save(state | {"undisturbed": undisturbed}, path)


def prepare(settings: Mapping[str, Any]) -> tuple[Training, HeldTraining, float]:
    """Restart from the checkpoint."""
    training = Training()
    state = torch.load(settings["checkpoint"])
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generator"])
    return training, HeldTraining(training.model, training.optimizer), state["undisturbed"]


def trial(warm: tuple[Training, HeldTraining, float], seed: int) -> dict[str, Any]:
    """Flip a bit of a weight, and train for an epoch."""
    training, held, undisturbed = warm
    held.restore()
    chance = random.Random(seed)
    tensors = dict(training.model.named_parameters())
    layer = chance.choice(list(tensors))
    bits = tensors[layer].data.view(torch.int32).view(-1)
    index, bit = chance.randrange(len(bits)), chance.randrange(32)
    bits[index] ^= -(2**31) if bit == 31 else 1 << bit
    losses = training.epoch()
    accuracy = training.accuracy()
    return {
        "outcome": outcome_of(accuracy, undisturbed, finite=are_finite(losses, training.model.parameters())),
        "accuracy": accuracy,
        "layer": layer,
        "bit": bit,
        "digest": digest(training.model.state_dict()),
    }


# ---------------------------------------------------------------------------------------------
# The two ways


def warm_processes(checkpoint: Path, path: Path, trials: int, processes: int) -> float:
    """Return the number of trials an hour of a campaign."""
    campaign = Campaign(
        name="benchmark",
        seed=SEED,
        cells=[Cell(CELL, {"checkpoint": str(checkpoint)})],
        prepare=prepare,
        trial=trial,
        stop=StopRule(width=0, batch=max(100, trials // 4), least=trials, most=trials),
    )
    begun_s = time.perf_counter()
    run_campaign(campaign, path, processes)
    return trials / (time.perf_counter() - begun_s) * 3600


def new_processes(checkpoint: Path, trials: int, processes: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the number of trials an hour with new processes, and their results."""

    def one(number: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--one", str(number), "--checkpoint", str(checkpoint)]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    begun_s = time.perf_counter()
    with ThreadPoolExecutor(processes) as threads:
        found = list(threads.map(one, range(trials)))
    return trials / (time.perf_counter() - begun_s) * 3600, found


def one_trial(checkpoint: str, number: int) -> str:
    """Do the work of a process that runs a single trial."""
    torch.set_num_threads(1)
    return as_json(trial(prepare({"checkpoint": checkpoint}), seed_of(SEED, CELL, number)))


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the trials an hour of both methods, one value for each round."""
    rates: dict[str, list[float]] = {"warm": [], "new": []}
    with tempfile.TemporaryDirectory() as place:
        checkpoint = Path(place) / "checkpoint.pt"
        write_checkpoint(checkpoint)
        for number in range(options.rounds):
            path = Path(place) / f"{number}.db"
            rates["warm"].append(warm_processes(checkpoint, path, options.trials, options.processes))
            rate, found = new_processes(checkpoint, options.alone, options.processes)
            rates["new"].append(rate)
            same = [{name: row[name] for name in alone} for alone, row in zip(found, read_rows(path), strict=False)]
            if same != found:
                raise RuntimeError(f"the two methods give different results: {same} and {found}")
    return rates


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, trials=1000, alone=8, rounds=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(one_trial(options.checkpoint, options.one))
        return
    torch.set_num_threads(1)
    rates = measure(options)
    times = ratio(rates["warm"], rates["new"], paired=True)
    rows = [(name, *cells(found, 0, keys=("p50", "min", "max"))) for name, found in rates.items()]
    print(table("Trials an hour", ("processes", "median", "least", "most"), rows))
    print(f"\n{interval(times, 1)} times as many")
    write_json(options.json, settings=vars(options), trials_an_hour=rates, ratio=times)


if __name__ == "__main__":
    main()
