"""Times steps of the same training with the guard and without, as a script that ``mpirun`` starts.

All variants train in the same processes and take turns, block by block, in another order each time. Blocks are longer than
a rotation of the guard, so that each with ``heal`` holds a copy of the whole state; a block counts by its mean step.
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
"""What of the guard is on: the policy, and whether checksums go with what is summed."""
_WARM_UP_STEPS = 70
"""Until fresh memory for two copies has been touched once."""


def main() -> None:
    """Train all variants in turns; the first worker writes how long their blocks took."""
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
    next(off.steps)  # nobody is gone before all are here
    os._exit(0)  # training has no end here


class _Endless:
    """A training whose steps are done one by one, for ever."""

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
    """Return the mean step of a block, seconds; all workers begin it together, because a step ends for all or none."""
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
