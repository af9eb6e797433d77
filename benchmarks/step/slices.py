"""The cost of smaller slices. One process, one thread.

A worker's samples in 1 to 16 slices, in sessions that loop over the slices, with a forward and a backward pass for each.
They train in turns.

With ``--any-order`` only the exact addition is measured: eight slices beside the same eight backward passes that autograd
accumulates in one gradient, in the same session, as a single slice. That is addition in any order: a worker's samples
are then one term, whatever their number, so the result depends on which worker has them.

    python benchmarks/step/slices.py [--blocks N] [--models digits mlp cnn transformer] [--any-order] [--json FILE]

Times are processor time; ratios are taken within a block, with the 95 % interval of the median by bootstrap.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import cells, command_line, take_turns, times, write_json
from models import JOBS, make_model, mean_loss
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


def measure(name: str, trainings: Mapping[str, Training], base: str, blocks: int) -> dict[str, list[float]]:
    """Print the time of a step of each training, and how many times that of ``base`` it is."""
    each_s = min(one.advance(FIRST_STEPS) for one in trainings.values())
    steps = max(2, round(STEP_S / each_s))
    taken = take_turns({way: lambda one=one: one.advance(steps) for way, one in trainings.items()}, blocks, warm_up=0)
    for way, taken_s in taken.items():
        to = times(taken_s, taken[base])
        print(f"{name}, {way}: {cells(taken_s, scale=1e3, keys=['p50'])[0]} ms, to {base} {to}", flush=True)
    for one in trainings.values():
        one.close()
    return taken


def main() -> None:
    """Print the times."""
    names = [DIGITS, "mlp", "cnn", "transformer"]
    given = command_line(
        __doc__, blocks=20, models=(names, None, names),
        any_order=(False, "compare with addition in any order, and nothing else"),
    ).parse_args()  # fmt: skip
    torch.set_num_threads(1)
    results = {}
    for name in given.models:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            if given.any_order:
                trainings = {"any order": Training(name, 1, folder, passes=EIGHT)}
                trainings |= {order: Training(name, EIGHT, folder, order=order) for order in ("fold", "tree")}
                results[name] = measure(f"{name}, {EIGHT} slices", trainings, "any order", given.blocks)
                continue
            counts = [slices for slices in COUNTS if slices <= len(samples_of(name)[0])]
            trainings = {f"{slices} slice{'s' * (slices > 1)}": Training(name, slices, folder) for slices in counts}
            results[name] = measure(name, trainings, "1 slice", given.blocks)
    write_json(given.json, settings=vars(given), results=results)


if __name__ == "__main__":
    main()
