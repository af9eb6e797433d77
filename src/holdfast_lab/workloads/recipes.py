"""Training recipes of published experiments, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Stochastic gradient descent whose learning rate falls in steps (Caffe's policy ``step``).

    Caffe multiplies the gradient by the rate before it enters the momentum, torch afterwards, so the two differ for
    some steps after a change of the rate. Caffe's files also give biases twice the rate and no decay; this recipe does
    not.
    """

    learning_rate: float
    """Learning rate of the first step."""
    momentum: float
    """Share of the last update that enters the next."""
    weight_decay: float
    """Factor of the weights that is added to the gradient."""
    gamma: float
    """Factor of the learning rate, applied every ``every_steps``."""
    every_steps: int
    """Steps of the optimizer, not epochs."""
    batch: int
    """Samples per process and step."""
    source: str
    """Where the numbers are published."""

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.SGD:
        """Return the optimizer for ``parameters``."""
        return torch.optim.SGD(
            parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
        """Return the schedule of ``optimizer``, to be stepped after each of its steps."""
        return torch.optim.lr_scheduler.StepLR(optimizer, self.every_steps, self.gamma)


RECIPES = {
    "alexnet": Recipe(
        learning_rate=0.01,
        momentum=0.9,
        weight_decay=5e-4,
        gamma=0.1,
        every_steps=100_000,
        batch=256,
        source="matex-org/caffe-intel, branch feature/ft, models/bvlc_alexnet: solver.prototxt and train_val.prototxt",
    ),
    "googlenet": Recipe(
        learning_rate=0.01,
        momentum=0.9,
        weight_decay=2e-4,
        gamma=0.96,
        every_steps=320_000,
        batch=32,
        source="BVLC/caffe, which that branch contains, models/bvlc_googlenet: solver.prototxt and train_val.prototxt",
    ),
}
"""The recipes of V. Amatya et al. 2017 (arXiv 1709.03316), by network."""
