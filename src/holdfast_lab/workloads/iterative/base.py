"""What a program that converges by iterating is to those who disturb it: x(k+1) = f(x(k), k), its state in blocks.

Source: Qiao, Aragam, Zhang, Xing, "Fault tolerance in iterative-convergent machine learning", ICML 2019.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""All that an iteration reads and writes, by name."""


class Program(Protocol):
    """An iterative-convergent program on its data.

    Everything that is drawn is a function of (seed, iteration, place in the data), never of a generator's state: then
    a disturbed run draws what the undisturbed one draws, and their difference is the disturbance alone.
    """

    name: str
    blocks: int
    """How many; a block is lost, saved and restored as a whole."""
    block_bytes: Tensor
    """What saving each block as it is takes; int64, of shape (blocks,)."""
    live: Tensor | None
    """Of each block, whether the next iteration reads it before it writes it; None: of all. Bool, of shape (blocks,)."""

    def start(self) -> State:
        """Return x(0), a function of the seed."""
        ...

    def iterate(self, state: State, iteration: int) -> None:
        """Take a step, in place.

        Args:
            state: Of the program.
            iteration: Counts from 0.
        """
        ...

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """Return views on the state, each of shape (blocks, any width): first the parameters, then what goes with them.

        What goes with them is an optimizer's state. Who writes to a view calls :meth:`mend` then.
        """
        ...

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return how far each block of the parameters ``a`` is from that of ``b``.

        Args:
            a: As :meth:`rows` returns the parameters.
            b: Alike.

        Returns:
            Numbers ``>= 0`` of shape (blocks,).
        """
        ...

    def mend(self, state: State, written: Tensor) -> None:
        """Compute again what follows from the rows, of which some were written.

        Args:
            state: Of the program.
            written: Numbers of the blocks; int64.
        """
        ...

    def loss(self, state: State) -> float:
        """Return the loss on a fixed set of samples; nothing is drawn for it."""
        ...


class Rates(NamedTuple):
    """Learning rates of a program."""

    stated: float
    """A moderate one, a quarter of the best: an under-tuned rate flatters whatever makes steps larger."""
    best: float
    """That of a sweep by factors of 2 with the least mean loss in iterations 285 to 300, mean of three seeds."""


def copy_of(state: State) -> State:
    """Return a state that shares no memory with ``state``."""
    return {name: tensor.clone() for name, tensor in state.items()}


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance of each row of ``a`` to that of ``b``; both of shape (blocks, width)."""
    return torch.linalg.vector_norm(a - b, dim=1)  # type: ignore[no-any-return]
