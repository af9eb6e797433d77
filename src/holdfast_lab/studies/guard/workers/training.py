"""A training with virtual workers in this process, repeated from one state, with or without guard and bit flip.

Each repetition creates a new model, optimizer and session, and copies the state into them, so that nothing leaks from
one training into the next.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import holdfast
from holdfast.faults.plan import Fault, FaultPlan
from holdfast.records.types import Finished, Record
from holdfast.session.session import forget_sessions
from holdfast_lab.studies.campaign_plan import OWN_BUGS
from holdfast_lab.studies.guard.setup import GuardSetup
from holdfast_lab.studies.outcomes import are_finite
from holdfast_lab.workloads import load_dataset, loss_of, make_model, make_optimizer
from holdfast_lab.workloads.train import accuracy

OFF = "off"

State = Mapping[str, Any]
"""State of the model and of its optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardResult:
    """The result of a training.

    Args:
        accuracy: Accuracy on the test set, from 0 to 1, of the worst worker.
        finite: Whether all losses, and the weights of all workers, are finite.
        bits: For each rank, digests of its model and optimizer state; empty if the training did not finish.
        records: Its records, except those of steps.
        steps: Number of committed steps.
        state: State of the lowest rank.
        error: Why it failed, "" if it did not.
    """

    accuracy: float = 0.0
    finite: bool = True
    bits: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    records: Sequence[Record] = ()
    steps: int = 0
    state: State = field(default_factory=dict)
    error: str = ""

    def of(self, kind: str) -> list[Any]:
        """Return the records of one kind."""
        return [record for record in self.records if type(record).__name__ == kind]


class _Records:
    """Collects the records of a session in memory."""

    def __init__(self) -> None:
        self.written: list[Record] = []

    def write(self, record: Record) -> None:
        """Add a record."""
        if type(record).__name__ != "StepCommitted":
            self.written.append(record)


def train(
    setup: GuardSetup, guard: str, *, seed: int, epochs: int, begin: State | None = None, fault: Fault | None = None
) -> GuardResult:
    """Train, and return the result.

    Without a guard, a training ends at the first loss that is not finite, because its class is known then.

    Args:
        setup: The training.
        guard: A policy; see :attr:`holdfast.Settings.guard`.
        seed: Seed of the sample order, and of randomness in the network.
        epochs: Number of epochs.
        begin: The state to continue from; None: a new model.
        fault: The injected fault; None: none.
    """
    forget_sessions()  # or sessions with an unfinished loop would stay in memory
    data = _dataset(setup.size)
    channels, side, _ = data.shape
    image = (channels, side)
    model = make_model(setup.network, num_classes=data.num_classes, image=image, seed=setup.training_seed)
    optimizer = make_optimizer(setup.optimizer, model.parameters())
    if begin is not None:
        model.load_state_dict(begin["model"])
        optimizer.load_state_dict(
            copy.deepcopy(begin["optimizer"])
        )  # load_state_dict keeps references to the given tensors
    faults = FaultPlan((fault,)).to_json() if fault is not None else ""
    session = holdfast.Session(
        model,
        optimizer,
        fabric="virtual",
        workers=setup.workers,
        guard=guard,
        guard_sums=setup.sums and guard != OFF,
        seed=seed,
        faults=faults,
    )
    records = _Records()
    session._connect().log.subscribe(records)  # there is no public access to records without a directory
    try:
        # The guard prints its findings.
        with contextlib.redirect_stderr(io.StringIO()):
            finite = _train(session, model, data.train, setup.batch, epochs, to_the_end=guard != OFF)
    except OWN_BUGS:
        raise
    except Exception as error:  # a flip may cause any error; all count as a failed training
        return GuardResult(records=records.written, steps=session.step, error=f"{type(error).__name__}: {error}")
    return _ended(session, setup, model, data.test, records.written, finite=finite)


def _train(session: Any, model: nn.Module, samples: Any, batch: int, epochs: int, *, to_the_end: bool) -> bool:
    """Return whether all losses were finite; for replayed steps the last loss counts."""
    losses: dict[int, float] = {}
    for step in session.steps(samples, batch, epochs, drop_last=True):
        losses[session.step] = session.metrics.get("loss", 0.0)
        if not (to_the_end or math.isfinite(losses[session.step])):
            break
        for x, y in step:
            step.backward(loss_of(model(x), y))
    losses[session.step] = session.metrics["loss"]
    return all(map(math.isfinite, losses.values()))


def _ended(
    session: Any, setup: GuardSetup, model: nn.Module, test: Any, records: list[Record], *, finite: bool
) -> GuardResult:
    found = session._trainable.own.of_each(
        range(setup.workers), lambda: (accuracy(model, test), are_finite((), model.parameters()))
    )
    state = {"model": model.state_dict(), "optimizer": session._trainable.optimizer.state_dict()}
    return GuardResult(
        accuracy=min(right for right, _ in found.values()),
        finite=finite and all(are for _, are in found.values()),
        bits={r.rank: (r.sha256, r.state_sha256) for r in records if isinstance(r, Finished)},
        records=records,
        steps=session.step,
        state=state,
    )


@functools.lru_cache(maxsize=2)
def _dataset(size: int | None) -> Any:
    return load_dataset("digits", None, size=size)


def steps_of(setup: GuardSetup) -> int:
    """Return the number of steps per epoch."""
    return len(_dataset(setup.size).train) // setup.batch
