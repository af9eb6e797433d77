"""Networks and cases of the resilience study: what is trained, which failures happen, and which cases are tried."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

ROLLBACK, FORWARD, RESTART = STRATEGIES = ("rollback", "forward", "restart")
FAILURE, REMOVAL, REPLACED, ADDITION = WHATS = (
    "failure",
    "removal",
    "failure, then addition",
    "removal, then addition",
)
ALL, SOME, FEW = "all", "some", "few"
EARLY, MIDDLE, LATE, SPREAD = MOMENTS = ("early", "middle", "late", "spread")

_SHARE = {EARLY: 0.1, MIDDLE: 0.5, LATE: 0.9}
"""The step of the failure, as a share of all steps."""
GAP = 0.2
"""Replacements join after this share of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """A network and its training settings.

    Args:
        name: Its name in this study.
        model: Its name for :func:`holdfast_lab.workloads.make_model`.
        shape: Its options, by name.
        dataset: Name of the dataset.
        batch: Mini-batch size in samples, a multiple of every number of workers.
        steps: Number of steps.
        learning_rate: Learning rate of SGD with momentum 0.9.
        workers: Numbers of workers to try.
        seeds: Number of training runs of each case.
        bucket_bytes: Bucket size of the all-reduce.
        tried: :data:`ALL` cases, :data:`SOME` or :data:`FEW`.
        tested: Number of test samples to evaluate.
    """

    name: str
    model: str
    shape: tuple[tuple[str, float], ...] = ()
    dataset: str
    batch: int
    steps: int
    learning_rate: float
    workers: tuple[int, ...]
    seeds: int
    bucket_bytes: int = 1
    tried: str = SOME
    tested: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceCase:
    """The failures or changes in a training run, and the recovery strategy.

    Args:
        strategy: One of :data:`STRATEGIES`.
        workers: Number of virtual workers.
        count: Number of workers that fail or leave.
        what: One of :data:`WHATS`.
        moment: One of :data:`MOMENTS`: all in one step (early, middle or late), or each in a random step (spread).
        averaged: Share of the buckets that are averaged when the failure happens, from 0 to 1.
        batch: ``"global"`` or ``"local"``, see :class:`holdfast.Settings`.
        rescale: ``"survivors"`` or ``"original"``.
        every: Steps between two checkpoints, 0 without checkpoints.
    """

    strategy: str
    workers: int
    count: int
    what: str = FAILURE
    moment: str = SPREAD
    averaged: float = 0.0
    batch: str = "global"
    rescale: str = "survivors"
    every: int = 0

    def columns(self) -> dict[str, Any]:
        """Return the case as columns of a row."""
        return asdict(self) | {"lost_share": self.count / self.workers}

    @property
    def key(self) -> str:
        """Return the key of the case in files."""
        return "/".join(str(value) for value in asdict(self).values())

    def victims(self, seed: int) -> list[int]:
        """Return the ranks that fail or leave; with the same seed they are the same for all strategies and policies."""
        return self._rng(seed).sample(range(self.workers), self.count)

    def shares(self, seed: int) -> list[float]:
        """Return when each of these ranks is lost, as a share of the training; random ones are away from both ends."""
        if self.moment != SPREAD:
            return [_SHARE[self.moment]] * self.count
        rng = self._rng(seed)
        rng.sample(range(self.workers), self.count)
        return [0.05 + 0.85 * rng.random() for _ in range(self.count)]

    def _rng(self, seed: int) -> random.Random:
        return random.Random(f"{seed}/{self.workers}/{self.count}/{self.moment}")


def _gpt(context: int, layers: int, width: int) -> tuple[tuple[str, float], ...]:
    return tuple({"context": context, "layers": layers, "heads": 4, "width": width, "dropout": 0.0}.items())


