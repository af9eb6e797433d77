"""Shared by benchmarks that train variants of one job in the same processes and in turns, block by block.

Such a benchmark restarts itself under mpirun, with ``--work FILE``. There each worker trains all variants, and the
first worker writes the step times of each block to the file. Ratios are taken within a round, so that drift of the
machine affects all variants.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from common import ROOT, command_line, ratio, spread, table, write_json
from models import JOBS, loss_of, make_model, make_optimizer
from torch import nn

import holdfast
from holdfast.comm import Communicator, connect

Blocks = dict[str, list[float]]
"""For each variant, the step time in each block, in seconds."""
START_S = 300.0
ROUND_STEP_S = 10.0
"""Upper bound of the time that one step of all variants takes, in seconds."""


def make_parser(
    doc: str | None, *, steps: int, workers: Sequence[int] = (2,), models: Sequence[str] = ("mlp",)
) -> argparse.ArgumentParser:
    """Return a parser of the common options, with these defaults."""
    parser = command_line(doc, blocks=30)
    parser.add_argument("--workers", type=int, nargs="+", default=list(workers))
    parser.add_argument("--models", nargs="+", choices=sorted(JOBS), default=list(models))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--work", metavar="FILE", help=argparse.SUPPRESS)
    return parser


def run_jobs(options: argparse.Namespace, *words: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Run one job after another; write all results, including additions to them, at the end.

    Args:
        options: The command line.
        words: Options of this benchmark that its workers need too.

    Yields:
        The model, the number of workers, and the results of the first of them.
    """
    results = {}
    for model, workers in itertools.product(options.models, options.workers):
        results[f"{model}, {workers}"] = found = _run_job(options, model, workers, words)
        yield model, workers, found
    write_json(options.json, settings=vars(options), results=results)


def _run_job(options: argparse.Namespace, model: str, workers: int, words: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [
            str(Path(sys.executable).with_name("mpirun")), "--with-ft", "ulfm", "--oversubscribe",
            "--mca", "coll", "^han", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "-n", str(workers),
            sys.executable, str(Path(sys.argv[0]).resolve()), "--models", model, "--blocks", str(options.blocks),
            "--steps", str(options.steps), *words, "--work", str(out),
        ]  # fmt: skip
        limit_s = START_S + ROUND_STEP_S * options.blocks * (options.steps + 1)
        subprocess.run(command, check=True, timeout=limit_s, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- in each worker


def connect_each(variants: Sequence[str]) -> dict[str, Communicator]:
    """Return a communicator for each variant."""
    torch.set_num_threads(1)
    return {variant: connect("ulfm") for variant in variants}


def train(name: str, comm: Communicator, **settings: Any) -> Iterator[None]:
    """Train forever, one step for each item.

    Args:
        name: Name of the job.
        comm: Communicator of this variant.
        settings: Settings of its session.
    """
    model = make_model(name)
    session = holdfast.Session(model, make_optimizer(name, model), comm=comm, **settings)
    return steps_of(session, name, comm, by_slices(model))


def steps_of(
    session: holdfast.Session, name: str, comm: Communicator, compute: Callable[[holdfast.Step], None]
) -> Iterator[None]:
    """Train a session of a job forever; each step is computed by ``compute``."""
    job, samples = JOBS[name], JOBS[name].samples * len(comm.members)
    for step in session.steps(job.data(samples * 4, None), samples, epochs=1_000_000, shuffle=False):
        compute(step)
        yield


def by_slices(model: nn.Module) -> Callable[[holdfast.Step], None]:
    """Return a function that computes a step of a model, slice by slice."""

    def compute(step: holdfast.Step) -> None:
        for x, y in step:
            step.backward(loss_of(model, x, y))

    return compute


def take_turns(
    options: argparse.Namespace, running: Mapping[str, Iterator[None]], comms: Mapping[str, Communicator],
    warm_up_steps: int, typical: Callable[[Sequence[float]], float] = statistics.fmean,
) -> Blocks:  # fmt: skip
    """Return step times, with the variants in a different order in each round.

    Args:
        options: Number of blocks, and of steps in each.
        running: The variants, each training.
        comms: Their communicators.
        warm_up_steps: Steps of each variant before the first block.
        typical: Reduces the step times of a block to one value.
    """
    for steps in running.values():
        for _ in range(warm_up_steps):
            next(steps)
    rng, blocks = random.Random(0), {variant: [] for variant in running}
    for _ in range(options.blocks):
        for variant in rng.sample(list(running), len(running)):
            times = _time_block(running[variant], options.steps, comms[variant])
            blocks[variant].append(typical(times))
    return blocks


def _time_block(steps: Iterator[None], number: int, comm: Communicator) -> list[float]:
    """Return the step times of a block in seconds; all workers begin it together."""
    comm.barrier()
    next(steps)
    at = [time.perf_counter()]
    for _ in range(number):
        next(steps)
        at.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(at)]


def leave(options: argparse.Namespace, comm: Communicator, found: Mapping[str, Any]) -> NoReturn:
    """Let the first worker write its results, and exit: training here has no end."""
    if comm.local_ranks[0] == 0:
        Path(options.work).write_text(json.dumps(found))
    comm.barrier()
    sys.stdout.flush()
    os._exit(0)


# -- the table


def show_turns(model: str, workers: int, blocks: Blocks, against: Mapping[str, str], what: str = "") -> None:
    """Print the step times.

    Args:
        model: The job.
        workers: Number of workers.
        blocks: The measurements.
        against: For each variant, its baseline.
        what: Further description of the job, for the title.
    """
    rows = []
    for variant, times in blocks.items():
        around = spread([1e3 * t for t in times])
        quotients = [a / b for a, b in zip(times, blocks[against[variant]], strict=True)]
        paired = ratio(quotients, [1.0] * len(quotients))
        interval = f"{paired['ratio']:.3f} ({paired['low']:.3f}-{paired['high']:.3f})"
        rows.append([variant, *(f"{around[key]:.2f}" for key in ("p50", "p10", "p90")), against[variant], interval])
    title = f"\n{model}, {workers} workers on {os.cpu_count()} cores, {what}blocks of steps; ms"
    print(table(title, ["variant", "step p50", "p10", "p90", "against", "ratio"], rows))
