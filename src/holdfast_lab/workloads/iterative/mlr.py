"""Multinomial logistic regression by minibatch SGD, on dense samples and on bags of words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data import DatasetPart, Documents, load_dataset
from holdfast_lab.workloads.iterative.base import Rates, State, euclidean

BATCH = 64
"""Default number of samples of an iteration."""

EVALUATED = 2000
"""Maximum number of training samples for the loss."""

RATES = {
    "mlr-digits": Rates(stated=2.0, best=8.0),
    "mlr-fashion": Rates(stated=2**-5, best=2**-3),
    "mlr-covertype": Rates(stated=0.25, best=1.0),
    "mlr-reuters": Rates(stated=32.0, best=128.0),
}
"""By name of the program, for minibatches of :data:`BATCH`."""


class Inputs(Protocol):
    """Samples as rows of a matrix, whose last column is 1 for the bias."""

    features: int
    """Number of columns, including the bias."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def take(self, chosen: Tensor) -> Inputs:
        """Return the samples with these numbers, int64."""
        ...

    def times(self, weights: Tensor) -> Tensor:
        """Return the matrix times ``weights``."""
        ...

    def add_transposed(self, weights: Tensor, slopes: Tensor) -> None:
        """Add the transposed matrix times ``slopes`` to ``weights``."""
        ...


class Dense:
    """Samples with a number for each feature.

    Args:
        matrix: float32 of shape (samples, features), including the bias column of 1.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.features = matrix, matrix.shape[1]

    def __len__(self) -> int:
        return len(self.matrix)

    def take(self, chosen: Tensor) -> Dense:
        """See :class:`Inputs`."""
        return Dense(self.matrix.index_select(0, chosen))

    def times(self, weights: Tensor) -> Tensor:
        """See :class:`Inputs`."""
        return self.matrix @ weights

    def add_transposed(self, weights: Tensor, slopes: Tensor) -> None:
        """See :class:`Inputs`."""
        weights.addmm_(self.matrix.T, slopes)


class Bags:
    """Sparse samples: documents with the words that they contain.

    Args:
        words: int64: features of the samples, one sample after the other, each ending with the bias.
        values: float32: the values of these features.
        lengths: int64 (samples): number of features of each sample.
        features: Total number of features.
    """

    def __init__(self, words: Tensor, values: Tensor, lengths: Tensor, features: int) -> None:
        self.words, self.values, self.lengths, self.features = words, values, lengths, features
        self.offsets = lengths.cumsum(0) - lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, chosen: Tensor) -> Bags:
        """See :class:`Inputs`."""
        lengths = self.lengths[chosen]
        # The n-th entry of a bag is n behind the bag's offset, in source and result.
        moved = self.offsets[chosen] - (lengths.cumsum(0) - lengths)
        places = moved.repeat_interleave(lengths)
        places += torch.arange(len(places))
        return Bags(self.words[places], self.values[places], lengths, self.features)

    def times(self, weights: Tensor) -> Tensor:
        """See :class:`Inputs`."""
        return F.embedding_bag(self.words, weights, self.offsets, mode="sum", per_sample_weights=self.values)

    def add_transposed(self, weights: Tensor, slopes: Tensor) -> None:
        """See :class:`Inputs`."""
        weights.index_add_(0, self.words, slopes.repeat_interleave(self.lengths, 0).mul_(self.values[:, None]))


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs with their classes."""

    inputs: Inputs
    labels: Tensor
    """int64 (samples)."""

    def take(self, chosen: Tensor) -> Samples:
        """Return the samples with these numbers, int64."""
        return Samples(self.inputs.take(chosen), self.labels[chosen])


