"""What can befall a run: each kind of perturbation, once, several times or at every step.

Whatever is drawn is a function of (seed, iteration). Blocks are written as a whole, with all that goes with their
parameters; a kind that adds to the parameters, or rounds them, leaves an optimizer's state alone.
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
"""Bytes of a number, and the integer that has as many."""


@dataclass(frozen=True, slots=True)
class When:
    """The iterations that something befalls.

    Args:
        iterations: Which; None: all of them.
    """

    iterations: frozenset[int] | None = None

    def __contains__(self, iteration: int) -> bool:
        """Return whether it is one of them."""
        return self.iterations is None or iteration in self.iterations


EVERY_STEP = When()


def at(*iterations: int) -> When:
    """Return the given iterations, one or several; they count from 0."""
    return When(frozenset(iterations))


def drawn(seed: int, iteration: int) -> np.random.Generator:
    """Return the generator of what is drawn for one iteration: the same whenever it is asked for."""
    return np.random.default_rng((seed, iteration))


def some_blocks(program: Program, share: float, rng: np.random.Generator) -> Tensor:
    """Return the numbers of a random share of the blocks, rounded to whole blocks; int64, rising.

    Args:
        program: Whose blocks.
        share: From 0 to 1.
        rng: Draws them.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of the blocks must be from 0 to 1, got {share}")
    return torch.from_numpy(np.sort(rng.permutation(program.blocks)[: round(share * program.blocks)]))


def _copied(rows: Rows) -> Rows:
    return tuple(view.clone() for view in rows)


def _write(state: State, program: Program, blocks: Tensor, source: Rows) -> None:
    """Give ``blocks`` the rows that they have in ``source``."""
    for view, values in zip(program.rows(state), source, strict=True):
        view[blocks] = values[blocks]
    program.mend(state, blocks)


def _numbers(state: State, program: Program) -> Tensor:
    """Return the parameters if they are numbers to add to."""
    values = parameters(program, state)
    if not values.is_floating_point():
        raise ConfigError(
            f"{program.name} counts in {values.dtype}: nothing can be added to it or rounded; reset blocks instead"
        )
    return values


def _mend_all(state: State, program: Program) -> None:
    program.mend(state, torch.arange(program.blocks))


# ---------------------------------------------------------------------------------------------
# Added to the parameters


class RandomDirection:
    """A step of a given length in a direction that is drawn, each as likely as any other.

    Args:
        when: At which iterations.
        size: Euclidean length, ``>= 0``.
        seed: Of the direction.
    """

    def __init__(self, when: When, size: float, seed: int) -> None:
        self._when, self._size, self._seed = when, size, seed

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Take it."""
        if iteration not in self._when:
            return
        values = _numbers(state, program)
        direction = torch.from_numpy(drawn(self._seed, iteration).standard_normal(tuple(values.shape)))
        values += (direction * (self._size / torch.linalg.vector_norm(direction))).to(values.dtype)
        _mend_all(state, program)


class Adversarial:
    """A step of a given length straight away from the optimum.

    Args:
        when: At which iterations.
        size: Euclidean length, ``>= 0``.
        optimum: x*, of the parameters' shape.
    """

    def __init__(self, when: When, size: float, optimum: Tensor) -> None:
        self._when, self._size, self._optimum = when, size, optimum

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Take it; from the optimum itself every direction leads away, and the one of equal numbers is taken."""
        if iteration not in self._when:
            return
        values = _numbers(state, program)
        away = values.double() - self._optimum.double()
        if not away.any():
            away = torch.ones_like(away)
        values += (away * (self._size / torch.linalg.vector_norm(away))).to(values.dtype)
        _mend_all(state, program)


class BitFlip:
    """One bit of one parameter, which is drawn.

    Args:
        when: At which iterations.
        seed: Of the place.
        bit: Which; 0 is the last of the fraction, of 32-bit numbers 31 the sign and 30 the first of the exponent. None: drawn.
    """

    def __init__(self, when: When, seed: int, bit: int | None = None) -> None:
        self._when, self._seed, self._bit = when, seed, bit

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Flip it."""
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
    """The parameters, rounded to a narrower type and back; to the nearest, and to its largest number if they are beyond it.

    Args:
        when: At which iterations; at every step it is a run whose parameters are held in that type.
        dtype: ``torch.bfloat16``, ``torch.float8_e4m3fn`` or any other floating-point type.
    """

    def __init__(self, when: When, dtype: torch.dtype) -> None:
        self._when, self._dtype = when, dtype

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Round them."""
        if iteration not in self._when:
            return
        values, largest = _numbers(state, program), torch.finfo(self._dtype).max
        values.copy_(values.clamp(-largest, largest).to(self._dtype).to(values.dtype))
        _mend_all(state, program)


