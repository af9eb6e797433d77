"""The interface of iterative-convergent programs to fault studies: x(k+1) = f(x(k), k), with state in blocks.

Source: Qiao, Aragam, Zhang, Xing, "Fault tolerance in iterative-convergent machine learning", ICML 2019.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Everything that an iteration reads and writes, by name."""


class Program(Protocol):
    """An iterative-convergent program with its data.

    Every random number is a function of (seed, iteration, place in the data), never of a generator's state. So
    a disturbed run draws the same numbers as the undisturbed one, and they differ only by the disturbance.
    """

    name: str
    blocks: int
    """Number of blocks; a block is lost, saved and restored as a whole."""
    block_bytes: Tensor
    """Bytes to save each block as it is; int64, shape (blocks,)."""
    live: Tensor | None
    """For each block, whether the next iteration reads it before writing it; None: all are read. Bool, shape
    (blocks,)."""

    def start(self) -> State:
        """Return x(0), a function of the seed."""
        ...

    def iterate(self, state: State, iteration: int) -> None:
        """Run an iteration, in place.

        Args:
            state: State of the program.
            iteration: Counts from 0.
        """
        ...

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """Return views on the state, of shape (blocks, any width): first the parameters, then their optimizer state.

        Call :meth:`mend` after writing to a view.
        """
        ...

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distance of each block of the parameters ``a`` to that of ``b``.

        Args:
            a: Parameters as returned by :meth:`rows`.
            b: The same.

        Returns:
            Numbers ``>= 0`` of shape (blocks,).
        """
        ...

    def mend(self, state: State, written: Tensor) -> None:
        """Recompute the state that depends on the rows, some of which were written.

        Args:
            state: State of the program.
            written: Numbers of the written blocks; int64.
        """
        ...

    def loss(self, state: State) -> float:
        """Return the loss on a fixed set of samples, without random numbers."""
        ...


class Rates(NamedTuple):
    """Learning rates of a program."""

    stated: float
    """A moderate rate, a quarter of the best; a poorly tuned rate would favour whatever lengthens the steps."""
    best: float
    """The rate with the least mean loss in iterations 285 to 300 in a sweep by factors of 2, mean of three seeds."""


def copy_of(state: State) -> State:
    """Return a copy that shares no memory with ``state``."""
    return {name: tensor.clone() for name, tensor in state.items()}


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance between corresponding rows of ``a`` and ``b``; both of shape (blocks, width)."""
    return torch.linalg.vector_norm(a - b, dim=1)  # type: ignore[no-any-return]
