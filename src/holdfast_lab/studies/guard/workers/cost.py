"""Times steps of the same training with and without the guard; started by ``mpirun``.

All variants train in the same processes and take turns, block by block, in a different order each round. A block is
longer than a check rotation, so each block with ``heal`` includes a snapshot of the whole state. The result of a block
is its mean step time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import holdfast
from holdfast_lab.workloads import load_dataset, loss_of, make_model, make_optimizer

VARIANTS = {"off": ("off", False), "stop": ("stop", False), "heal": ("heal", False), "heal, sums": ("heal", True)}
"""Guard settings of each variant: the policy, and whether all-reduces carry checksums."""
_WARM_UP_STEPS = 70
"""Enough steps to touch the memory of two snapshots once."""


def main() -> None:
    """Train all variants in turns; rank 0 writes the block times."""
    options = _parse()
    torch.set_num_threads(1)
    sessions = {variant: _Endless(*settings, options) for variant, settings in VARIANTS.items()}
    for session in sessions.values():
        for _ in range(_WARM_UP_STEPS):
            next(session.steps)
    rng = random.Random(0)
    blocks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.blocks):
        for variant in rng.sample(list(VARIANTS), len(VARIANTS)):
            blocks[variant].append(_time_block(sessions[variant].steps, options.steps))
    off = sessions["off"]
    if off.is_lead:
        found = {"blocks": blocks, "parameters": off.parameters}
        Path(options.out).write_text(json.dumps(found))
    next(off.steps)  # a step is a barrier: no process may exit before all have finished
    os._exit(0)  # the generators never end


class _Endless:
    """An endless training, executed step by step."""

    def __init__(self, guard: str, sums: bool, options: argparse.Namespace) -> None:
        data = load_dataset("digits", None, limit=options.samples, size=options.size)
        channels, side, _ = data.shape
        model = make_model(options.network, num_classes=data.num_classes, image=(channels, side), seed=0)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = make_optimizer("sgd", model.parameters())
        session = holdfast.Session(model, optimizer, fabric="ulfm", guard=guard, guard_sums=sums)
        self.is_lead = session.is_lead

        def train() -> Iterator[None]:
            for step in session.steps(data.train, options.batch, epochs=1_000_000, drop_last=True):
                for x, y in step:
                    step.backward(loss_of(model(x), y))
                yield

        self.steps = train()


def _time_block(steps: Iterator[None], number: int) -> float:
    """Return the mean step time of a block in seconds; the step before it synchronizes all workers."""
    next(steps)
    begun_s = time.perf_counter()
    for _ in range(number):
        next(steps)
    return (time.perf_counter() - begun_s) / number


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