QUICK = (
    NetworkSpec(name="mlp", model="mlp", dataset="digits", batch=512, steps=30, learning_rate=0.1, workers=(16, 512), seeds=4),
)  # fmt: skip
INSIDE = (
    NetworkSpec(name="mlp", model="mlp", dataset="digits", batch=1024, steps=40, learning_rate=0.1,
            workers=(4, 16, 64, 256, 1024), seeds=30, tried=ALL),
    NetworkSpec(name="cnn", model="cnn", dataset="digits", batch=256, steps=60, learning_rate=0.05,
            workers=(4, 16, 64, 256), seeds=30),
)  # fmt: skip
READ = (
    NetworkSpec(name="alexnet-narrow", model="alexnet", shape=(("width", 16),), dataset="fashion", batch=64, steps=240,
            learning_rate=0.05, workers=(64,), seeds=30, tried=FEW, tested=1000),
    NetworkSpec(name="resnet18-narrow", model="resnet18", shape=(("width", 8),), dataset="fashion", batch=64, steps=60,
            learning_rate=0.1, workers=(64,), seeds=30, tried=FEW, tested=1000),
    NetworkSpec(name="gpt-small", model="gpt", shape=_gpt(context=128, layers=2, width=32), dataset="shakespeare", batch=64,
            steps=60, learning_rate=0.3, workers=(64,), seeds=30, tried=FEW, tested=100),
)  # fmt: skip
"""Need ``--data``; narrow enough for a CPU."""
WIDE = (
    NetworkSpec(name="alexnet", model="alexnet", dataset="fashion", batch=1024, steps=300, learning_rate=0.02,
            workers=(4, 64, 1024), seeds=30, tested=2000),
    NetworkSpec(name="resnet18", model="resnet18", dataset="fashion", batch=1024, steps=120, learning_rate=0.05,
            workers=(4, 64, 1024), seeds=30, tested=2000),
    NetworkSpec(name="gpt", model="gpt", shape=_gpt(context=128, layers=4, width=128), dataset="shakespeare", batch=256,
            steps=300, learning_rate=0.1, workers=(4, 64, 256), seeds=30, tested=200),
)  # fmt: skip
"""Need ``--data`` and ``--network``: they take days on a CPU, so they are for GPUs."""


def cases(network: NetworkSpec, *, quick: bool) -> list[ResilienceCase]:
    """Return the cases to try with a network."""
    yielded = {ALL: _all, SOME: _some, FEW: _few}[network.tried]
    return list(dict.fromkeys(_quick(network) if quick else yielded(network)))


def _counts(workers: int) -> list[int]:
    return [count for count in (1, 4, 16, 64) if count <= workers // 4]


def _quick(network: NetworkSpec) -> Iterator[ResilienceCase]:
    for workers in network.workers:
        yield from _around(workers, 16 if workers > 64 else 4, averaged=(0.0, 0.5), everies=(5,))


def _some(network: NetworkSpec) -> Iterator[ResilienceCase]:
    for workers in network.workers:
        for count in _counts(workers):
            yield from _around(workers, count, averaged=(0.0, 0.5), everies=(5, 20))


def _few(network: NetworkSpec) -> Iterator[ResilienceCase]:
    for workers in network.workers:
        how = {"workers": workers, "count": _counts(workers)[-1]}
        yield ResilienceCase(strategy=ROLLBACK, **how)  # type: ignore[arg-type]
        yield ResilienceCase(strategy=RESTART, every=5, **how)  # type: ignore[arg-type]
        for averaged in (0.0, 0.5, 1.0):
            yield ResilienceCase(strategy=FORWARD, averaged=averaged, **how)  # type: ignore[arg-type]
        for rescale in ("survivors", "original"):
            yield ResilienceCase(strategy=FORWARD, averaged=0.5, batch="local", rescale=rescale, **how)  # type: ignore[arg-type]
        yield ResilienceCase(strategy=ROLLBACK, what=ADDITION, moment=MIDDLE, batch="local", **how)  # type: ignore[arg-type]


def _all(network: NetworkSpec) -> Iterator[ResilienceCase]:
    for workers in network.workers:
        for count in _counts(workers):
            yield from _around(workers, count, averaged=(0.0, 0.5, 0.9), everies=(2, 5, 20))
            for moment in (EARLY, MIDDLE, LATE):
                for averaged in (0.0, 0.5, 0.9):
                    for batch, rescale in _POLICIES:
                        yield ResilienceCase(strategy=FORWARD, workers=workers, count=count, moment=moment,
                                   averaged=averaged, batch=batch, rescale=rescale)  # fmt: skip


_POLICIES = tuple((batch, rescale) for batch in ("global", "local") for rescale in ("survivors", "original"))


def _around(
    workers: int, count: int, averaged: tuple[float, ...], everies: tuple[int, ...]
) -> Iterator[ResilienceCase]:
    """Yield all strategies and policies with failures at random steps, and the planned changes."""
    for batch, rescale in _POLICIES:
        how = {"workers": workers, "count": count, "batch": batch, "rescale": rescale}
        for share in (*averaged, 1.0):
            yield ResilienceCase(strategy=FORWARD, averaged=share, **how)  # type: ignore[arg-type]
        if (batch, rescale) != ("global", "original"):  # no sample is lost, so there is nothing to rescale
            yield ResilienceCase(strategy=ROLLBACK, **how)  # type: ignore[arg-type]
            for every in everies:
                yield ResilienceCase(strategy=RESTART, every=every, **how)  # type: ignore[arg-type]
    for what in (REMOVAL, REPLACED, ADDITION):
        for batch in ("global", "local"):
            how = {"workers": workers, "count": count, "batch": batch}
            yield ResilienceCase(strategy=ROLLBACK, what=what, moment=MIDDLE, **how)  # type: ignore[arg-type]
