"""Train a network on several workers without protection, by MPI alone: one all-reduce of all gradients per step.

Rank 0 writes the seconds of a step to ``--out``, as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from mpi4py import MPI

from holdfast_lab.workloads import RECIPES, loss_of, make_model, make_optimizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the training that ``arguments`` describe."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    x, y = (torch.from_numpy(np.load(options.data / f"{name}.npy", mmap_mode="r").copy()) for name in "xy")
    channels, side = x.shape[1:3]
    model = make_model(options.network, 10, image=(channels, side), seed=0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    recipe = RECIPES.get(options.network)
    optimizer = recipe.optimizer(parameters) if recipe else make_optimizer("sgd", parameters)
    mine = options.batch // comm.size
    total = torch.empty(sum(p.numel() for p in parameters))
    times_s = []
    for step in range(options.steps):
        begun_s = time.perf_counter()
        first = (step * options.batch + comm.rank * mine) % (len(x) - mine)
        optimizer.zero_grad()
        loss_of(model(x[first : first + mine]), y[first : first + mine]).backward()
        flat = torch.cat([_gradient(p).reshape(-1) for p in parameters])
        comm.Allreduce(flat.numpy(), total.numpy())
        total /= comm.size
        for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            _gradient(parameter).copy_(part.view_as(parameter))
        optimizer.step()
        times_s.append(time.perf_counter() - begun_s)
    if comm.rank == 0:
        options.out.write_text(json.dumps({"step_s": median(times_s[1:] or times_s), "parameters": total.numel()}))


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plain.py", description=__doc__)
    parser.add_argument("--network", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy and y.npy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples per mini-batch, over all workers")
    parser.add_argument("--steps", type=int, required=True)
    return parser


if __name__ == "__main__":
    main()
