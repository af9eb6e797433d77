"""Compares training with all slices in one batch to training slice by slice, which has the bits of real processes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.faults.plan import Fault, FaultPlan
from holdfast_lab.simulate import Estimate
from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.virtual_ddp.training import VirtualDdp
from holdfast_lab.workloads import load_dataset, loss_of, make_model
from holdfast_lab.workloads.train import accuracy

_WORKERS, _BATCH, _EPOCHS = 8, 128, 3
_RATE = 0.05
_KILLS = ((2, 9, 1), (5, 9, 3), (7, 20, 0))
"""Rank, step and last averaged bucket of each kill."""

VARIANTS = {"mlp": ("mlp", False), "mlp, dropout": ("mlp", True), "cnn, batch norm": ("cnn", False)}
"""Networks, and whether their dropout stays enabled."""


def compare_modes(variant: str, seeds: Sequence[int]) -> list[Row]:
    """Return the differences in accuracy and weights, without failures and with three failures under ``forward``.

    ``apart`` is the difference between slice by slice and all slices in one batch; ``usual`` is, for comparison, the
    difference caused by another order of the samples.
    """
    rows = []
    for strategy in ("rollback", "forward"):
        exact = [_trained(holdfast.Session, variant, strategy, seed) for seed in seeds]
        batched = [_trained(VirtualDdp, variant, strategy, seed) for seed in seeds]
        usual = [_trained(VirtualDdp, variant, strategy, seed, order=seed + 1000) for seed in seeds]
        row: Row = {"part": "modes", "status": MEASURED, "variant": variant, "workers": _WORKERS, "seeds": len(seeds)}
        row["happens"] = "three workers die, forward" if strategy == "forward" else "nothing"
        more = np.array([one[0] - other[0] for one, other in zip(batched, exact, strict=True)])
        mean, low, high, _ = Estimate.of(more)
        row |= {"accuracy_more": mean, "accuracy_more_low": low, "accuracy_more_high": high}
        row |= {"accuracy_apart": float(np.abs(more).max())}
        row |= {"accuracy_usual": max(abs(one[0] - other[0]) for one, other in zip(usual, exact, strict=True))}
        for name, others in (("apart", batched), ("usual", usual)):
            row[name] = max(_distance(one[1], other[1]) for one, other in zip(others, exact, strict=True))
        rows.append(row)
    return rows


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _trained(kind: Any, variant: str, strategy: str, seed: int, order: int | None = None) -> tuple[float, torch.Tensor]:
    """Return the accuracy in percent, and the weights."""
    network, keeps_dropout = VARIANTS[variant]
    data = load_dataset("digits", None)
    model = make_model(network, data.num_classes, seed=seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.Dropout2d) and not keeps_dropout:
            module.p = 0.0
    kills = tuple(
        Fault("kill", rank=rank, step=step, phase="allreduce", bucket=bucket) for rank, step, bucket in _KILLS
    )
    settings: dict[str, Any] = {"workers": _WORKERS, "strategy": strategy, "seed": seed if order is None else order}
    settings |= {"bucket_bytes": 1, "faults": FaultPlan(kills).to_json() if strategy == "forward" else ""}
    settings |= {"fabric": "virtual", "guard": "off"} if kind is holdfast.Session else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)
    trainer = kind(model, optimizer, **settings)
    with contextlib.redirect_stderr(io.StringIO()):  # a session logs the lost ranks
        for step in trainer.steps(data.train, _BATCH, _EPOCHS):
            for x, y in step:
                step.backward(loss_of(model(x), y))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return 100 * accuracy(model, data.test), weights