# ---------------------------------------------------------------------------------------------
# Blocks that become what they were


class Reset:
    """Some blocks, which are drawn, become what they were in x(0).

    Args:
        when: At which iterations.
        share: Of the blocks, from 0 to 1.
        seed: Of which.
    """

    def __init__(self, when: When, share: float, seed: int) -> None:
        self._when, self._share, self._seed = when, share, seed

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Reset them."""
        if iteration in self._when:
            blocks = some_blocks(program, self._share, drawn(self._seed, iteration))
            _write(state, program, blocks, program.rows(program.start()))


class Stale:
    """Some blocks, which are drawn, become what they were some steps ago; before that many steps, what they were in x(0).

    What they were is what the iterations had made of them, before anything befell them.

    Args:
        when: At which iterations.
        steps: How long ago, ``>= 1``.
        share: Of the blocks, from 0 to 1.
        seed: Of which.
    """

    def __init__(self, when: When, steps: int, share: float, seed: int) -> None:
        if steps < 1:
            raise ConfigError(f"steps must be at least 1, got {steps}")
        self._when, self._share, self._seed = when, share, seed
        self._past: deque[Rows] = deque(maxlen=steps + 1)

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Put them back, if it is time, and remember what there is now."""
        self._past.append(_copied(program.rows(state)))
        if iteration in self._when:
            blocks = some_blocks(program, self._share, drawn(self._seed, iteration))
            _write(state, program, blocks, self._past[0])


class LostUpdate:
    """The update of an iteration does not arrive, or not all of it: a lost gradient.

    What befalls the iteration k is d(k + 1), the update taken back.

    Args:
        when: At which iterations the update is lost.
        share: Of the blocks, which are drawn, from 0 to 1.
        seed: Of which.
        part: Of the update, from 0 to 1. Where it is a mean over a batch, of which a worker had this part, and the sum is
            still divided by the whole batch, this is what is lost in size; its direction is that of the whole batch.
    """

    def __init__(self, when: When, share: float, seed: int, part: float = 1.0) -> None:
        if not 0 <= part <= 1:
            raise ConfigError(f"part of the update must be from 0 to 1, got {part}")
        self._when, self._share, self._seed, self._part = when, share, seed, part
        self._before: Rows | None = None

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Take back what the iteration before has done, if it is to be lost, and remember what there is now."""
        if self._before is not None and iteration - 1 in self._when:
            blocks = some_blocks(program, self._share, drawn(self._seed, iteration - 1))
            _write(state, program, blocks, self._left(program.rows(state), self._before))
        self._before = _copied(program.rows(state)) if iteration in self._when else None

    def _left(self, after: Rows, before: Rows) -> Rows:
        """Return what is there if a part of the update is lost; where nothing is between two values, all of it is."""
        if self._part == 1:
            return before
        return tuple(
            torch.lerp(new, old, self._part) if new.is_floating_point() else old
            for new, old in zip(after, before, strict=True)
        )


class Asynchronous:
    """At every step only some blocks, which are drawn, take their update; each at least once in so many steps.

    Args:
        share: Of the blocks that take their update, from 0 to 1.
        delay: After so many steps without an update a block takes the next, ``>= 1``: the bound on the delay.
        seed: Of which.
    """

    def __init__(self, share: float, delay: int, seed: int) -> None:
        if delay < 1:
            raise ConfigError(f"delay must be at least 1, got {delay}")
        self._share, self._delay, self._seed = share, delay, seed
        self._before: Rows | None = None
        self._age: Tensor | None = None

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Take back what the iteration before has done to the blocks that do not take part."""
        if self._before is not None:
            _write(state, program, self._held(program, iteration - 1), self._before)
        self._before = _copied(program.rows(state))

    def _held(self, program: Program, iteration: int) -> Tensor:
        """Return the blocks that do not take the update of ``iteration``."""
        age = torch.zeros(program.blocks, dtype=torch.int64) if self._age is None else self._age
        count = program.blocks - math.ceil(self._share * program.blocks)
        waits = torch.zeros(program.blocks, dtype=torch.bool)
        waits[torch.from_numpy(drawn(self._seed, iteration).permutation(program.blocks)[:count])] = True
        waits &= age < self._delay
        self._age = torch.where(waits, age + 1, 0)
        return waits.nonzero().flatten()
