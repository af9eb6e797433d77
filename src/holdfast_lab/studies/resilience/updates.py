"""The overlapped optimizer (eager updates) in the resilience study: simulated training time and size of undo copies."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from holdfast_lab.studies.base import Row
from holdfast_lab.studies.resilience.cases import (
    FORWARD,
    MIDDLE,
    RESTART,
    ROLLBACK,
    SPREAD,
    NetworkSpec,
    ResilienceCase,
    cases,
)
from holdfast_lab.studies.resilience.cost import STATED, simulated
from holdfast_lab.studies.resilience.training import fresh

LAZY, EAGER = "lazy", "eager"
SIMULATED = "simulated"
EVERY = 5
"""Steps between two checkpoints."""

UPDATING = replace(STATED, sum_s=STATED.sum_s - 0.05, update_s=0.05, copy_s=0.02, undo_s=0.02)
"""The stated costs, with the optimizer's time split off from the all-reduces; a lazy step takes the same time."""


def cross(network: NetworkSpec, data: Path | None, seeds: Sequence[int], *, quick: bool) -> list[Row]:
    """Return a row for each case: simulated training time with lazy and with eager updates, and the time of undo."""
    held = {"copy_bytes": copy_bytes(network, data)}
    costs = {f"cost_{name}": getattr(UPDATING, name) for name in ("update_s", "copy_s", "undo_s")}
    about = {"part": "update", "status": SIMULATED, "network": network.name, "dataset": network.dataset}
    return [
        about | case.columns() | _times(case, network.steps, seeds) | costs | held for case in _crossed(network, quick)
    ]


def copy_bytes(network: NetworkSpec, data: Path | None) -> int:
    """Return the bytes of a worker's undo copies: the parameters and their optimizer state, which an update changes."""
    model = fresh(network, data, seed=0)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=network.learning_rate, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in (*parameters, *kept))


def _crossed(network: NetworkSpec, quick: bool) -> Iterator[ResilienceCase]:
    """Yield failures at random moments, and all in one middle step with none, some or most of the buckets averaged."""
    for workers, count in dict.fromkeys((case.workers, case.count) for case in cases(network, quick=quick)):
        for strategy in (ROLLBACK, FORWARD, RESTART):
            how = {"strategy": strategy, "workers": workers, "count": count, "every": EVERY * (strategy == RESTART)}
            yield ResilienceCase(moment=SPREAD, **how)  # type: ignore[arg-type]
            for averaged in (0.0, 0.5, 0.9):
                yield ResilienceCase(moment=MIDDLE, averaged=averaged, **how)  # type: ignore[arg-type]


def _times(case: ResilienceCase, steps: int, seeds: Sequence[int]) -> Row:
    chosen = seeds if case.moment == SPREAD else seeds[:1]
    lazy, eager, kept = (
        [simulated(case, steps, seed, costs, update) for seed in chosen]
        for costs, update in ((UPDATING, LAZY), (UPDATING, EAGER), (replace(UPDATING, undo_s=0.0), EAGER))
    )
    lazy_s, eager_s = (statistics.fmean(one.total_ns / 1e9 for one in many) for many in (lazy, eager))
    undo_ns = [one.parts_ns["regroup"] - other.parts_ns["regroup"] for one, other in zip(eager, kept, strict=True)]
    shorter = {"shorter_percent": 100 * (1 - eager_s / lazy_s)}
    return {"lazy_s": lazy_s, "eager_s": eager_s, "undo_s": statistics.fmean(undo_ns) / 1e9} | shorter
