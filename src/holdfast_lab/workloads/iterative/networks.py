"""Small networks trained by Adam or momentum; a block is a shard of 16 parameters, or a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data import Dataset, load_dataset
from holdfast_lab.workloads.iterative.base import Rates, State, euclidean
from holdfast_lab.workloads.models import Block, build, loss_of, make_model

SHARD = 16
"""Parameters of a shard; a shard never spans two tensors."""

Blocks = Literal["shards", "layers"]


class Optimizer(Protocol):
    """Turns gradients into steps, on rows of parameters; every row has its own state, initially zero."""

    @property
    def rate(self) -> float:
        """The learning rate, ``> 0``."""
        ...

    def begin(self, parameters: Tensor) -> State:
        """Return the state for ``parameters`` of shape (rows, width) before the first step.

        Each tensor of shape (rows, any).
        """
        ...

    def step(self, state: State, gradient: Tensor) -> None:
        """Take a step, in place; ``state`` also holds the parameters, as ``"parameters"``."""
        ...


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, bit-identical to :class:`torch.optim.Adam`, except that each row counts its own steps.

    So a row whose state is lost restarts from zeros, count included, as at the beginning. Zeros with a large count
    would make its first step 3.2 times as long, (1 - 0.9) / sqrt(1 - 0.999), which is another learning rate and not a
    recovery.

    Source:
        D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015.
    """

    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def begin(self, parameters: Tensor) -> State:
        """See :class:`Optimizer`."""
        m, v = torch.zeros_like(parameters), torch.zeros_like(parameters)
        return {"m": m, "v": v, "steps": parameters.new_zeros(len(parameters), 1)}

    def step(self, state: State, gradient: Tensor) -> None:
        """See :class:`Optimizer`."""
        steps = state["steps"].add_(1).double()
        first, second = (1 - torch.pow(beta, steps) for beta in self.betas)  # bias corrections
        m = state["m"].lerp_(gradient, 1 - self.betas[0])
        v = state["v"].mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        root = v.sqrt().div_(second.sqrt().float()).add_(self.epsilon)
        state["parameters"].sub_((m * (self.rate / first).float()).div_(root))


@dataclass(frozen=True, slots=True)
class Momentum:
    """Stochastic gradient descent with momentum, bit-identical to :class:`torch.optim.SGD`."""

    rate: float
    share: float = 0.9
    """Share of the last step that enters the next."""

    def begin(self, parameters: Tensor) -> State:
        """See :class:`Optimizer`."""
        return {"momentum": torch.zeros_like(parameters)}

    def step(self, state: State, gradient: Tensor) -> None:
        """See :class:`Optimizer`."""
        momentum = state["momentum"].mul_(self.share).add_(gradient)
        state["parameters"].add_(momentum, alpha=-self.rate)


