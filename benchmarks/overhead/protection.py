"""The cost of protection in a run without failures: the same session with recovery, without, and adding in any order.

    python benchmarks/overhead/protection.py [--workers 2] [--models cnn mlp] [--blocks 30] [--steps 10] [--json FILE]

===========  ==========================================================================================================
variant      what runs
===========  ==========================================================================================================
protected    ``holdfast.Session`` with its defaults
unprotected  the same session and the same all-reduces; no commit vote, no digest, no undo state for a rollback.
             A failure would end the job
any order    protected, but every worker adds its own term first, so that bits depend on the worker
===========  ==========================================================================================================

All three train in the same processes and take turns, block by block, in a different order each time (``turns.py``); a block
is represented by its median step. The second table counts the data sent in a step when all-reduces use messages, since
only these can be counted.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import table
from models import JOBS, loss_of, make_model, make_optimizer
from overhead.turns import make_parser, run_jobs, show_turns, train_in_turns

import holdfast
from holdfast.comm import Communicator, connect
from holdfast.comm.allreduce import adding
from holdfast.engine.loop import TrainingLoop
from holdfast.models.replicated import ReplicatedModel
from holdfast.models.trainable import Reach
from holdfast.recovery.messages import Event, StepVoted
from holdfast_lab.counting import CountingCommunicator

VARIANTS = {"protected": "unprotected", "unprotected": "protected", "any order": "protected"}
"""Each variant, and its baseline."""
COUNTED = ("protected", "unprotected")
WARM_UP_STEPS = 3


def main() -> None:
    """Start the jobs, print their tables."""
    options = make_parser(__doc__, steps=10, workers=(2, 4), models=("cnn", "mlp")).parse_args()
    if options.work:
        counts = lambda: {"counts": {one: count(one, options.models[0]) for one in COUNTED}}  # noqa: E731
        train_in_turns(options, train, tuple(VARIANTS), WARM_UP_STEPS, statistics.median, counts)
    for model, workers, found in run_jobs(options):
        show_turns(model, workers, found["blocks"], VARIANTS)
        show_sent(found["counts"])


# -- in each worker


class Unprotected(TrainingLoop):
    """Applies a step after its last all-reduce."""

    def _close(self, step: int) -> Event:
        """Continue without the commit vote."""
        return StepVoted()


class Forgetful(ReplicatedModel):
    """Saves nothing at the start of a step but the buffers, which slices start from."""

    def begin_step(self, reach: Reach) -> None:
        """Only allocate memory."""
        self.begin()


def own_term_first(rank: int) -> Any:
    """Return an addition whose order depends on the worker."""

    def add(terms: Any, out: torch.Tensor) -> None:
        turned = [*terms[rank % len(terms) :], *terms[: rank % len(terms)]]
        adding.fold(turned, out)

    return add


def train(variant: str, name: str, comm: Communicator, **settings: Any) -> Iterator[None]:
    """Train forever, one step for each item."""
    if variant == "any order":
        adding.ORDERS["tree"] = own_term_first(comm.local_ranks[0])  # under a name that settings permit
        settings["order"] = "tree"
    job = JOBS[name]
    model = make_model(name)
    session = holdfast.Session(model, make_optimizer(name, model), comm=comm, **settings)
    if variant == "unprotected":
        session._trainable.__class__ = Forgetful
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


def count(variant: str, name: str) -> dict[str, Any]:
    """Return the messages sent in a step: calls, and bytes sent by this worker."""
    comm = CountingCommunicator(connect("ulfm"))
    steps = train(variant, name, comm, shared_bytes=0)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    calls, sent = comm.calls.copy(), comm.sent_bytes.copy()
    next(steps)
    return {"calls": dict(comm.calls - calls), "bytes": dict(comm.sent_bytes - sent)}


# -- the second table


def show_sent(counts: dict[str, dict[str, Any]]) -> None:
    """Print the data sent in a step."""
    kinds = sorted({kind for count in counts.values() for kind in count["calls"]})
    rows = [
        [variant, *(f"{c['calls'].get(kind, 0)} / {c['bytes'].get(kind, 0)}" for kind in kinds)]
        for variant, c in counts.items()
    ]
    print(table("\nsent in a step by messages: calls / bytes", ["variant", *kinds], rows))


if __name__ == "__main__":
    main()
