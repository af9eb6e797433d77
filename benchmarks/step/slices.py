"""The cost of smaller slices. One process, one thread.

A worker's samples in 1 to 16 slices, in sessions that loop over the slices, with a forward and a backward pass for each.
They train in turns.

With ``--any-order`` only the exact addition is measured: eight slices beside the same eight backward passes that autograd
accumulates in one gradient, in the same session, as a single slice. That is addition in any order: a worker's samples
are then one term, whatever their number, so the result depends on which worker has them.

    python benchmarks/step/slices.py [--blocks N] [--models digits mlp cnn transformer] [--any-order]

Times are processor time; ratios are taken within a block, with the 95 % interval of the median by bootstrap.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from common import ratio
from models import JOBS, make_model
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

COUNTS = (1, 2, 4, 8, 16)
EIGHT = 8
"""Slices of a worker where orders are compared."""
DIGITS = "digits"
"""A network of 26 thousand parameters for images of 8 x 8 numbers, whose cost is in calls and not in arithmetic."""
SAMPLES = 128
"""Samples of the worker in a step; a sixteenth of it for text."""
FIRST_STEPS = 5
"""Steps before the first block."""
STEP_S = 0.3
"""Minimum duration of a block in seconds, which decides its number of steps."""


class Training:
    """One worker's session, which trains a few steps at a time.

    Args:
        name: Name of the model.
        slices: Slices of each step.
        folder: Folder for the records.
        order: The order of addition.
        passes: Backward passes of each slice.
    """

    def __init__(self, name: str, slices: int, folder: Path, *, order: str = "auto", passes: int = 1) -> None:
        self.model = model_of(name)
        self._passes = passes
        self._records = folder / f"{name}-{slices}-{order}-{passes}"
        self._records.mkdir()
        x, y = samples_of(name)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        session = holdfast.Session(
            self.model, optimizer, slices=slices, workers=1, order=order, run_dir=str(self._records)
        )
        self._steps = session.steps(TensorDataset(x, y), len(x), 1 << 20, shuffle=False)

    def advance(self, steps: int) -> float:
        """Train some steps; return the processor time of one, in seconds."""
        begun_s = time.process_time()
        for _ in range(steps):
            step = next(self._steps)
            for x, y in step:
                *others, last = zip(x.chunk(self._passes), y.chunk(self._passes), strict=True)
                for xs, ys in others:
                    (mean_loss(self.model(xs), ys) * len(ys)).backward()
                step.backward(mean_loss(self.model(last[0]), last[1]) * (len(last[1]) / len(y)))
        return (time.process_time() - begun_s) / steps

    def close(self) -> None:
        """End the session before the end of training."""
        self._steps.close()


def mean_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a slice."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def model_of(name: str) -> nn.Module:
    """Return a model, with the same weights each time."""
    if name != DIGITS:
        return make_model(name)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def samples_of(name: str) -> tuple[torch.Tensor, ...]:
    """Return the samples of a worker."""
    if name != DIGITS:
        return JOBS[name].data(SAMPLES // 8 if name == "transformer" else SAMPLES, None).tensors
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 64, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


def against(taken_s: list[float], other_s: list[float]) -> str:
    """Return the ratio of the times, with the 95 % interval."""
    found = ratio(taken_s, other_s, paired=True)
    return f"{found['ratio']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def measure(name: str, counts: list[int], blocks: int, folder: Path) -> None:
    """Print the cost of slices."""
    trainings = {slices: Training(name, slices, folder) for slices in counts}
    each_s = min(one.advance(FIRST_STEPS) for one in trainings.values())
    times: dict[int, list[float]] = {slices: [] for slices in trainings}
    for _ in range(blocks):
        for slices in random.sample(list(trainings), len(trainings)):
            times[slices].append(trainings[slices].advance(max(2, round(STEP_S / each_s))))
    for slices, taken_s in times.items():
        median_ms = statistics.median(taken_s) * 1e3
        print(f"{name}, {slices} slices: {median_ms:.2f} ms, to 1 slice {against(taken_s, times[1])}")
    for one in trainings.values():
        one.close()


def measure_any_order(name: str, blocks: int, folder: Path) -> None:
    """Print the times of exact addition, to those of addition in any order."""
    made: dict[str, Training] = {"any order": Training(name, 1, folder, passes=EIGHT)}
    for order in ("fold", "tree"):
        made[order] = Training(name, EIGHT, folder, order=order)
    each_s = min(one.advance(FIRST_STEPS) for one in made.values())
    times: dict[str, list[float]] = {way: [] for way in made}
    for _ in range(blocks):
        for way in random.sample(list(made), len(made)):
            times[way].append(made[way].advance(max(2, round(STEP_S / each_s))))
    for way, taken_s in times.items():
        print(
            f"{name}, {EIGHT} slices, {way}: {statistics.median(taken_s) * 1e3:.2f} ms,"
            f" to any order {against(taken_s, times['any order'])}",
            flush=True,
        )
    for one in made.values():
        one.close()


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, metavar="N")
    names = [DIGITS, "mlp", "cnn", "transformer"]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--any-order", action="store_true", help="compare with addition in any order, and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        if given.any_order:
            with tempfile.TemporaryDirectory() as folder:
                measure_any_order(name, given.blocks, Path(folder))
            continue
        counts = [slices for slices in COUNTS if slices <= len(samples_of(name)[0])]
        with tempfile.TemporaryDirectory() as folder:
            measure(name, counts, given.blocks, Path(folder))


if __name__ == "__main__":
    main()
