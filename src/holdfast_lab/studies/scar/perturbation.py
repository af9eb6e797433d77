"""What a perturbation can cost at most, the rate that decides it, and the record of how far a run was pushed.

A perturbed run is y(k+1) = f(y(k) + d(k)), y(0) = x(0). Where ||f(x) - x*|| <= c ||x - x*|| with c < 1,

    ||y(k+1) - x*|| <= c (||y(k) - x*|| + ||d(k)||), and so
    ||y(k) - x*|| <= c^k (||x(0) - x*|| + D) with D = sum of c^-l ||d(l)|| over l < k.

The second line, solved for k, bounds the iterations to any eps: :func:`most_iterations`. Summed the other way, with a
perturbation at every step, it is the error that stays: :func:`irreducible_error`. The paper's bound is on a difference of
counts, :func:`paper_cost`; it takes the undisturbed run for one that needs log(||x(0) - x*|| / eps) / log(1/c) iterations,
and is exceeded where that run is faster than the worst case.

Source: Qiao, Aragam, Zhang, Xing, "Fault tolerance in iterative-convergent machine learning", ICML 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.workloads.iterative.base import Program, State, copy_of

Numbers = NDArray[np.float64]

KEPT_BYTES = 256 * 2**20
"""An undisturbed run that takes more memory than this is computed again beside each disturbed one."""
FLOOR_TIMES = 3.0
"""A rate is fitted as long as the distance is so many times the one that the run stays at."""
FLAT_TIMES = 1 / 4
"""A run stays where it is if, over its last quarter, it converges less than so many times as fast as on the average."""


# ---------------------------------------------------------------------------------------------
# Bounds


def log_delta(sizes: ArrayLike, c: float) -> Numbers:
    """Return the logarithm of D = sum of c^-l ||d(l)||; D itself is beyond any float after some thousand iterations.

    Args:
        sizes: ||d(l)||, that of the first iteration first; of shape (iterations, ...): of many runs at once.
        c: Rate, between 0 and 1.

    Returns:
        Of shape (...); ``-inf`` for a run that was not disturbed.
    """
    check_rate(c)
    values = np.asarray(sizes, dtype=np.float64)
    growth = math.log(1 / c) * np.arange(len(values)).reshape(-1, *(1 for _ in values.shape[1:]))
    with np.errstate(divide="ignore"):  # the logarithm of an iteration without a perturbation is -inf, and adds nothing
        return np.asarray(np.logaddexp.reduce(np.log(values) + growth, axis=0))


def most_iterations(c: float, start: float, log_delta: ArrayLike, eps: float) -> Numbers:
    """Return how many iterations a disturbed run needs at most to get within ``eps`` of the optimum.

    Args:
        c: Rate that no iteration falls short of, between 0 and 1.
        start: ||x(0) - x*||, ``> 0``.
        log_delta: As :func:`log_delta` returns it, of shape (...).
        eps: Distance, ``> 0``.

    Returns:
        Of shape (...), ``>= 0``; with ``-inf`` for ``log_delta``, that of the undisturbed run.
    """
    check_rate(c)
    reach = np.logaddexp(math.log(start), np.asarray(log_delta, dtype=np.float64))
    return np.maximum((reach - math.log(eps)) / math.log(1 / c), 0.0)


def paper_cost(c: float, start: float, log_delta: ArrayLike) -> Numbers:
    """Return the paper's bound on how many iterations more a disturbed run needs: log(1 + D / ||x(0) - x*||) / log(1/c).

    As a bound on the difference of two measured counts it does not always hold; see the head of this file.

    Args:
        c: Rate, between 0 and 1.
        start: ||x(0) - x*||, ``> 0``.
        log_delta: As :func:`log_delta` returns it, of shape (...).

    Returns:
        Of shape (...), ``>= 0``.
    """
    check_rate(c)
    return np.logaddexp(0.0, np.asarray(log_delta, dtype=np.float64) - math.log(start)) / math.log(1 / c)


def irreducible_error(c: float, size: float) -> float:
    """Return how far from the optimum a run can stay for ever that is perturbed at every step.

    From ||y(k+1) - x*|| <= c (||y(k) - x*|| + ||d(k)||): the limit e = c (e + size) is e = c / (1 - c) size. The constant is
    c / (1 - c), and not 1 / (1 - c), since y is measured after the iteration that follows a perturbation.

    Args:
        c: Rate, between 0 and 1.
        size: The largest ||d(k)||.
    """
    check_rate(c)
    return c / (1 - c) * size


def check_rate(c: float) -> None:
    """Refuse a rate that is not between 0 and 1: no bound follows from it.

    Raises:
        ConfigError: if it is not.
    """
    if not 0 < c < 1:
        raise ConfigError(f"the rate c must be between 0 and 1, got {c}; a program whose c is 1 or more has no bound")


# ---------------------------------------------------------------------------------------------
# The rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a run converges.

    Args:
        fitted: c of the line through the logarithms of the distances: what the run does on the average.
        interval: Its 95 % confidence interval.
        worst: The largest ratio of a distance to the one before: no iteration of this run fell short of it. A perturbed run
            goes elsewhere, so that even this is an estimate, unless c is known from f.
        iterations: How many the line was fitted to; what came later is at the floor of the run's noise, or of its end.
    """

    fitted: float
    interval: tuple[float, float]
    worst: float
    iterations: int


