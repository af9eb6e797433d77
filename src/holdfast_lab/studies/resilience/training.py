"""A training run of the resilience study: virtual workers, with all slices of a step in one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from holdfast.faults.plan import Fault, FaultPlan
from holdfast_lab.studies.base import Row
from holdfast_lab.studies.resilience.cases import ADDITION, FAILURE, GAP, REMOVAL, REPLACED, NetworkSpec, ResilienceCase
from holdfast_lab.virtual_ddp.training import MembershipChange, VirtualDdp, VirtualSnapshot
from holdfast_lab.workloads import load_dataset, loss_of, make_model

_CHUNK = 500
"""Test samples per forward pass."""


@dataclass(frozen=True, slots=True)
class ResilienceResult:
    """The result of a training run.

    Args:
        accuracy: Accuracy on the test set in percent.
        loss: Mean loss on the test set.
        weights: All weights, flattened.
        steps: Number of steps in the weights.
        lost: Number of samples that were lost.
        redone: Number of steps that were computed again.
        decisions: The decision of each recovery.
        buckets: Number of buckets of a step.
    """

    accuracy: float
    loss: float
    weights: torch.Tensor
    steps: int
    lost: int
    redone: int
    decisions: tuple[str, ...]
    buckets: int


class _Again:
    """A dataset repeated several times within one epoch, so that only the very last mini-batch can be short."""

    def __init__(self, samples: Any, length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self._samples[index % len(self._samples)] for index in indices]


@functools.lru_cache(maxsize=1)
def _data(network: NetworkSpec, data: Path | None) -> tuple[Any, Any, tuple[int, ...], int]:
    """Return training samples (repeated as needed), test samples, the shape of a sample, and the number of classes."""
    dataset = load_dataset(network.dataset, data)
    length, test = network.batch * network.steps, dataset.test[: network.tested]
    if isinstance(dataset.train, TensorDataset):
        index = torch.arange(length) % len(dataset.train)
        train: Any = TensorDataset(*(tensor[index] for tensor in dataset.train.tensors))
    else:
        train = _Again(dataset.train, length)
    return train, test, dataset.shape, dataset.num_classes


def fresh(network: NetworkSpec, data: Path | None, seed: int, device: str = "cpu") -> torch.nn.Module:
    """Return the network with its initial weights."""
    _, _, shape, classes = _data(network, data)
    more: dict[str, Any] = dict(network.shape) | ({} if network.model == "gpt" else {"image": shape[:2]})
    return make_model(network.model, classes, seed=seed, device=device, **more)


def train(
    network: NetworkSpec,
    data: Path | None,
    seed: int,
    case: ResilienceCase | None,
    *,
    begin: VirtualSnapshot | None = None,
    before_step: Callable[[VirtualDdp], None] | None = None,
) -> ResilienceResult:
    """Train a network and return the result.

    Args:
        network: The network and its training settings.
        data: Directory of datasets that are read from files.
        seed: Seed of the weights, of the sample order, and of ranks and steps of the failures.
        case: The failures and the strategy; None: no failures.
        begin: Snapshot of the failure-free training to start from, at the latest from the step that
            :func:`_undisturbed` returns. None: start from the beginning.
        before_step: Called with the trainer before each step.
    """
    samples, test, _, _ = _data(network, data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = fresh(network, data, seed, device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # random masks depend on the grouping of samples, and would hide the effect of a failure
    optimizer = torch.optim.SGD(model.parameters(), lr=network.learning_rate, momentum=0.9)
    trainer = _trainer(network, model, optimizer, seed, case, begin)
    for step in trainer.steps(samples, network.batch):
        if step.samples < network.batch // 2:
            break  # the remainder after mini-batches shrank: its few samples would weigh as much as a full step
        if before_step:
            before_step(trainer)
        for x, y in step:
            step.backward(loss_of(model(x.to(device)), y.to(device)))
    accuracy, loss = _test(model, test, device)
    return ResilienceResult(
        accuracy=accuracy,
        loss=loss,
        weights=torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()]),
        steps=trainer.step,
        lost=trainer.account().lost,
        redone=sum(decision.redone_steps for decision in trainer.decisions),
        decisions=tuple(decision.what for decision in trainer.decisions),
        buckets=trainer.num_buckets,
    )


def _trainer(
    network: NetworkSpec,
    model: Any,
    optimizer: Any,
    seed: int,
    case: ResilienceCase | None,
    begin: VirtualSnapshot | None,
) -> VirtualDdp:
    if case is None:
        return VirtualDdp(model, optimizer, seed=seed, bucket_bytes=network.bucket_bytes)
    settings = {
        "workers": case.workers,
        "strategy": case.strategy,
        "batch": case.batch,
        "rescale": case.rescale,
        "checkpoint_every": case.every,
        "seed": seed,
        "bucket_bytes": network.bucket_bytes,
    }
    buckets = VirtualDdp(model, optimizer, bucket_bytes=network.bucket_bytes).num_buckets
    happening = list(_happening(case, seed, network.steps))
    kills = [_kill(rank, step, case.averaged, buckets) for rank, step in happening] if _is_failure(case) else []
    faults = FaultPlan(tuple(kills)).to_json() if kills else ""
    return VirtualDdp(
        model, optimizer, changes=list(_changes(case, happening, network.steps)), begin=begin, faults=faults, **settings
    )


def _undisturbed(case: ResilienceCase, seed: int, steps: int) -> int:
    """Return the step up to which the state of a training equals that of the failure-free one.

    With checkpoints, the step must leave room for the previous checkpoint, which a failure loads if the newest one is
    not complete yet.
    """
    first = min(step for _, step in _happening(case, seed, steps))
    return max(0, first // case.every - 1) * case.every if case.every else first


def _is_failure(case: ResilienceCase) -> bool:
    return case.what in (FAILURE, REPLACED)


def _happening(case: ResilienceCase, seed: int, steps: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks that fail or leave, and the step of each."""
    for rank, share in zip(case.victims(seed), case.shares(seed), strict=True):
        yield rank, max(1, int(share * steps))


