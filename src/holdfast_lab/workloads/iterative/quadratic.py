"""Gradient descent on a quadratic: optimum and convergence rate are known, so a bound can be tested exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.workloads.iterative.base import State, euclidean


class Quadratic:
    """x(k+1) = x(k) - eta (H (x(k) - x*) + noise z(k)), with z(k) normal, x(0) = 0 and x* normal.

    The eigenvalues of H go from ``1 / condition`` to 1 in equal ratios. Everything is float64, so a distance to x* can
    be followed, and compared with a bound, down to 1e-15 of its initial value.

    Args:
        name: The name of the program.
        seed: Seed of x*, of the rotation, and of the noise.
        dimension: Length of x, ``>= 2``.
        condition: Largest over smallest eigenvalue, ``>= 1``.
        rotated: H has random orthogonal eigenvectors; otherwise it is diagonal, the smallest eigenvalue first.
        width: Coordinates of a block, ``>= 1``; must divide ``dimension``.
        learning_rate: eta, above 0 and below 2. At most 1, no coordinate along an eigenvector ever changes its sign.
        noise: Standard deviation of the noise in each coordinate of the gradient, ``>= 0``.

    Raises:
        ConfigError: if a number is out of range.
    """

    live = None

    def __init__(
        self,
        name: str = "quadratic",
        seed: int = 0,
        *,
        dimension: int = 64,
        condition: float = 30.0,
        rotated: bool = True,
        width: int = 1,
        learning_rate: float = 1.0,
        noise: float = 0.0,
    ) -> None:
        if dimension < 2 or width < 1 or dimension % width:
            raise ConfigError(
                f"dimension must be at least 2 and a multiple of width, got dimension {dimension} and width {width}"
            )
        if not condition >= 1 or not 0 < learning_rate < 2 or not noise >= 0:
            raise ConfigError(
                "condition must be at least 1, learning_rate above 0 and below 2, noise at least 0, "
                f"got {condition:g}, {learning_rate:g} and {noise:g}"
            )
        rng = np.random.default_rng((seed, 0))
        eigenvalues = torch.from_numpy(np.geomspace(1 / condition, 1, dimension))
        basis = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0] if rotated else np.eye(dimension)
        vectors = torch.from_numpy(basis)
        self.name, self.seed = name, seed
        self.blocks, self.width = dimension // width, width
        self.learning_rate, self.noise = learning_rate, noise
        self.block_bytes = torch.full((self.blocks,), width * 8)
        self.curvature = vectors @ eigenvalues.diag() @ vectors.T
        self.optimum = torch.from_numpy(rng.standard_normal((self.blocks, width)))
        """x*, in the shape of the parameters."""
        self.rate = float((1 - learning_rate * eigenvalues).abs().max())
        """c, the exact contraction factor: without noise ||x(k+1) - x*|| <= c ||x(k) - x*||, and no smaller number
        suffices."""

    def start(self) -> State:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return {"x": torch.zeros_like(self.optimum)}

    def iterate(self, state: State, iteration: int) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        x = state["x"]
        gradient = self._gradient(x)
        if self.noise:
            drawn = np.random.default_rng((self.seed, 1, iteration)).standard_normal(x.shape)
            gradient.add_(torch.from_numpy(drawn), alpha=self.noise)
        x.sub_(gradient, alpha=self.learning_rate)

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return (state["x"],)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return euclidean(a, b)

    def mend(self, state: State, written: Tensor) -> None:
        """Do nothing: no other state depends on the rows."""

    def loss(self, state: State) -> float:
        """Return (x - x*)' H (x - x*) / 2."""
        x = state["x"]
        return 0.5 * float(torch.sum((x - self.optimum) * self._gradient(x)))

    def _gradient(self, x: Tensor) -> Tensor:
        return (self.curvature @ (x - self.optimum).flatten()).view_as(x)


def make(
    name: str,
    data: Path | None,
    seed: int,
    *,
    dimension: int = 64,
    condition: float = 30.0,
    width: int = 1,
    learning_rate: float = 1.0,
    noise: float = 0.0,
) -> Quadratic:
    """Return a :class:`Quadratic`, diagonal if its name says so; it needs no ``data``."""
    return Quadratic(
        name,
        seed,
        dimension=dimension,
        condition=condition,
        rotated=name != "quadratic-diagonal",
        width=width,
        learning_rate=learning_rate,
        noise=noise,
    )
