"""The cost of the certificate: the same session with it and without.

    python benchmarks/overhead/certificate.py [--workers 2] [--models mlp] [--kind whole] [--blocks 30] [--steps 256] [--json FILE]

=======  ==============================================================================================================
variant  what runs in addition to the training
=======  ==============================================================================================================
without  nothing
with     a window of the weights, of the optimizer's state and of the buffers is hashed in each step, everything once in 256
=======  ==============================================================================================================

Both write their records to a file, as under the launcher, train in the same processes and take turns, block by block,
in a different order each time (``turns.py``). A block is long enough to hash the whole state once. ``--kind sharded`` or
``pipeline`` does the same with the model split over the workers, with one hot standby for each part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import make_model, mean_loss, optimizer_of
from overhead.turns import by_slices, make_parser, run_jobs, show_turns, steps_of, train, train_in_turns
from step.split import MICRO_BATCHES, stages_of

import holdfast
from holdfast.comm import Communicator

VARIANTS = ("without", "with")
KINDS = ("whole", "sharded", "pipeline")
WARM_UP_STEPS = 20


def main() -> None:
    """Start the jobs, print their tables."""
    parser = make_parser(__doc__, steps=256)
    parser.add_argument("--kind", choices=KINDS, default="whole")
    options = parser.parse_args()
    if options.work:
        start = lambda variant, name, comm: train_one(options, variant, name, comm)  # noqa: E731
        train_in_turns(options, start, VARIANTS, WARM_UP_STEPS)
    for model, workers, found in run_jobs(options, "--kind", options.kind):
        show_turns(model, workers, found["blocks"], dict.fromkeys(VARIANTS, "without"), f"{options.kind}, ")


def train_one(options: argparse.Namespace, variant: str, name: str, comm: Communicator) -> Iterator[None]:
    """Train one of both forever, one step for each item."""
    run_dir = Path(options.work).with_name(variant)
    run_dir.mkdir(exist_ok=True)
    certifies = variant == "with"
    settings = {"guard": "off", "certificate": certifies, "run_dir": str(run_dir), "hang_timeout_s": 0.0}
    if options.kind == "whole":
        return train(name, comm, **settings)
    return train_split(options.kind, name, comm, **settings)


def train_split(kind: str, name: str, comm: Communicator, **settings: Any) -> Iterator[None]:
    """Train as :func:`~turns.train` does, in shards, or one stage a worker."""
    model, optimizer = make_model(name), optimizer_of(name)
    if kind == "sharded":
        session = holdfast.Session(holdfast.Sharded(model), optimizer, comm=comm, **settings)
        return steps_of(session, name, comm, by_slices(model))
    pipeline = holdfast.Pipeline(stages_of(model, len(comm.members)), mean_loss)
    session = holdfast.Session(pipeline, optimizer, comm=comm, slices=MICRO_BATCHES, **settings)
    return steps_of(session, name, comm, methodcaller("compute"))


if __name__ == "__main__":
    main()