def _kill(rank: int, step: int, averaged: float, buckets: int) -> Fault:
    """Return a kill after a share of the buckets is averaged; a share below 1 leaves at least one bucket."""
    done = buckets if averaged == 1 else min(buckets - 1, round(averaged * buckets))
    if done == 0:
        return Fault("kill", rank=rank, step=step)
    return Fault("kill", rank=rank, step=step, phase="allreduce", bucket=done - 1)


def _changes(case: ResilienceCase, happening: list[tuple[int, int]], steps: int) -> Iterator[MembershipChange]:
    if case.what in (REMOVAL, ADDITION):
        at = happening[0][1]
        yield MembershipChange(step=at, leave=tuple(sorted(rank for rank, step in happening if step == at)))
    if case.what in (REPLACED, ADDITION):
        back = max(step for _, step in happening) + max(1, round(GAP * steps))
        yield MembershipChange(step=back, join=tuple(range(case.workers, case.workers + case.count)))


@torch.no_grad()
def _test(model: torch.nn.Module, test: Any, device: str) -> tuple[float, float]:
    """Return the accuracy in percent, and the mean loss."""
    model.eval()
    right = total = 0
    loss = 0.0
    images, labels = test
    for start in range(0, len(labels), _CHUNK):
        x, y = images[start : start + _CHUNK].to(device), labels[start : start + _CHUNK].to(device)
        scores = model(x)
        loss += float(loss_of(scores, y)) * len(y)
        right += int((scores.argmax(-1) == y).sum())
        total += y.numel()
    return 100 * right / total, loss / len(labels)


def trials(network: NetworkSpec, data: Path | None, seed: int, cases: list[ResilienceCase]) -> list[Row]:
    """Return the results of all cases for one seed, compared with the failure-free training.

    Accuracy and loss are differences: positive is worse than failure-free. The distance of the weights is relative to
    the distance that the failure-free training moves them.
    """
    torch.set_num_threads(1)
    found: dict[str, ResilienceResult] = {}

    def train_those_that_part(trainer: VirtualDdp) -> None:
        """Start the cases that diverge in this step from a snapshot, so that common steps are computed only once."""
        part = [case for case in cases if _undisturbed(case, seed, network.steps) == trainer.step]
        begin = trainer.snapshot() if part else None
        found.update((case.key, train(network, data, seed, case, begin=begin)) for case in part)

    undisturbed = train(network, data, seed, None, before_step=train_those_that_part)
    begun = _begin(network, data, seed)
    moved = float((undisturbed.weights - begun).norm())
    rows: list[Row] = [{"case": "", "accuracy": undisturbed.accuracy, "loss": undisturbed.loss}]
    for case in cases:
        ended = found[case.key]
        rows.append(
            {
                "case": case.key,
                "accuracy": undisturbed.accuracy - ended.accuracy,
                "loss": ended.loss - undisturbed.loss,
                "distance": float((ended.weights - undisturbed.weights).norm()) / moved,
                "same": bool(torch.equal(ended.weights, undisturbed.weights)),
                "lost": ended.lost,
                "redone": ended.redone,
                "steps": ended.steps,
            }
        )
    return rows


def _begin(network: NetworkSpec, data: Path | None, seed: int) -> torch.Tensor:
    """Return the initial weights, flattened."""
    return torch.cat([parameter.detach().flatten() for parameter in fresh(network, data, seed).parameters()])
