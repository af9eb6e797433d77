"""The kinds of perturbations of a run, each applied once, several times or at every step.

All random draws are functions of (seed, iteration). Blocks are overwritten as a whole, including their optimizer state;
kinds that add to the parameters, or round them, do not change the optimizer state.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.studies.scar.perturbation import parameters
from holdfast_lab.workloads.iterative.base import Program, State

Rows = tuple[Tensor, ...]

SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type for each size of a number in bytes."""


@dataclass(frozen=True, slots=True)
class IterationChoice:
    """The iterations that are perturbed.

    Args:
        iterations: Their numbers; None: all iterations.
    """

    iterations: frozenset[int] | None = None

    def __contains__(self, iteration: int) -> bool:
        """Return whether an iteration is perturbed."""
        return self.iterations is None or iteration in self.iterations


EVERY_STEP = IterationChoice()


def at(*iterations: int) -> IterationChoice:
    """Return the given iterations, counted from 0."""
    return IterationChoice(frozenset(iterations))


def drawn(seed: int, iteration: int) -> np.random.Generator:
    """Return the random generator of an iteration: always the same for the same arguments."""
    return np.random.default_rng((seed, iteration))


def some_blocks(program: Program, share: float, rng: np.random.Generator) -> Tensor:
    """Return the indices of a random share of the blocks, rounded to whole blocks; int64, ascending.

    Args:
        program: The program.
        share: Share of the blocks, from 0 to 1.
        rng: The random generator.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of the blocks must be from 0 to 1, got {share}")
    return torch.from_numpy(np.sort(rng.permutation(program.blocks)[: round(share * program.blocks)]))


def _copied(rows: Rows) -> Rows:
    return tuple(view.clone() for view in rows)


def _write(state: State, program: Program, blocks: Tensor, source: Rows) -> None:
    """Copy the rows of ``blocks`` from ``source``."""
    for view, values in zip(program.rows(state), source, strict=True):
        view[blocks] = values[blocks]
    program.mend(state, blocks)


def _numbers(state: State, program: Program) -> Tensor:
    """Return the parameters if they are floating-point numbers."""
    values = parameters(program, state)
    if not values.is_floating_point():
        raise ConfigError(
            f"parameters of {program.name} are {values.dtype}, which cannot be perturbed by addition or rounding; "
            "reset blocks instead"
        )
    return values


def _mend_all(state: State, program: Program) -> None:
    program.mend(state, torch.arange(program.blocks))


# -- added to the parameters


class RandomDirection:
    """A step of a given length in a uniformly random direction.

    Args:
        when: Perturbed iterations.
        size: Euclidean length, ``>= 0``.
        seed: Seed of the direction.
    """

    def __init__(self, when: IterationChoice, size: float, seed: int) -> None:
        self._when, self._size, self._seed = when, size, seed

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Add the step."""
        if iteration not in self._when:
            return
        values = _numbers(state, program)
        direction = torch.from_numpy(drawn(self._seed, iteration).standard_normal(tuple(values.shape)))
        values += (direction * (self._size / torch.linalg.vector_norm(direction))).to(values.dtype)
        _mend_all(state, program)


class Adversarial:
    """A step of a given length directly away from the optimum.

    Args:
        when: Perturbed iterations.
        size: Euclidean length, ``>= 0``.
        optimum: x*, of the shape of the parameters.
    """

    def __init__(self, when: IterationChoice, size: float, optimum: Tensor) -> None:
        self._when, self._size, self._optimum = when, size, optimum

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Add the step; at the optimum itself every direction leads away, and the vector of ones is used."""
        if iteration not in self._when:
            return
        values = _numbers(state, program)
        away = values.double() - self._optimum.double()
        if not away.any():
            away = torch.ones_like(away)
        values += (away * (self._size / torch.linalg.vector_norm(away))).to(values.dtype)
        _mend_all(state, program)


class BitFlip:
    """A flip of one bit of a random parameter.

    Args:
        when: Perturbed iterations.
        seed: Seed of the random draws.
        bit: Bit to flip; 0 is the least significant bit of the fraction, and for 32-bit numbers 31 is the sign and 30
            the most significant bit of the exponent. None: a random bit.
    """

    def __init__(self, when: IterationChoice, seed: int, bit: int | None = None) -> None:
        self._when, self._seed, self._bit = when, seed, bit

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Flip the bit."""
        if iteration not in self._when:
            return
        values, rng = parameters(program, state), drawn(self._seed, iteration)
        bits = 8 * values.element_size()
        if self._bit is not None and not 0 <= self._bit < bits:
            raise ConfigError(f"bit must be from 0 to {bits - 1} in {values.dtype}, got {self._bit}")
        row, column = (int(rng.integers(length)) for length in values.shape)
        bit = int(rng.integers(bits)) if self._bit is None else self._bit
        alike = values[row].view(SAME_WIDTH[values.element_size()])
        alike[column] ^= torch.tensor(1, dtype=alike.dtype) << bit
        program.mend(state, torch.tensor([row]))


