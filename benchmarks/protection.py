"""What being protected costs while nobody dies: the same session with recovery, without it, and adding in any order.

    python benchmarks/protection.py [--workers 2] [--models cnn mlp] [--blocks 30] [--steps 10] [--json FILE]

===========  ==========================================================================================================
variant      what runs
===========  ==========================================================================================================
protected    ``holdfast.Session`` as it is
unprotected  the same session and the same sums; no closing sum, no digest, nothing remembered for taking a step back.
             A failure would end the job
any order    protected, but everybody adds its own term first, so that bits depend on who adds
===========  ==========================================================================================================

All three train in the same processes and take turns, block by block, in another order each time. The ratio of each block's
median step is taken within its round; the interval is that of the median of these ratios. The second table counts what
is sent in a step when sums go by messages, which is where it can be counted.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, ratio, spread, table, write_json
from models import JOBS, loss_of, make_model, make_optimizer

import holdfast
from holdfast.comm import Communicator, adding, connect
from holdfast.testing.counting import CountingCommunicator
from holdfast.train.replica import Replica
from holdfast.train.run import Run

VARIANTS = ("protected", "unprotected", "any order")
WARM_UP_STEPS = 3
START_S = 300.0


def main() -> None:
    """Start the job, print its tables."""
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
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=sorted(JOBS), default=["cnn", "mlp"])
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
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
        limit_s = START_S + 60 * options.blocks
        subprocess.run(command, check=True, timeout=limit_s, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- in each worker


class Unprotected(Run):
    """Applies a step after its last sum."""

    def _close(self, step: int) -> bool:
        """Go on without having heard whether all have all."""
        return True


class Forgetful(Replica):
    """Remembers nothing of a step's beginning but the buffers, which slices start from."""

    def begin_step(self) -> None:
        """Only make room."""
        self._reset()
        self.buckets.buffers.begin_step()


def own_term_first(rank: int) -> Any:
    """Return what adds in an order that depends on who adds."""

    def add(terms: Any, out: torch.Tensor) -> None:
        turned = [*terms[rank % len(terms) :], *terms[: rank % len(terms)]]
        adding.fold(turned, out)

    return add


def train(variant: str, name: str, comm: Communicator, **settings: Any) -> Iterator[None]:
    """Train for ever, one step each time the next is asked for."""
    if variant == "any order":
        adding.ORDERS["tree"] = own_term_first(comm.here[0])  # under a name that settings allow
        settings["order"] = "tree"
    job = JOBS[name]
    model = make_model(name)
    session = holdfast.Session(model, make_optimizer(name, model), comm=comm, **settings)
    if variant == "unprotected":
        session._replica.__class__ = Forgetful
    dataset = job.data(job.samples * len(comm.members) * 4, None)
    steps = session.steps(dataset, job.samples * len(comm.members), epochs=1_000_000, shuffle=False)
    for step in steps:
        for x, y in step:
            step.backward(loss_of(model, x, y))
        yield
        if variant == "unprotected":
            _take_closing_sum_away(steps)


def _take_closing_sum_away(steps: Any) -> None:
    run = steps.gi_frame.f_locals.get("run") if steps.gi_frame is not None else None
    if run is not None:
        run.__class__ = Unprotected


def work(options: argparse.Namespace) -> None:
    """Train all variants in turns; the first worker writes what it found."""
    torch.set_num_threads(1)
    (name,) = options.models
    comms = {variant: connect("ulfm", 0, "") for variant in VARIANTS}
    running = {variant: train(variant, name, comm) for variant, comm in comms.items()}
    for steps in running.values():
        for _ in range(WARM_UP_STEPS):
            next(steps)
    rng = random.Random(0)
    blocks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.blocks):
        for variant in rng.sample(VARIANTS, len(VARIANTS)):
            blocks[variant].append(time_block(running[variant], options.steps, comms[variant]))
    counts = {variant: count(variant, name) for variant in VARIANTS[:2]}
    if comms["protected"].here[0] == 0:
        Path(options.work).write_text(json.dumps({"blocks": blocks, "counts": counts}))
    comms["protected"].barrier()
    sys.stdout.flush()
    os._exit(0)  # training has no end here


def time_block(steps: Iterator[None], number: int, comm: Communicator) -> float:
    """Return the median step of a block, seconds; all workers begin it together."""
    comm.barrier()
    next(steps)
    times = []
    for _ in range(number):
        begun = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def count(variant: str, name: str) -> dict[str, Any]:
    """Return what is sent in a step by messages: calls, and bytes that this worker gives."""
    comm = CountingCommunicator(connect("ulfm", 0, ""))
    steps = train(variant, name, comm, shared_bytes=0)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    calls, sent = comm.calls.copy(), comm.sent_bytes.copy()
    next(steps)
    return {"calls": dict(comm.calls - calls), "bytes": dict(comm.sent_bytes - sent)}


# -- tables


def show(model: str, workers: int, found: dict[str, Any]) -> None:
    """Print the tables."""
    blocks = found["blocks"]
    rows = []
    for variant in VARIANTS:
        times = spread([1e3 * t for t in blocks[variant]])
        cells = [f"{times[key]:.2f}" for key in ("p50", "p10", "p90")]
        against = "unprotected" if variant == "protected" else "protected"
        quotients = [a / b for a, b in zip(blocks[variant], blocks[against], strict=True)]
        paired = ratio(quotients, [1.0] * len(quotients))
        rows.append([variant, *cells, against, f"{paired['ratio']:.3f} ({paired['low']:.3f}-{paired['high']:.3f})"])
    title = f"\n{model}, {workers} workers on {os.cpu_count()} cores, blocks of steps; ms"
    print(table(title, ["variant", "step p50", "p10", "p90", "against", "ratio"], rows))
    kinds = sorted({kind for counts in found["counts"].values() for kind in counts["calls"]})
    rows = [
        [variant, *(f"{c['calls'].get(kind, 0)} / {c['bytes'].get(kind, 0)}" for kind in kinds)]
        for variant, c in found["counts"].items()
    ]
    print(table("\nsent in a step by messages: calls / bytes", ["variant", *kinds], rows))


if __name__ == "__main__":
    main()
