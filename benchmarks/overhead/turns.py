"""Shared by benchmarks that train variants of one job in the same processes and in turns, block by block.

Such a benchmark restarts itself under mpirun, with ``--work FILE``. There each worker trains all variants, and the
first worker writes the step times of each block to the file. A block is represented by its mean step. Ratios are taken
within a round, so that drift of the machine affects all variants; the interval is that of the median of these ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from common import ROOT, cells, command_line, environment, interval, ratio, table, take_turns, write_json
from models import JOBS, loss_of, make_model, make_optimizer
from torch import nn

import holdfast
from holdfast.comm import Communicator, connect
from holdfast.comm.fabrics.ulfm import mpirun_command

Blocks = dict[str, list[float]]
"""For each variant, the step time in each block, in seconds."""
START_S = 300.0
ROUND_STEP_S = 10.0
"""Upper bound of the time that one step of all variants takes, in seconds."""


def make_parser(
    doc: str | None, *, steps: int, workers: Sequence[int] = (2,), models: Sequence[str] = ("mlp",)
) -> argparse.ArgumentParser:
    """Return a parser of the common options, with these defaults."""
    parser = command_line(doc, blocks=30, workers=list(workers), models=(list(models), None, sorted(JOBS)), steps=steps)
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
            *mpirun_command(workers), sys.executable, str(Path(sys.argv[0]).resolve()), "--models", model, "--blocks", str(options.blocks),
            "--steps", str(options.steps), *words, "--work", str(out),
        ]  # fmt: skip
        limit_s = START_S + ROUND_STEP_S * options.blocks * (options.steps + 1)
        subprocess.run(command, check=True, timeout=limit_s, cwd=ROOT, env=environment())
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- in each worker


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


def train_in_turns(
    options: argparse.Namespace,
    start: Callable[[str, str, Communicator], Iterator[None]],
    variants: Sequence[str],
    warm_up_steps: int,
    typical: Callable[[Sequence[float]], float] = statistics.fmean,
    more: Callable[[], Mapping[str, Any]] = dict,
) -> NoReturn:
    """Be a worker: train the variants, in a different order in each round; the first worker writes the results.

    Args:
        options: Number of blocks, and of steps in each.
        start: Called with a variant, the job and a communicator: trains forever, one step for each item.
        variants: The variants.
        warm_up_steps: Steps of each variant before the first block.
        typical: Reduces the step times of a block to one value.
        more: Returns further results; called after the last block.
    """
    torch.set_num_threads(1)
    (name,) = options.models
    comms = {variant: connect("ulfm") for variant in variants}
    running = {variant: start(variant, name, comm) for variant, comm in comms.items()}
    for steps in running.values():
        for _ in range(warm_up_steps):
            next(steps)
    block = {
        variant: lambda steps=steps, comm=comms[variant]: typical(_time_block(steps, options.steps, comm))
        for variant, steps in running.items()
    }
    _leave(options, comms[variants[0]], {"blocks": take_turns(block, options.blocks, warm_up=0)} | dict(more()))


def _time_block(steps: Iterator[None], number: int, comm: Communicator) -> list[float]:
    """Return the step times of a block in seconds; all workers begin it together."""
    comm.barrier()
    next(steps)
    at = [time.perf_counter()]
    for _ in range(number):
        next(steps)
        at.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(at)]


def _leave(options: argparse.Namespace, comm: Communicator, found: Mapping[str, Any]) -> NoReturn:
    """Let the first worker write the results, and exit: training here has no end."""
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
        quotients = [a / b for a, b in zip(times, blocks[against[variant]], strict=True)]
        to = interval(ratio(quotients, [1.0] * len(quotients), paired=True), 3)
        rows.append([variant, *cells(times, scale=1e3), against[variant], to])
    title = f"\n{model}, {workers} workers on {os.cpu_count()} cores, {what}blocks of steps; ms"
    print(table(title, ["variant", "step p50", "p10", "p90", "against", "ratio"], rows))