class Logistic:
    """Weights of shape (features, classes), initially 0; a block is a feature's row, the last one the bias's.

    Minibatches are drawn with replacement.

    Args:
        name: The name of the program.
        seed: Seed of the minibatches.
        train: Training samples.
        test: Samples for :meth:`accuracy`.
        classes: Number of classes.
        learning_rate: Factor of the mean gradient of a minibatch, ``> 0``.
        batch: Samples of a minibatch, ``>= 1``.
        evaluated: Number of training samples for :meth:`loss`, ``>= 1``, the same for every seed; all if there are
            fewer.

    Raises:
        ConfigError: if a number is out of range.
    """

    live = None

    def __init__(
        self,
        name: str,
        seed: int,
        train: Samples,
        test: Samples,
        classes: int,
        *,
        learning_rate: float,
        batch: int = BATCH,
        evaluated: int = EVALUATED,
    ) -> None:
        if not learning_rate > 0 or batch < 1 or evaluated < 1:
            raise ConfigError(
                "learning_rate must be above 0, batch and evaluated at least 1, "
                f"got {learning_rate:g}, {batch} and {evaluated}"
            )
        self.name, self.seed = name, seed
        self.learning_rate, self.batch = learning_rate, batch
        self.train, self.test = train, test
        self.evaluated = train.take(
            torch.from_numpy(np.random.default_rng(0).permutation(len(train.labels))[:evaluated])
        )
        self.blocks, self.classes = train.inputs.features, classes
        self.block_bytes = torch.full((self.blocks,), classes * 4)
        self._one_hot = torch.eye(classes)

    def start(self) -> State:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return {"weights": torch.zeros(self.blocks, self.classes)}

    def drawn(self, iteration: int) -> Tensor:
        """Return the numbers of the training samples of an iteration, int64 (batch)."""
        rng = np.random.default_rng((self.seed, 1, iteration))
        return torch.from_numpy(rng.integers(0, len(self.train.labels), self.batch))

    def iterate(self, state: State, iteration: int) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        weights = state["weights"]
        batch = self.train.take(self.drawn(iteration))
        slopes = torch.softmax(batch.inputs.times(weights), 1)
        slopes.sub_(self._one_hot[batch.labels])
        batch.inputs.add_transposed(weights, slopes.mul_(-self.learning_rate / self.batch))

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return (state["weights"],)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return euclidean(a, b)

    def mend(self, state: State, written: Tensor) -> None:
        """Do nothing: no other state depends on the rows."""

    def loss(self, state: State) -> float:
        """Return the mean cross-entropy on the evaluated samples, in nats."""
        scores = self.evaluated.inputs.times(state["weights"])
        return float(F.cross_entropy(scores, self.evaluated.labels))

    def accuracy(self, state: State) -> float:
        """Return the share of test samples whose class has the highest score."""
        scores = self.test.inputs.times(state["weights"])
        return float((scores.argmax(1) == self.test.labels).float().mean())


def make(
    name: str,
    data: Path | None,
    seed: int,
    *,
    learning_rate: float | None = None,
    batch: int = BATCH,
    evaluated: int = EVALUATED,
) -> Logistic:
    """Return a :class:`Logistic` on the dataset that ``name`` ends with; ``learning_rate`` None is the stated one."""
    rate = RATES[name].stated if learning_rate is None else learning_rate
    train, test, classes = _load(name.removeprefix("mlr-"), data)
    return Logistic(name, seed, train, test, classes, learning_rate=rate, batch=batch, evaluated=evaluated)


@cache
def _load(dataset: str, data: Path | None) -> tuple[Samples, Samples, int]:
    loaded = load_dataset(dataset, data)
    return samples_of(loaded.train), samples_of(loaded.test), loaded.num_classes


def samples_of(part: DatasetPart) -> Samples:
    """Return the samples of a part of a dataset whose kind is images, table or documents.

    A document's word counts are divided by their Euclidean length.
    """
    if isinstance(part, Documents):
        return _from_documents(part)
    x, labels = part[:]
    return Samples(Dense(F.pad(x.flatten(1), (0, 1), value=1.0)), labels)


def _from_documents(documents: Documents) -> Samples:
    lengths, bias = documents.offsets.diff(), len(documents.vocabulary)
    every = torch.arange(len(documents))
    document = every.repeat_interleave(lengths)
    counts = documents.counts.float()
    norms = torch.zeros(len(documents)).index_add_(0, document, counts.square()).sqrt_()
    order = torch.cat([document, every]).argsort(stable=True)  # each document's bias follows its words
    words = torch.cat([documents.words, torch.full_like(every, bias)])[order]
    values = torch.cat([counts / norms[document], torch.ones(len(documents))])[order]
    return Samples(Bags(words, values, lengths + 1, bias + 1), documents.labels)
