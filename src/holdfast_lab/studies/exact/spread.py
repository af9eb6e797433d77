"""Benefit of exactness: the spread of final results of one training with random failures, for each failure policy.

All runs have the same initial weights, samples, order and slices; only the failures (ranks and steps) are random. Any
difference between two results is therefore caused by failures.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.faults.plan import Fault, FaultPlan
from holdfast_lab.studies.base import MEASURED, Options, Row, Task
from holdfast_lab.studies.pool import WorkerPool
from holdfast_lab.studies.stats import bootstrap
from holdfast_lab.workloads import load_dataset, loss_of, make_model
from holdfast_lab.workloads.train import accuracy

ROLLBACK, RESTART, EVEN, FORWARD, SKIP = POLICIES = ("rollback", "restart", "even split", "forward", "skip")
"""Failure policies; ``skip`` is torchft's: all workers discard the step and continue with the next mini-batch."""
EXACT = (ROLLBACK, RESTART)
"""Policies that guarantee the bits of the failure-free training."""
NOTHING = "nothing happens"

WORKERS = 8
_EVERY = 10
"""Steps between two checkpoints under ``restart``; no worker fails before the first."""
_BUCKET_BYTES = 20_000
"""Small enough that a step has several all-reduces, so that a failure can fall between two of them."""
_PLACES = (("backward", None), ("allreduce", None), ("allreduce", 0), ("allreduce", 1))
"""Phases in which a worker may fail, and the last bucket that was all-reduced before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadTraining:
    """A training configuration.

    Args:
        network: Name of the network.
        dataset: Name of the dataset.
        batch: Mini-batch size in samples, a multiple of :data:`WORKERS`.
        steps: Number of steps.
        rate: Learning rate of SGD with momentum 0.9.
        samples: Number of samples of the dataset to use; None: all.
    """

    network: str
    dataset: str
    batch: int = 128
    steps: int = 120
    rate: float = 0.05
    samples: int | None = None

    @property
    def name(self) -> str:
        """Return a description."""
        return f"{self.network}, {self.dataset}"


QUICK = (SpreadTraining(network="mlp", dataset="digits", steps=40),)
INSIDE = (SpreadTraining(network="mlp", dataset="digits"), SpreadTraining(network="cnn", dataset="digits", steps=90))
READ = (SpreadTraining(network="cnn", dataset="fashion", steps=150, samples=20_000),)
"""Need ``--data``."""


@dataclass(frozen=True, slots=True)
class PlannedDeath:
    """A failure: rank, step, phase, and the last bucket that was all-reduced before."""

    rank: int
    step: int
    phase: str
    bucket: int | None

    def __str__(self) -> str:
        behind = "" if self.bucket is None else f" after bucket {self.bucket}"
        return f"{self.rank} in step {self.step}, {self.phase}{behind}"


def draw_deaths(steps: int, seed: int, run: int) -> list[PlannedDeath]:
    """Return one to five failures of eight workers, each in a different step; they are the same for all policies."""
    rng = random.Random(f"{seed}/{run}")
    count = rng.randint(1, 5)
    ranks, when = rng.sample(range(WORKERS), count), sorted(rng.sample(range(_EVERY + 1, steps - 1), count))
    return [PlannedDeath(rank, step, *rng.choice(_PLACES)) for rank, step in zip(ranks, when, strict=True)]


def spread_tasks(trainings: Sequence[SpreadTraining], runs: int, options: Options) -> list[Task]:
    """Return one task per training and policy, the failure-free run first; with ``--quick`` one task per training."""
    everything = (NOTHING, *POLICIES)
    if options.quick:
        return [Task(f"spread: {one.name}", partial(_train_all, one, everything, runs, options)) for one in trainings]
    return [
        Task(f"spread: {one.name}, {policy}", partial(_train_all, one, (policy,), runs, options))
        for one in trainings
        for policy in everything
    ]


def _train_all(
    training: SpreadTraining, policies: Sequence[str], runs: int, options: Options, _: Sequence[Row]
) -> list[Row]:
    asked = [(policy, run) for policy in policies for run in range(1 if policy == NOTHING else runs)]
    with WorkerPool(preload=[__name__]) as workers:
        return workers.rows(partial(_train, training, options.data, options.seed), asked)


def _train(training: SpreadTraining, data: Path | None, seed: int, asked: tuple[str, int]) -> list[Row]:
    return [train(training, data, seed, *asked)]


def train(training: SpreadTraining, data: Path | None, seed: int, policy: str, run: int) -> Row:
    """Train once and return the row with the failures and the result.

    Args:
        training: The training configuration.
        data: Directory of datasets that are read from files.
        seed: Seed of the weights, of the sample order and, together with ``run``, of the failures.
        policy: One of :data:`POLICIES`, or :data:`NOTHING`.
        run: Number of the run.
    """
    torch.set_deterministic_debug_mode("error")
    samples, test, (channels, side, _), classes = _data(training, data, seed)
    deaths = [] if policy == NOTHING else draw_deaths(training.steps, seed, run)
    model = make_model(training.network, classes, image=(channels, side), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.rate, momentum=0.9)
    if policy == SKIP:
        samples = without(samples, training.batch, [death.step for death in deaths])
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as folder:
        settings = _settings(policy, [] if policy == SKIP else deaths, Path(folder))
        session = holdfast.Session(model, optimizer, seed=seed, **settings)
        with contextlib.redirect_stderr(io.StringIO()):  # a session logs the lost ranks
            for step in session.steps(samples, training.batch, shuffle=False):
                for x, y in step:
                    step.backward(loss_of(model(x), y))
    row: Row = {"part": "spread", "status": MEASURED, "training": training.name, "policy": policy, "run": run}
    row |= {"deaths": len(deaths), "struck": "; ".join(map(str, deaths)), "steps": session.step}
    return row | {"accuracy": 100 * accuracy(model, test), "loss": _loss(model, test), "sha256": _sha256(model)}


def _settings(policy: str, deaths: Sequence[PlannedDeath], folder: Path) -> dict[str, Any]:
    faults = FaultPlan(tuple(Fault("kill", rank=d.rank, step=d.step, phase=d.phase, bucket=d.bucket) for d in deaths))
    found: dict[str, Any] = {"fabric": "virtual", "workers": WORKERS, "guard": "off", "bucket_bytes": _BUCKET_BYTES}
    found |= {"strategy": policy if policy in (FORWARD, RESTART) else ROLLBACK}
    found |= {"split": "even" if policy == EVEN else "slices", "faults": faults.to_json() if deaths else ""}
    if policy == RESTART:
        found |= {"checkpoint_dir": str(folder), "checkpoint_every": _EVERY}
    return found


@functools.lru_cache(maxsize=1)
def _data(training: SpreadTraining, data: Path | None, seed: int) -> tuple[TensorDataset, Any, tuple[int, ...], int]:
    """Return the samples of all steps in order, test samples, the shape of a sample, and the number of classes."""
    dataset = load_dataset(training.dataset, data, limit=training.samples)
    generator = torch.Generator().manual_seed(seed)
    needed = training.batch * training.steps
    epochs = -(-needed // len(dataset.train))
    index = torch.cat([torch.randperm(len(dataset.train), generator=generator) for _ in range(epochs)])[:needed]
    return TensorDataset(*dataset.train[index]), dataset.test, dataset.shape, dataset.num_classes


def without(samples: TensorDataset, batch: int, steps: Sequence[int]) -> TensorDataset:
    """Return the samples without the mini-batches of some steps, which then never reach the weights."""
    index = torch.arange(len(samples))
    kept = index[~torch.isin(index // batch, torch.tensor(steps, dtype=torch.int64))]
    return TensorDataset(*samples[kept])


@torch.no_grad()
def _loss(model: nn.Module, test: Any) -> float:
    model.eval()
    chunks = [test[start : start + 1000] for start in range(0, len(test), 1000)]
    return sum(float(loss_of(model(x), y)) * len(y) for x, y in chunks) / len(test)


def _sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def spreads(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the spread of results for each training and policy: standard deviations with bootstrap intervals."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for one in rows:
        if one["part"] == "spread" and one["status"] == MEASURED:
            groups.setdefault((one["training"], one["policy"]), []).append(one)
    found: list[Row] = []
    for (training, policy), mine in groups.items():
        undisturbed = groups.get((training, NOTHING), [])
        if policy == NOTHING or not undisturbed or len(mine) < 2:
            continue
        base = undisturbed[0]
        row: Row = {"training": training, "policy": policy, "runs": len(mine), "status": MEASURED}
        row |= {"hashes": len({one["sha256"] for one in mine})}
        row |= {"same": sum(one["sha256"] == base["sha256"] for one in mine)}
        for name in ("accuracy", "loss"):
            values = [one[name] for one in mine]
            low, high = bootstrap([values], lambda drawn: statistics.stdev(drawn[0]), seed)
            row |= {name: statistics.fmean(values), f"{name}_sd": statistics.stdev(values)}
            row |= {f"{name}_sd_low": low, f"{name}_sd_high": high}
            row |= {f"{name}_least": min(values), f"{name}_most": max(values)}
        found.append(row)
    return found
