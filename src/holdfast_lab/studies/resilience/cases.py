"""What the study of resilience trains, and what happens to it: networks, cases, and which cases are tried."""

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
"""Of the steps."""
GAP = 0.2
"""After so large a share of the steps newcomers take the places of those who are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network, and what it is trained on.

    Args:
        name: What it is called here.
        model: As :func:`holdfast_lab.workloads.make_model` knows it.
        shape: Its options, by name.
        dataset: Its data.
        batch: Samples of a step, a multiple of all numbers of workers.
        steps: That a training has.
        learning_rate: Of SGD with momentum 0.9.
        workers: Numbers of workers that are tried.
        seeds: Trainings of each case.
        bucket_bytes: Of a sum.
        tried: :data:`ALL` cases, :data:`SOME` or :data:`FEW`.
        tested: So many samples of the test set are looked at.
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
class Case:
    """What happens to a training, and what is done about it.

    Args:
        strategy: One of :data:`STRATEGIES`.
        workers: Logical ones.
        count: So many are lost, or leave.
        what: One of :data:`WHATS`.
        moment: When: all in one step, early, in the middle or late, or each in a step of its own, which is drawn.
        averaged: Share of the buckets that are averaged by then, from 0 to 1.
        batch: ``"global"`` or ``"local"``, see :class:`holdfast.Settings`.
        rescale: ``"survivors"`` or ``"original"``.
        every: Steps between two checkpoints, 0 where there are none.
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
        """Return it as columns of a row."""
        return asdict(self) | {"lost_share": self.count / self.workers}

    @property
    def key(self) -> str:
        """Return its name."""
        return "/".join(str(value) for value in asdict(self).values())

    def victims(self, seed: int) -> list[int]:
        """Return who is lost: with a seed the same for all strategies and policies."""
        return self._rng(seed).sample(range(self.workers), self.count)

    def shares(self, seed: int) -> list[float]:
        """Return for each victim when it is lost, as a share of the training; drawn ones lie away from its two ends."""
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
    Network(name="mlp", model="mlp", dataset="digits", batch=512, steps=30, learning_rate=0.1, workers=(16, 512), seeds=4),
)  # fmt: skip
INSIDE = (
    Network(name="mlp", model="mlp", dataset="digits", batch=1024, steps=40, learning_rate=0.1,
            workers=(4, 16, 64, 256, 1024), seeds=30, tried=ALL),
    Network(name="cnn", model="cnn", dataset="digits", batch=256, steps=60, learning_rate=0.05,
            workers=(4, 16, 64, 256), seeds=30),
)  # fmt: skip
READ = (
    Network(name="alexnet-narrow", model="alexnet", shape=(("width", 16),), dataset="fashion", batch=64, steps=240,
            learning_rate=0.05, workers=(64,), seeds=30, tried=FEW, tested=1000),
    Network(name="resnet18-narrow", model="resnet18", shape=(("width", 8),), dataset="fashion", batch=64, steps=60,
            learning_rate=0.1, workers=(64,), seeds=30, tried=FEW, tested=1000),
    Network(name="gpt-small", model="gpt", shape=_gpt(context=128, layers=2, width=32), dataset="shakespeare", batch=64,
            steps=60, learning_rate=0.3, workers=(64,), seeds=30, tried=FEW, tested=100),
)  # fmt: skip
"""By ``--data``: narrow enough for a CPU."""
WIDE = (
    Network(name="alexnet", model="alexnet", dataset="fashion", batch=1024, steps=300, learning_rate=0.02,
            workers=(4, 64, 1024), seeds=30, tested=2000),
    Network(name="resnet18", model="resnet18", dataset="fashion", batch=1024, steps=120, learning_rate=0.05,
            workers=(4, 64, 1024), seeds=30, tested=2000),
    Network(name="gpt", model="gpt", shape=_gpt(context=128, layers=4, width=128), dataset="shakespeare", batch=256,
            steps=300, learning_rate=0.1, workers=(4, 64, 256), seeds=30, tested=200),
)  # fmt: skip
"""By ``--data`` and their name alone: days on a CPU, which is for those who have a GPU."""


def cases(network: Network, *, quick: bool) -> list[Case]:
    """Return what is tried with a network."""
    yielded = {ALL: _all, SOME: _some, FEW: _few}[network.tried]
    return list(dict.fromkeys(_quick(network) if quick else yielded(network)))


def network_of(name: str) -> Network:
    """Return a network of the whole study by its name."""
    return next(network for network in (*INSIDE, *READ, *WIDE) if network.name == name)


def _counts(workers: int) -> list[int]:
    return [count for count in (1, 4, 16, 64) if count <= workers // 4]


def _quick(network: Network) -> Iterator[Case]:
    for workers in network.workers:
        yield from _around(workers, 16 if workers > 64 else 4, averaged=(0.0, 0.5), everies=(5,))


def _some(network: Network) -> Iterator[Case]:
    for workers in network.workers:
        for count in _counts(workers):
            yield from _around(workers, count, averaged=(0.0, 0.5), everies=(5, 20))


def _few(network: Network) -> Iterator[Case]:
    for workers in network.workers:
        how = {"workers": workers, "count": _counts(workers)[-1]}
        yield Case(strategy=ROLLBACK, **how)  # type: ignore[arg-type]
        yield Case(strategy=RESTART, every=5, **how)  # type: ignore[arg-type]
        for averaged in (0.0, 0.5, 1.0):
            yield Case(strategy=FORWARD, averaged=averaged, **how)  # type: ignore[arg-type]
        for rescale in ("survivors", "original"):
            yield Case(strategy=FORWARD, averaged=0.5, batch="local", rescale=rescale, **how)  # type: ignore[arg-type]
        yield Case(strategy=ROLLBACK, what=ADDITION, moment=MIDDLE, batch="local", **how)  # type: ignore[arg-type]


def _all(network: Network) -> Iterator[Case]:
    for workers in network.workers:
        for count in _counts(workers):
            yield from _around(workers, count, averaged=(0.0, 0.5, 0.9), everies=(2, 5, 20))
            for moment in (EARLY, MIDDLE, LATE):
                for averaged in (0.0, 0.5, 0.9):
                    for batch, rescale in _POLICIES:
                        yield Case(strategy=FORWARD, workers=workers, count=count, moment=moment,
                                   averaged=averaged, batch=batch, rescale=rescale)  # fmt: skip


_POLICIES = tuple((batch, rescale) for batch in ("global", "local") for rescale in ("survivors", "original"))


def _around(workers: int, count: int, averaged: tuple[float, ...], everies: tuple[int, ...]) -> Iterator[Case]:
    """Yield all strategies and policies with failures at drawn steps; and what is planned."""
    for batch, rescale in _POLICIES:
        how = {"workers": workers, "count": count, "batch": batch, "rescale": rescale}
        for share in (*averaged, 1.0):
            yield Case(strategy=FORWARD, averaged=share, **how)  # type: ignore[arg-type]
        if (batch, rescale) != ("global", "original"):  # nothing is lost, nothing is to be scaled
            yield Case(strategy=ROLLBACK, **how)  # type: ignore[arg-type]
            for every in everies:
                yield Case(strategy=RESTART, every=every, **how)  # type: ignore[arg-type]
    for what in (REMOVAL, REPLACED, ADDITION):
        for batch in ("global", "local"):
            how = {"workers": workers, "count": count, "batch": batch}
            yield Case(strategy=ROLLBACK, what=what, moment=MIDDLE, **how)  # type: ignore[arg-type]