class Rounded:
    """Rounding of the parameters to a narrower type: to the nearest value, with larger numbers clamped to its maximum.

    Args:
        when: Perturbed iterations; at every step it is a run whose parameters are stored in that type.
        dtype: ``torch.bfloat16``, ``torch.float8_e4m3fn`` or any other floating-point type.
    """

    def __init__(self, when: IterationChoice, dtype: torch.dtype) -> None:
        self._when, self._dtype = when, dtype

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Round the parameters."""
        if iteration not in self._when:
            return
        values, largest = _numbers(state, program), torch.finfo(self._dtype).max
        values.copy_(values.clamp(-largest, largest).to(self._dtype).to(values.dtype))
        _mend_all(state, program)


# -- blocks restored to earlier values


class Reset:
    """A reset of random blocks to their values in x(0).

    Args:
        when: Perturbed iterations.
        share: Share of the blocks, from 0 to 1.
        seed: Seed of the random choice.
    """

    def __init__(self, when: IterationChoice, share: float, seed: int) -> None:
        self._when, self._share, self._seed = when, share, seed

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Reset the blocks."""
        if iteration in self._when:
            blocks = some_blocks(program, self._share, drawn(self._seed, iteration))
            _write(state, program, blocks, program.rows(program.start()))


class Stale:
    """A reset of random blocks to their values some steps ago, or in x(0) if there are not that many steps yet.

    The earlier values are the results of iterations, before they were perturbed.

    Args:
        when: Perturbed iterations.
        steps: Age of the values in steps, ``>= 1``.
        share: Share of the blocks, from 0 to 1.
        seed: Seed of the random choice.
    """

    def __init__(self, when: IterationChoice, steps: int, share: float, seed: int) -> None:
        if steps < 1:
            raise ConfigError(f"steps must be at least 1, got {steps}")
        self._when, self._share, self._seed = when, share, seed
        self._past: deque[Rows] = deque(maxlen=steps + 1)

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Record the current state, and reset the blocks if this iteration is perturbed."""
        self._past.append(_copied(program.rows(state)))
        if iteration in self._when:
            blocks = some_blocks(program, self._share, drawn(self._seed, iteration))
            _write(state, program, blocks, self._past[0])


class LostUpdate:
    """The loss of an iteration's update, or of a part of it: a lost gradient.

    If the update of iteration k is lost, the perturbation d(k + 1) undoes it.

    Args:
        when: Iterations whose update is lost.
        share: Share of the blocks, chosen at random, from 0 to 1.
        seed: Seed of the random choice.
        part: Lost part of the update, from 0 to 1. It models a mean over a mini-batch of which a failed worker had this
            part, while the sum is still divided by the whole mini-batch. Only the size of the loss is modelled; its
            direction is that of the whole mini-batch.
    """

    def __init__(self, when: IterationChoice, share: float, seed: int, part: float = 1.0) -> None:
        if not 0 <= part <= 1:
            raise ConfigError(f"part of the update must be from 0 to 1, got {part}")
        self._when, self._share, self._seed, self._part = when, share, seed, part
        self._before: Rows | None = None

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Undo the previous iteration if its update is lost, and record the current state."""
        if self._before is not None and iteration - 1 in self._when:
            blocks = some_blocks(program, self._share, drawn(self._seed, iteration - 1))
            _write(state, program, blocks, self._left(program.rows(state), self._before))
        self._before = _copied(program.rows(state)) if iteration in self._when else None

    def _left(self, after: Rows, before: Rows) -> Rows:
        """Return the state without a part of the update; integer rows lose the whole update."""
        if self._part == 1:
            return before
        return tuple(
            torch.lerp(new, old, self._part) if new.is_floating_point() else old
            for new, old in zip(after, before, strict=True)
        )


class Asynchronous:
    """Asynchronous updates: at every step only some random blocks are updated, with a bounded delay.

    Args:
        share: Share of the blocks that are updated, from 0 to 1.
        delay: Maximum number of steps that a block goes without an update, ``>= 1``.
        seed: Seed of the random choice.
    """

    def __init__(self, share: float, delay: int, seed: int) -> None:
        if delay < 1:
            raise ConfigError(f"delay must be at least 1, got {delay}")
        self._share, self._delay, self._seed = share, delay, seed
        self._before: Rows | None = None
        self._age: Tensor | None = None

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Undo the previous iteration for the blocks that were not to be updated."""
        if self._before is not None:
            _write(state, program, self._held(program, iteration - 1), self._before)
        self._before = _copied(program.rows(state))

    def _held(self, program: Program, iteration: int) -> Tensor:
        """Return the blocks that are not updated in ``iteration``."""
        age = torch.zeros(program.blocks, dtype=torch.int64) if self._age is None else self._age
        count = program.blocks - math.ceil(self._share * program.blocks)
        waits = torch.zeros(program.blocks, dtype=torch.bool)
        waits[torch.from_numpy(drawn(self._seed, iteration).permutation(program.blocks)[:count])] = True
        waits &= age < self._delay
        self._age = torch.where(waits, age + 1, 0)
        return waits.nonzero().flatten()