class Network:
    """A network in training; an iteration is an optimizer step on a minibatch drawn with replacement.

    All parameters are in one tensor, and all gradients in another. Each tensor (for blocks that are layers: each layer)
    starts at the beginning of a row, and its last row is padded with zeros that stay.

    Args:
        name: The name of the program.
        seed: Seed of the minibatches, ``>= 0``.
        model: A float32 model without dropout and batch norm. The program owns it from then on.
        dataset: Images or text, as tensors.
        optimizer: The optimizer.
        batch: Samples of a minibatch, ``>= 1``.
        evaluated: :meth:`loss` uses the first ``evaluated`` training samples, ``>= 1``; all if there are fewer.
        blocks: ``"shards"`` of :data:`SHARD` parameters; or ``"layers"``, modules with parameters of their
            own. Rows are then as wide as the largest layer.

    Raises:
        ConfigError: if a number is out of range.
    """

    live = None

    def __init__(
        self,
        name: str,
        seed: int,
        model: nn.Module,
        dataset: Dataset,
        optimizer: Optimizer,
        *,
        batch: int,
        evaluated: int,
        blocks: Blocks,
    ) -> None:
        if batch < 1 or evaluated < 1 or not optimizer.rate > 0 or blocks not in get_args(Blocks):
            raise ConfigError(
                "batch and evaluated must be at least 1, learning_rate above 0, blocks one of "
                f"{', '.join(get_args(Blocks))}, got {batch}, {evaluated}, {optimizer.rate:g} and {blocks!r}"
            )
        self.name, self.seed, self.optimizer = name, seed, optimizer
        self.train, self.test = (cast("TensorDataset", part) for part in dataset)
        self._batch, self._evaluated = batch, self.train[:evaluated]
        self._model = model
        groups = list(_groups(model, blocks))
        sizes = [sum(parameter.numel() for parameter in group) for group in groups]
        width = SHARD if blocks == "shards" else max(sizes)
        filled = torch.cat([_filled(size, width) for size in sizes])
        self.blocks = len(filled)
        self._parameters, self._gradient = torch.zeros(2, self.blocks, width)
        lengths = [-(-size // width) * width for size in sizes]
        _gather(groups, lengths, self._parameters.view(-1), self._gradient.view(-1))
        self._start = {"parameters": self._parameters.clone()} | optimizer.begin(self._parameters)
        whole = [tensor.shape[1] == width for tensor in self._start.values()]
        self.block_bytes = (filled * sum(whole) + whole.count(False)) * self._parameters.element_size()

    def start(self) -> State:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return {name: tensor.clone() for name, tensor in self._start.items()}

    def iterate(self, state: State, iteration: int) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        chosen = self.minibatch(iteration)
        self._gradient.zero_()
        inputs, labels = self.train[chosen]
        loss_of(self.model(state)(inputs), labels).backward()
        self.optimizer.step(state, self._gradient)

    def minibatch(self, iteration: int) -> Tensor:
        """Return the numbers of the samples that ``iteration`` reads; int64 of shape (batch,)."""
        rng = np.random.default_rng((self.seed, 1, iteration))
        return torch.from_numpy(rng.integers(0, len(self.train), self._batch))

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """Return the parameters, then the optimizer's state in its order: m, v and steps of Adam, or momentum."""
        return tuple(state[name] for name in self._start)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the Euclidean distance of each block."""
        return euclidean(a, b)

    def mend(self, state: State, written: Tensor) -> None:
        """Do nothing: no other state depends on the rows."""

    def loss(self, state: State) -> float:
        """Return the mean cross-entropy, in nats, of a fixed set of training samples."""
        inputs, labels = self._evaluated
        with torch.no_grad():
            return float(loss_of(self.model(state)(inputs), labels))

    def accuracy(self, state: State) -> float:
        """Return the share of test samples (characters, for text) whose label has the highest score."""
        inputs, labels = self.test[:]
        with torch.no_grad():
            return float((self.model(state)(inputs).argmax(-1) == labels).float().mean())

    def model(self, state: State) -> nn.Module:
        """Return the network with the parameters of ``state``, until the next call of any method."""
        self._parameters.copy_(state["parameters"])
        return self._model


def _groups(model: nn.Module, blocks: Blocks) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that share a row."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if blocks == "layers" and own:
            yield own
        elif blocks == "shards":
            yield from ([parameter] for parameter in own)


def _filled(size: int, width: int) -> Tensor:
    """Return how much of each row ``size`` parameters fill; int64."""
    return torch.arange(size, 0, -width).clamp(max=width)


def _gather(groups: list[list[nn.Parameter]], lengths: list[int], values: Tensor, gradients: Tensor) -> None:
    """Move the parameters and their gradients into flat tensors, each group padded to its given length."""
    begin = 0
    for group, length in zip(groups, lengths, strict=True):
        at = begin
        for parameter in group:
            place = slice(at, at + parameter.numel())
            values[place] = parameter.detach().flatten()
            parameter.data = values[place].view_as(parameter)
            parameter.grad = gradients[place].view_as(parameter)  # backward accumulates into it in place
            at = place.stop
        begin += length


RATES = {
    "mlp-adam-digits": Rates(0.008, 0.032),
    "cnn-adam-digits": Rates(0.004, 0.016),
    "mlp-momentum-digits": Rates(0.08, 0.32),
    "cnn-momentum-digits": Rates(0.04, 0.16),
    "mlp-adam-fashion": Rates(0.002, 0.008),
    "cnn-adam-fashion": Rates(0.002, 0.008),
    "mlp-momentum-fashion": Rates(0.01, 0.04),
    "cnn-momentum-fashion": Rates(0.005, 0.02),
    "gpt-adam": Rates(0.001, 0.004),
}
"""By name of the program."""

OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {"adam": Adam, "momentum": Momentum}
"""By name; each is created with a learning rate."""


class _Network(NamedTuple):
    make: Callable[[Dataset, int], nn.Module]
    batch: int
    evaluated: int


def make(
    name: str,
    data: Path | None,
    seed: int,
    *,
    learning_rate: float | None = None,
    batch: int | None = None,
    evaluated: int | None = None,
    blocks: Blocks = "shards",
) -> Network:
    """Return the :class:`Network` that ``name`` describes: network, optimizer, dataset (Shakespeare for ``gpt``).

    None means: for ``learning_rate``, the stated one of :data:`RATES`; for ``batch``, 64, or 16 for ``gpt``; for
    ``evaluated``, 1000, or 500 for ``cnn``, or 64 texts of 32 characters for ``gpt``.
    """
    network, optimizer, *rest = name.split("-")
    dataset = _load(rest[0] if rest else "shakespeare", data)
    build_model, some, some_evaluated = _NETWORKS[network]
    return Network(
        name,
        seed,
        build_model(dataset, seed),
        dataset,
        OPTIMIZERS[optimizer](RATES[name].stated if learning_rate is None else learning_rate),
        batch=some if batch is None else batch,
        evaluated=some_evaluated if evaluated is None else evaluated,
        blocks=blocks,
    )


@cache
def _load(dataset: str, data: Path | None) -> Dataset:
    return load_dataset(dataset, data, block=_CONTEXT if dataset == "shakespeare" else None)


def _mlp(dataset: Dataset, seed: int) -> nn.Module:
    """Return 64-64-10 for digits; larger images get a hidden layer of 32."""
    inputs = math.prod(dataset.shape)
    hidden = 64 if inputs <= 64 else 32
    blocks = (
        Block("hidden", lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())),
        Block("head", lambda: nn.Linear(hidden, dataset.num_classes)),
    )
    return build(blocks, seed=seed)


def _cnn(dataset: Dataset, seed: int) -> nn.Module:
    """Return two convolutions, which shrink images of 8x8 to 4x4 and those of 28x28 to 7x7, and a linear layer."""
    channels, side, _ = dataset.shape
    first = 2 if side > 8 else 1
    left = math.ceil(math.ceil(side / first) / 2)
    blocks = (
        Block("conv1", lambda: nn.Sequential(nn.Conv2d(channels, 8, 3, first, padding=1), nn.ReLU())),
        Block("conv2", lambda: nn.Sequential(nn.Conv2d(8, 16, 3, 2, padding=1), nn.ReLU(), nn.Flatten())),
        Block("head", lambda: nn.Linear(16 * left**2, dataset.num_classes)),
    )
    return build(blocks, seed=seed)


_CONTEXT = 32


def _gpt(dataset: Dataset, seed: int) -> nn.Module:
    return make_model("gpt", dataset.num_classes, seed=seed, context=_CONTEXT, layers=2, heads=2, width=32, dropout=0.0)


_NETWORKS = {"mlp": _Network(_mlp, 64, 1000), "cnn": _Network(_cnn, 64, 500), "gpt": _Network(_gpt, 16, 64)}
