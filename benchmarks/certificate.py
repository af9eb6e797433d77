"""What the certificate costs: the same session with it and without.

    python benchmarks/certificate.py [--workers 2] [--models mlp] [--blocks 30] [--steps 256] [--json FILE]

=======  ==============================================================================================================
variant  what runs besides the training
=======  ==============================================================================================================
without  nothing
with     a window of the weights, of the optimizer's state and of the buffers is hashed in each step, everything once in 256
=======  ==============================================================================================================

Both write their records to a file, as under the launcher, train in the same processes and take turns, block by block, in another
order each time. A block is as long as it takes to hash everything once, and counts by its mean step. The ratio is taken within a
round; the interval is that of the median of these ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, ratio, spread, table, write_json
from models import JOBS, loss_of, make_model, make_optimizer

import holdfast
from holdfast.comm import Communicator, connect

VARIANTS = ("without", "with")
WARM_UP_STEPS = 20
START_S = 300.0


def main() -> None:
    """Start the job, print its table."""
    options = parse()
    if options.work:
        work(options)
        return
    results = {}
    for model, workers in itertools.product(options.models, options.workers):
        results[f"{model}, {workers}"] = found = run_job(options, model, workers)
        show(model, workers, found)
    write_json(options.json, settings=vars(options), results=results)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="+", choices=sorted(JOBS), default=["mlp"])
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--work", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_job(options: argparse.Namespace, model: str, workers: int) -> dict[str, Any]:
    """Run one job and return what its first worker found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [
            str(Path(sys.executable).with_name("mpirun")), "--with-ft", "ulfm", "--oversubscribe",
            "--mca", "coll", "^han", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "-n", str(workers),
            sys.executable, str(Path(__file__).resolve()), "--models", model, "--blocks", str(options.blocks),
            "--steps", str(options.steps), "--work", str(out),
        ]  # fmt: skip
        limit_s = START_S + 2.0 * len(VARIANTS) * (options.blocks * options.steps + WARM_UP_STEPS)
        subprocess.run(command, check=True, timeout=limit_s, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- in each worker


def train(variant: str, name: str, comm: Communicator, folder: str) -> Iterator[None]:
    """Train for ever, one step each time the next is asked for."""
    job = JOBS[name]
    model = make_model(name)
    run_dir = Path(folder, variant)
    run_dir.mkdir(exist_ok=True)
    session = holdfast.Session(
        model,
        make_optimizer(name, model),
        comm=comm,
        guard="off",
        certificate=variant == "with",
        run_dir=str(run_dir),
        hang_timeout_s=0.0,
    )
    dataset = job.data(job.samples * len(comm.members) * 4, None)
    for step in session.steps(dataset, job.samples * len(comm.members), epochs=1_000_000, shuffle=False):
        for x, y in step:
            step.backward(loss_of(model, x, y))
        yield


def work(options: argparse.Namespace) -> None:
    """Train all variants in turns; the first worker writes what it found."""
    torch.set_num_threads(1)
    (name,) = options.models
    comms = {variant: connect("ulfm", 0, "") for variant in VARIANTS}
    running = {variant: train(variant, name, comm, str(Path(options.work).parent)) for variant, comm in comms.items()}
    for steps in running.values():
        for _ in range(WARM_UP_STEPS):
            next(steps)
    rng = random.Random(0)
    blocks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.blocks):
        for variant in rng.sample(VARIANTS, len(VARIANTS)):
            blocks[variant].append(time_block(running[variant], options.steps, comms[variant]))
    if comms["without"].here[0] == 0:
        Path(options.work).write_text(json.dumps({"blocks": blocks}))
    comms["without"].barrier()
    sys.stdout.flush()
    os._exit(0)  # training has no end here


def time_block(steps: Iterator[None], number: int, comm: Communicator) -> float:
    """Return the mean step of a block, seconds; all workers begin it together."""
    comm.barrier()
    next(steps)
    begun = time.perf_counter()
    for _ in range(number):
        next(steps)
    return (time.perf_counter() - begun) / number


# -- the table


def show(model: str, workers: int, found: dict[str, Any]) -> None:
    """Print it."""
    blocks = found["blocks"]
    rows = []
    for variant in VARIANTS:
        times = spread([1e3 * t for t in blocks[variant]])
        cells = [f"{times[key]:.2f}" for key in ("p50", "p10", "p90")]
        quotients = [a / b for a, b in zip(blocks[variant], blocks["without"], strict=True)]
        paired = ratio(quotients, [1.0] * len(quotients))
        rows.append([variant, *cells, f"{paired['ratio']:.3f} ({paired['low']:.3f}-{paired['high']:.3f})"])
    title = f"\n{model}, {workers} workers on {os.cpu_count()} cores, blocks of steps; ms"
    print(table(title, ["variant", "step p50", "p10", "p90", "against without"], rows))


if __name__ == "__main__":
    main()
