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
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from common import table
from models import JOBS, loss_of, make_model, make_optimizer
from turns import connect_each, leave, make_parser, run_jobs, show_turns, take_turns

import holdfast
from holdfast.comm import Communicator, connect
from holdfast.comm.allreduce import adding
from holdfast.engine.loop import Run
from holdfast.models.replicated import Replica
from holdfast.models.runner import Reach
from holdfast.testing.counting import CountingCommunicator

VARIANTS = {"protected": "unprotected", "unprotected": "protected", "any order": "protected"}
"""Each, and what it is held against."""
COUNTED = ("protected", "unprotected")
WARM_UP_STEPS = 3


def main() -> None:
    """Start the jobs, print their tables."""
    options = make_parser(__doc__, steps=10, workers=(2, 4), models=("cnn", "mlp")).parse_args()
    if options.work:
        work(options)
    for model, workers, found in run_jobs(options):
        show_turns(model, workers, found["blocks"], VARIANTS)
        show_sent(found["counts"])


# -- in each worker


class Unprotected(Run):
    """Applies a step after its last sum."""

    def _close(self, step: int) -> bool:
        """Go on without having heard whether all have all."""
        return True


class Forgetful(Replica):
    """Remembers nothing of a step's beginning but the buffers, which slices start from."""

    def begin_step(self, reach: Reach) -> None:
        """Only make room."""
        self.begin()


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
    (name,) = options.models
    comms = connect_each(tuple(VARIANTS))
    running = {variant: train(variant, name, comm) for variant, comm in comms.items()}
    blocks = take_turns(options, running, comms, WARM_UP_STEPS, statistics.median)
    leave(options, comms["protected"], {"blocks": blocks, "counts": {one: count(one, name) for one in COUNTED}})


def count(variant: str, name: str) -> dict[str, Any]:
    """Return what is sent in a step by messages: calls, and bytes that this worker gives."""
    comm = CountingCommunicator(connect("ulfm", 0, ""))
    steps = train(variant, name, comm, shared_bytes=0)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    calls, sent = comm.calls.copy(), comm.sent_bytes.copy()
    next(steps)
    return {"calls": dict(comm.calls - calls), "bytes": dict(comm.sent_bytes - sent)}


# -- the second table


def show_sent(counts: dict[str, dict[str, Any]]) -> None:
    """Print what is sent in a step."""
    kinds = sorted({kind for count in counts.values() for kind in count["calls"]})
    rows = [
        [variant, *(f"{c['calls'].get(kind, 0)} / {c['bytes'].get(kind, 0)}" for kind in kinds)]
        for variant, c in counts.items()
    ]
    print(table("\nsent in a step by messages: calls / bytes", ["variant", *kinds], rows))


if __name__ == "__main__":
    main()
