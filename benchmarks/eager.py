"""What updating each bucket as soon as its sum is in gains, and what the copy to take it back from costs.

    python benchmarks/eager.py [--workers 2 4] [--models mlp transformer] [--blocks 30] [--steps 10] [--json FILE]

=========  ============================================================================================================
variant    when the optimizer runs
=========  ============================================================================================================
lazy       once the closing sum has returned: the default
eager      bucket by bucket, each as soon as its sum is in, beside the sums that follow; an undo copy is made before
no copy    as ``eager``, without the copy: nothing could be taken back
=========  ============================================================================================================

All train in the same processes and take turns, block by block, in another order each time; a block counts by its mean
step. The ratio is taken within a round; the interval is that of the median of these ratios. The guard is off, so that no
variant waits for its last update before the closing sum; ``--guard stop`` shows the default. ``--bucket-mib`` sets the size of buckets:
the more there are, the more of the updates lies beside sums.

Taking back is timed apart, by one process: all buckets of a step are updated, and put back.
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
from holdfast.clock import SystemClock
from holdfast.comm import Communicator, connect
from holdfast.train.eager import Eager, Spent
from holdfast.train.gradients import Buckets

VARIANTS = ("lazy", "eager", "no copy")
WARM_UP_STEPS = 5
"""Until the memory of the copies has been touched once."""
START_S = 300.0


def main() -> None:
    """Start the jobs, print their tables."""
    options = parse()
    if options.work:
        work(options)
        return
    results = {}
    for model, workers in itertools.product(options.models, options.workers):
        found = run_job(options, model, workers)
        found["undo"] = time_undo(model, options.bucket_mib, options.blocks)
        results[f"{model}, {workers}"] = found
        show(model, workers, found)
    write_json(options.json, settings=vars(options), results=results)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="+", choices=sorted(JOBS), default=["mlp"])
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--guard", choices=("off", "stop"), default="off")
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
            "--steps", str(options.steps), "--bucket-mib", str(options.bucket_mib), "--guard", options.guard,
            "--work", str(out),
        ]  # fmt: skip
        limit_s = START_S + 5.0 * len(VARIANTS) * (options.blocks * (options.steps + 1) + WARM_UP_STEPS)
        subprocess.run(command, check=True, timeout=limit_s, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- in each worker


class Training:
    """One variant, one step each time the next is asked for.

    Args:
        variant: Which.
        name: Of the job.
        comm: Of this variant alone.
        options: The command line.
    """

    def __init__(self, variant: str, name: str, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm = comm
        self._job = JOBS[name]
        self._model = make_model(name)
        self._session = holdfast.Session(
            self._model,
            make_optimizer(name, self._model),
            comm=comm,
            guard=options.guard,
            update="lazy" if variant == "lazy" else "eager",
            bucket_bytes=bucket_bytes(options.bucket_mib),
        )
        self._copies = variant != "no copy"
        self.steps = self._train()

    def _train(self) -> Iterator[None]:
        samples = self._job.samples * len(self.comm.members)
        dataset = self._job.data(samples * 4, None)
        for step in self._session.steps(dataset, samples, epochs=1_000_000, shuffle=False):
            if not self._copies and self.eager is not None:
                for copy in self.eager._copies:
                    copy.take = copy.forget  # type: ignore[method-assign]
            for x, y in step:
                step.backward(loss_of(self._model, x, y))
            yield

    @property
    def eager(self) -> Eager | None:
        """What updates early."""
        replica: Any = self._session._replica
        found: Eager | None = replica.eager
        return found


def bucket_bytes(mib: float) -> int:
    """Return the size of buckets."""
    return int(mib * (1 << 20))


def work(options: argparse.Namespace) -> None:
    """Train all variants in turns; the first worker writes what it found."""
    torch.set_num_threads(1)
    (name,) = options.models
    running = {variant: Training(variant, name, connect("ulfm", 0, ""), options) for variant in VARIANTS}
    for training in running.values():
        for _ in range(WARM_UP_STEPS):
            next(training.steps)
    rng = random.Random(0)
    blocks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.blocks):
        for variant in rng.sample(VARIANTS, len(VARIANTS)):
            blocks[variant].append(time_block(running[variant], options.steps))
    first = running["eager"]
    if first.comm.here[0] == 0:
        assert first.eager is not None
        spent = first.eager.spent
        per_step = {
            name: getattr(spent, name) / (spent.steps or 1) for name in ("copy_s", "update_s", "waited_s", "buckets")
        }
        found = {"blocks": blocks, "per_step": per_step, "copy_bytes": first.eager.size_bytes}
        Path(options.work).write_text(json.dumps(found))
    first.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # training has no end here


def time_block(training: Training, number: int) -> float:
    """Return the mean step of a block, seconds; all workers begin it together."""
    training.comm.barrier()
    next(training.steps)
    begun = time.perf_counter()
    for _ in range(number):
        next(training.steps)
    return (time.perf_counter() - begun) / number


# -- taking back


def time_undo(name: str, mib: float, repetitions: int) -> list[float]:
    """Return how long it takes to put all buckets of a step back, seconds, in one process."""
    torch.set_num_threads(1)
    model = make_model(name)
    buckets = Buckets(model, bucket_bytes(mib))
    eager = Eager(buckets, make_optimizer(name, model), SystemClock(), Spent(), beside=False)
    results = [torch.full((layout.length,), 1e-3) for layout in buckets.layouts]
    times = []
    for number in range(repetitions + 1):
        for bucket, result in enumerate(results):
            eager.update(bucket, result)
        if number == 0:  # from here on the optimizer has a state
            eager.keep()
            continue
        begun = time.perf_counter()
        eager.undo()
        times.append(time.perf_counter() - begun)
    return times


# -- the table


def show(model: str, workers: int, found: dict[str, Any]) -> None:
    """Print it."""
    blocks, per_step = found["blocks"], found["per_step"]
    rows = []
    for variant in VARIANTS:
        times = spread([1e3 * t for t in blocks[variant]])
        cells = [f"{times[key]:.2f}" for key in ("p50", "p10", "p90")]
        quotients = [a / b for a, b in zip(blocks[variant], blocks["lazy"], strict=True)]
        paired = ratio(quotients, [1.0] * len(quotients))
        rows.append([variant, *cells, f"{paired['ratio']:.3f} ({paired['low']:.3f}-{paired['high']:.3f})"])
    title = f"\n{model}, {workers} workers on {os.cpu_count()} cores, {per_step['buckets']:.0f} buckets, blocks of steps; ms"
    print(table(title, ["variant", "step p50", "p10", "p90", "against lazy"], rows))
    undo = spread([1e3 * t for t in found["undo"]])
    print(
        f"\na step: copies {1e3 * per_step['copy_s']:.2f} ms, updates {1e3 * per_step['update_s']:.2f} ms, of which the loop waited for "
        f"{1e3 * per_step['waited_s']:.2f} ms; copies take {found['copy_bytes']:,} bytes a worker;\n"
        f"all buckets of a step are taken back in {undo['p50']:.2f} ms (p10 {undo['p10']:.2f}, p90 {undo['p90']:.2f})"
    )


if __name__ == "__main__":
    main()
