"""The gain from updating each bucket right after its all-reduce, and the cost of the undo copy.

    python benchmarks/overhead/overlap.py [--workers 2 4] [--models mlp transformer] [--blocks 30] [--steps 10] [--json FILE]

=========  ============================================================================================================
variant    when the optimizer runs
=========  ============================================================================================================
lazy       after the commit vote: the default
eager      bucket by bucket, each after its all-reduce, overlapped with the next all-reduces; an undo copy is made
no copy    as ``eager``, without the undo copy: nothing could be rolled back
=========  ============================================================================================================

All train in the same processes and take turns, block by block, in a different order each time (``turns.py``). The guard is
off, so that no variant waits for its last update before the commit vote; ``--guard stop`` measures the default.
``--bucket-mib`` sets the size of buckets: the more there are, the more of the updates overlaps with all-reduces.

The rollback is timed separately, in one process: all buckets of a step are updated, and restored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import spread, timed
from models import make_model, make_optimizer
from overhead.turns import by_slices, make_parser, run_jobs, show_turns, steps_of, train_in_turns

import holdfast
from holdfast.base.clock import SystemClock
from holdfast.comm import Communicator
from holdfast.models.gradients import BucketLayout
from holdfast.models.overlap import OverlappedOptimizer
from holdfast.state.context import OverlapCost

VARIANTS = ("lazy", "eager", "no copy")
WARM_UP_STEPS = 5
"""Warm-up steps: until the memory of the copies has been touched once."""


def main() -> None:
    """Start the jobs, print their tables."""
    options = parse()
    if options.work:
        work(options)
    for model, workers, found in run_jobs(options, "--bucket-mib", str(options.bucket_mib), "--guard", options.guard):
        found["undo"] = time_undo(model, options.bucket_mib, options.blocks)
        show(model, workers, found)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, steps=10)
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--guard", choices=("off", "stop"), default="off")
    return parser.parse_args()


# -- in each worker


class Training:
    """One variant, which trains one step for each item.

    Args:
        variant: Its name.
        name: Name of the job.
        comm: Communicator of this variant.
        options: The command line.
    """

    def __init__(self, variant: str, name: str, comm: Communicator, options: argparse.Namespace) -> None:
        model = make_model(name)
        self._compute = by_slices(model)
        self._session = holdfast.Session(
            model,
            make_optimizer(name, model),
            comm=comm,
            guard=options.guard,
            overlap_optimizer=variant != "lazy",
            bucket_bytes=bucket_bytes(options.bucket_mib),
        )
        self._copies = variant != "no copy"
        self.steps = steps_of(self._session, name, comm, self._step)

    def _step(self, step: holdfast.Step) -> None:
        if not self._copies and self.overlapped is not None:
            for copy in self.overlapped._copies:
                copy.take = copy.forget  # type: ignore[method-assign]
        self._compute(step)

    @property
    def overlapped(self) -> OverlappedOptimizer | None:
        """The overlapped optimizer, if any."""
        replica: Any = self._session._trainable
        found: OverlappedOptimizer | None = replica.overlapped
        return found


def bucket_bytes(mib: float) -> int:
    """Return the size of buckets in bytes."""
    return int(mib * (1 << 20))


def work(options: argparse.Namespace) -> None:
    """Train all variants in turns; the first worker writes the results."""
    trainings: dict[str, Training] = {}

    def start(variant: str, name: str, comm: Communicator) -> Iterator[None]:
        trainings[variant] = Training(variant, name, comm, options)
        return trainings[variant].steps

    def more() -> dict[str, Any]:
        eager = trainings["eager"].overlapped
        assert eager is not None
        spent, names = eager.spent, ("copy_s", "update_s", "waited_s", "buckets")
        per_step = {name: getattr(spent, name) / (spent.steps or 1) for name in names}
        return {"per_step": per_step, "copy_bytes": eager.size_bytes}

    train_in_turns(options, start, VARIANTS, WARM_UP_STEPS, more=more)


# -- rollback


def time_undo(name: str, mib: float, repetitions: int) -> list[float]:
    """Return how long it takes to restore all buckets of a step, in seconds, in one process."""
    torch.set_num_threads(1)
    model = make_model(name)
    buckets = BucketLayout(model, bucket_bytes(mib))
    eager = OverlappedOptimizer(buckets, make_optimizer(name, model), SystemClock(), OverlapCost(), beside=False)
    results = [torch.full((layout.length,), 1e-3) for layout in buckets.layouts]
    times = []
    for number in range(repetitions + 1):
        for bucket, result in enumerate(results):
            eager.update(bucket, result)
        if number == 0:  # from here on the optimizer has state
            eager.keep()
            continue
        times.append(timed(eager.undo))
    return times


# -- the table


def show(model: str, workers: int, found: dict[str, Any]) -> None:
    """Print it, and the separately timed rollback."""
    per_step, undo = found["per_step"], spread([1e3 * t for t in found["undo"]])
    buckets = f"{per_step['buckets']:.0f} buckets, "
    show_turns(model, workers, found["blocks"], dict.fromkeys(VARIANTS, "lazy"), buckets)
    print(
        f"\na step: copies {1e3 * per_step['copy_s']:.2f} ms, updates {1e3 * per_step['update_s']:.2f} ms, the loop waited for "
        f"{1e3 * per_step['waited_s']:.2f} ms; copies take {found['copy_bytes']:,} bytes a worker;\n"
        f"all buckets of a step are rolled back in {undo['p50']:.2f} ms (p10 {undo['p10']:.2f}, p90 {undo['p90']:.2f})"
    )


if __name__ == "__main__":
    main()