def fit_rate(distances: ArrayLike) -> Rate:
    """Return the rate of an undisturbed run.

    The interval takes it into account that neighbouring residuals are alike: of n of them, with a correlation rho from one
    to the next, only n (1 - rho) / (1 + rho) count.

    Args:
        distances: ||x(k) - x*||, that of x(0) first; if x* is the end of a long run, of its beginning.

    Raises:
        ConfigError: if fewer than four distances are above the floor.
    """
    values = np.asarray(distances, dtype=np.float64)
    used = values[: _above_floor(values)]
    if len(used) < 4:
        raise ConfigError(
            f"a rate needs at least 4 distances that fall, got {len(used)} of {len(values)}; measure a longer run"
        )
    logs, steps = np.log(used), np.arange(len(used), dtype=np.float64)
    slope, offset = np.polyfit(steps, logs, 1)
    residuals = logs - offset - slope * steps
    error = 1.96 * _slope_error(residuals, steps)
    return Rate(
        fitted=math.exp(slope),
        interval=(math.exp(slope - error), math.exp(slope + error)),
        worst=float((used[1:] / used[:-1]).max()),
        iterations=len(used) - 1,
    )


def _above_floor(distances: Numbers) -> int:
    """Return how many distances come before the run is where it stays; all of them if it still moves at the end."""
    logs, quarter = np.log(np.maximum(distances, np.finfo(np.float64).tiny)), max(2, len(distances) // 4)
    at_end = float(np.polyfit(np.arange(quarter), logs[-quarter:], 1)[0])
    if at_end < FLAT_TIMES * (logs[-1] - logs[0]) / len(logs):
        return len(distances)
    floor = float(np.median(distances[-max(1, len(distances) // 10) :]))
    low = np.flatnonzero(distances <= FLOOR_TIMES * floor)
    return int(low[0]) if len(low) else len(distances)


def _slope_error(residuals: Numbers, steps: Numbers) -> float:
    square = float((residuals**2).sum())
    if square < 1e-24 * len(residuals):
        return 0.0  # a line, but for rounding
    rho = float((residuals[1:] * residuals[:-1]).sum()) / square
    rho = min(max(rho, 0.0), 0.99)
    counting = max(3.0, len(residuals) * (1 - rho) / (1 + rho))
    variance = square / len(residuals) * counting / (counting - 2)
    spread = float(((steps - steps.mean()) ** 2).mean())
    return math.sqrt(variance / counting / spread)


# ---------------------------------------------------------------------------------------------
# The perturbed run, beside the undisturbed one


class Contraction(Program, Protocol):
    """A program whose optimum and rate are known."""

    optimum: Tensor
    """x*, of the shape of the parameters."""
    rate: float
    """c: ||f(x) - x*|| <= c ||x - x*|| for every x."""


class Perturbation(Protocol):
    """Something that befalls a run."""

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Add d(iteration) to y(iteration), in place.

        Called before every iteration of one run, in order, whether it is one to disturb or not: some need to have seen what
        came before. An object that has been through one run is not for another.

        Args:
            state: What the iteration is about to read.
            program: Whose state it is.
            iteration: That is about to be done.
        """
        ...


class Nothing:
    """The perturbation of the undisturbed run."""

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Do nothing."""


def parameters(program: Program, state: State) -> Tensor:
    """Return a view on the parameters, of shape (blocks, any width)."""
    return program.rows(state)[0]


def apart(program: Program, a: Tensor, b: Tensor) -> float:
    """Return the distance of two sets of parameters: the root of the sum of the squares of the distances of their blocks.

    With the Euclidean distance of blocks it is the Euclidean distance. In 64 bits, since the square of a 32-bit number whose
    exponent was hit does not fit into 32.
    """
    wide = [values.double() if values.is_floating_point() else values for values in (a, b)]
    return float(torch.linalg.vector_norm(program.distance(*wide).double()))


class Undisturbed(Protocol):
    """The run that nothing befalls."""

    def at(self, iteration: int) -> State:
        """Return x(iteration); to be read only, until the next call; iterations are asked for in order."""
        ...


class Kept:
    """An undisturbed run in memory, computed as far as it was asked for.

    Args:
        program: Whose.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._states = [program.start()]

    def at(self, iteration: int) -> State:
        """Return x(iteration), in any order."""
        for passed in range(len(self._states) - 1, iteration):
            following = copy_of(self._states[-1])
            self._program.iterate(following, passed)
            self._states.append(following)
        return self._states[iteration]


class Beside:
    """An undisturbed run that is computed as it is asked for.

    Args:
        program: Whose.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._state, self._iteration = program.start(), 0

    def at(self, iteration: int) -> State:
        """Return x(iteration)."""
        if iteration < self._iteration:
            raise ConfigError(
                f"iteration {iteration} was asked for after {self._iteration}; keep the run to go back in it"
            )
        for passed in range(self._iteration, iteration):
            self._program.iterate(self._state, passed)
        self._iteration = iteration
        return self._state


def undisturbed(program: Program, iterations: int, most_bytes: int = KEPT_BYTES) -> Callable[[], Undisturbed]:
    """Return what gives the undisturbed run to each disturbed one: always the same where it fits into memory.

    Args:
        program: Whose.
        iterations: How many.
        most_bytes: What may be kept.
    """
    state_bytes = sum(tensor.nbytes for tensor in program.start().values())
    if state_bytes * (iterations + 1) > most_bytes:
        return lambda: Beside(program)
    kept = Kept(program)
    return lambda: kept


class Recorder:
    """Lets a perturbation happen, and writes down its size and how far the run is from the undisturbed one.

    Args:
        perturbation: What befalls the run.
        beside: The undisturbed run. A run that begins at x(T), with T > 0, has been at no distance from it before.
    """

    def __init__(self, perturbation: Perturbation, beside: Undisturbed) -> None:
        self._perturbation, self._beside = perturbation, beside
        self.distances: list[float] = []
        """||y(k) - x(k)||, before d(k) is added; that of x(0) first."""
        self.sizes: list[float] = []
        """||d(k)||; ``inf`` if what it left, or what it found, is no number."""

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Do what the perturbation does, and record it."""
        missed = [0.0] * (iteration - len(self.sizes))
        self.sizes += missed
        self.distances += missed
        self.close(state, program, iteration)
        before = parameters(program, state).clone()
        self._perturbation.disturb(state, program, iteration)
        self.sizes.append(_finite(apart(program, parameters(program, state), before)))

    def close(self, state: State, program: Program, iteration: int) -> None:
        """Record how far apart the runs are after the last iteration, ``iteration`` in all."""
        theirs = parameters(program, self._beside.at(iteration))
        self.distances.append(_finite(apart(program, parameters(program, state), theirs)))


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value
