"""The cost of a step of a thousand virtual workers with batched slices, relative to a plain loop on the same batch.

    python benchmarks/step/batched.py [--workers 1000] [--batch 1000] [--rounds 12] [--json FILE]

Three trainings take turns, a block of steps each: the plain loop (without Holdfast), one virtual worker, and
``--workers``; each ratio is taken within a round. Times are processor time of this process, with one torch thread, so
that the results of a busy machine are usable too. The last line is a step in which a worker dies under ``forward``; a
run has one for each failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from common import cells, command_line, interval, ratio, spread, table, take_turns, write_json
from torch.utils.data import TensorDataset

from holdfast.faults.plan import FaultPlan, parse
from holdfast_lab.virtual_ddp.training import VirtualDdp
from holdfast_lab.workloads import make_model, make_optimizer

BLOCK = 10
"""Steps in a block."""


def samples(number: int, side: int) -> TensorDataset:
    """Return images of noise: their content does not affect the cost."""
    return TensorDataset(torch.rand(number, 1, side, side), torch.randint(0, 10, (number,)))


def plain(model: torch.nn.Module, data: TensorDataset, batch: int) -> Iterator[None]:
    """Train by the usual loop, one step for each item."""
    optimizer = make_optimizer("sgd", model.parameters())
    while True:
        order = torch.randperm(len(data))
        for start in range(0, len(data), batch):
            x, y = (tensor[order[start : start + batch]] for tensor in data.tensors)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield


def batched(model: torch.nn.Module, data: TensorDataset, batch: int, workers: int, faults: str = "") -> Iterator[None]:
    """Train by virtual workers, one step for each item."""
    trainer = VirtualDdp(
        model,
        make_optimizer("sgd", model.parameters()),
        workers=workers,
        strategy="forward",
        faults=faults,
        bucket_bytes=1 << 14,
    )
    for step in trainer.steps(data, batch, 1 << 20):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        yield


def block(training: Iterator[None], steps: int = BLOCK) -> float:
    """Return the processor time of a step, in seconds."""
    begun_s = time.process_time()
    for _ in range(steps):
        next(training)
    return (time.process_time() - begun_s) / steps


def measure(name: str, side: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a network, by method of training."""
    data = samples(4 * options.batch, side)
    kills = [f"kill:rank={rank},step={rank},phase=allreduce,bucket=0" for rank in range(1, options.workers // 2)]

    def model() -> torch.nn.Module:
        return make_model(name, 10, image=(1, side), seed=0)

    trainings = {
        "plain loop": plain(model(), data, options.batch),
        "1 worker": batched(model(), data, options.batch, 1),
        f"{options.workers} workers": batched(model(), data, options.batch, options.workers),
        "a death in each step": batched(
            model(), data, options.batch, options.workers, FaultPlan(tuple(map(parse, kills))).to_json()
        ),
    }
    return take_turns({key: lambda each=each: block(each) for key, each in trainings.items()}, options.rounds)


def main() -> None:
    """Measure, and print a table."""
    options = command_line(__doc__, workers=1000, batch=1000, rounds=12).parse_args()
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    found: dict[str, Any] = {}
    for name, side in (("mlp", 8), ("mlp", 28), ("cnn", 8)):
        taken = measure(name, side, options)
        base = taken["plain loop"]
        for key, values in taken.items():
            against = ratio(values, base, paired=True)
            found[f"{name} {side}, {key}"] = {"step_s": spread(values), "ratio": against}
            lines.append(
                [f"{name} {side} x {side}", key, *cells(values, scale=1e3, keys=["p50"]), interval(against, 3)]
            )
    title = f"a step of {options.batch} samples, processor time"
    print(table(title, ["network", "trained by", "step, ms", "times the plain loop"], lines))
    write_json(options.json, **found)


if __name__ == "__main__":
    main()
