"""Upper bounds on the cost of a perturbation, the rate of convergence they depend on, and a recorder of perturbed runs.

A perturbed run is y(k+1) = f(y(k) + d(k)), y(0) = x(0). If ||f(x) - x*|| <= c ||x - x*|| with c < 1,

    ||y(k+1) - x*|| <= c (||y(k) - x*|| + ||d(k)||), and so
    ||y(k) - x*|| <= c^k (||x(0) - x*|| + D) with D = sum of c^-l ||d(l)|| over l < k.

The second line, solved for k, bounds the iterations to any eps: :func:`most_iterations`. With a perturbation at every
step, the first line gives the irreducible error: :func:`irreducible_error`. The paper bounds the difference of two
iteration counts, :func:`paper_cost`. It assumes that the unperturbed run needs log(||x(0) - x*|| / eps) / log(1/c)
iterations, and is exceeded if that run is faster than the worst case.

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
"""An unperturbed run that takes more memory than this is recomputed along with each perturbed one."""
FLOOR_TIMES = 3.0
"""A rate is fitted to distances above this multiple of the run's noise floor."""
FLAT_TIMES = 1 / 4
"""A run has reached its floor if its rate over the last quarter is below this multiple of its average rate."""


# -- bounds


def log_delta(sizes: ArrayLike, c: float) -> Numbers:
    """Return the logarithm of D = sum of c^-l ||d(l)||; D itself overflows after some thousand iterations.

    Args:
        sizes: ||d(l)||, that of the first iteration first; of shape (iterations, ...), for many runs at once.
        c: Rate, between 0 and 1.

    Returns:
        log D, of shape (...); ``-inf`` for a run without perturbation.
    """
    check_rate(c)
    values = np.asarray(sizes, dtype=np.float64)
    growth = math.log(1 / c) * np.arange(len(values)).reshape(-1, *(1 for _ in values.shape[1:]))
    with np.errstate(divide="ignore"):  # log 0 of an unperturbed iteration is -inf, and adds nothing
        return np.asarray(np.logaddexp.reduce(np.log(values) + growth, axis=0))


def most_iterations(c: float, start: float, log_delta: ArrayLike, eps: float) -> Numbers:
    """Return an upper bound on the iterations that a perturbed run needs to get within ``eps`` of the optimum.

    Args:
        c: Rate that every iteration achieves, between 0 and 1.
        start: ||x(0) - x*||, ``> 0``.
        log_delta: As :func:`log_delta` returns it, of shape (...).
        eps: Distance, ``> 0``.

    Returns:
        Iterations, of shape (...), ``>= 0``; with ``-inf`` for ``log_delta``, the bound of the unperturbed run.
    """
    check_rate(c)
    reach = np.logaddexp(math.log(start), np.asarray(log_delta, dtype=np.float64))
    return np.maximum((reach - math.log(eps)) / math.log(1 / c), 0.0)


def paper_cost(c: float, start: float, log_delta: ArrayLike) -> Numbers:
    """Return the paper's bound on the extra iterations of a perturbed run: log(1 + D / ||x(0) - x*||) / log(1/c).

    As a bound on the difference of two measured counts it does not always hold; see the module's docstring.

    Args:
        c: Rate, between 0 and 1.
        start: ||x(0) - x*||, ``> 0``.
        log_delta: As :func:`log_delta` returns it, of shape (...).

    Returns:
        Iterations, of shape (...), ``>= 0``.
    """
    check_rate(c)
    return np.logaddexp(0.0, np.asarray(log_delta, dtype=np.float64) - math.log(start)) / math.log(1 / c)


def irreducible_error(c: float, size: float) -> float:
    """Return the irreducible error.

    It is the largest distance from the optimum at which a run can stay if it is perturbed at every step.
    From ||y(k+1) - x*|| <= c (||y(k) - x*|| + ||d(k)||), the limit e = c (e + size) gives e = c / (1 - c) size. The
    constant is c / (1 - c), not 1 / (1 - c), because y is measured after the iteration that follows a perturbation.

    Args:
        c: Rate, between 0 and 1.
        size: The largest ||d(k)||.
    """
    check_rate(c)
    return c / (1 - c) * size


def check_rate(c: float) -> None:
    """Check that a rate is between 0 and 1; otherwise no bound follows from it.

    Raises:
        ConfigError: if it is not between 0 and 1.
    """
    if not 0 < c < 1:
        raise ConfigError(f"the rate c must be between 0 and 1, got {c}; a program whose c is 1 or more has no bound")


# -- the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceRate:
    """The rate of convergence of a run.

    Args:
        fitted: c from a line fitted to the logarithms of the distances: the average rate of the run.
        interval: Its 95 % confidence interval.
        worst: The largest ratio of a distance to the previous one: every iteration of this run achieved it. A perturbed
            run takes another path, so even this is an estimate unless c is known from f.
        iterations: Number of iterations that the line was fitted to; later ones are at the noise floor.
    """

    fitted: float
    interval: tuple[float, float]
    worst: float
    iterations: int


def fit_rate(distances: ArrayLike) -> ConvergenceRate:
    """Return the rate of convergence of an unperturbed run.

    The interval accounts for the autocorrelation of residuals: n residuals with lag-1 correlation rho count as
    n (1 - rho) / (1 + rho).

    Args:
        distances: ||x(k) - x*||, that of x(0) first; if x* is the end of a long run, only the first part of that run.

    Raises:
        ConfigError: if fewer than four distances are above the floor.
    """
    values = np.asarray(distances, dtype=np.float64)
    used = values[: _above_floor(values)]
    if len(used) < 4:
        raise ConfigError(
            f"fitting a rate needs at least 4 distances above the noise floor, got {len(used)} of {len(values)}; "
            "measure a longer run"
        )
    logs, steps = np.log(used), np.arange(len(used), dtype=np.float64)
    slope, offset = np.polyfit(steps, logs, 1)
    residuals = logs - offset - slope * steps
    error = 1.96 * _slope_error(residuals, steps)
    return ConvergenceRate(
        fitted=math.exp(slope),
        interval=(math.exp(slope - error), math.exp(slope + error)),
        worst=float((used[1:] / used[:-1]).max()),
        iterations=len(used) - 1,
    )


def _above_floor(distances: Numbers) -> int:
    """Return the number of distances before the run reaches its floor; all of them if it still converges at the end."""
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
        return 0.0  # an exact line, up to rounding
    rho = float((residuals[1:] * residuals[:-1]).sum()) / square
    rho = min(max(rho, 0.0), 0.99)
    counting = max(3.0, len(residuals) * (1 - rho) / (1 + rho))
    variance = square / len(residuals) * counting / (counting - 2)
    spread = float(((steps - steps.mean()) ** 2).mean())
    return math.sqrt(variance / counting / spread)


# -- the perturbed run, and the unperturbed one that it is compared with


class Contraction(Program, Protocol):
    """A program with known optimum and rate."""

    optimum: Tensor
    """x*, of the shape of the parameters."""
    rate: float
    """c: ||f(x) - x*|| <= c ||x - x*|| for every x."""


class Perturbation(Protocol):
    """A perturbation of a run."""

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Add d(iteration) to y(iteration), in place.

        Called before every iteration of a run, in order, also before iterations that are not perturbed, because some
        perturbations depend on earlier states. Use a new object for each run.

        Args:
            state: The state that the iteration is about to read.
            program: The program of the state.
            iteration: The number of the next iteration.
        """
        ...


class NoPerturbation:
    """The absence of a perturbation."""

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Do nothing."""


def parameters(program: Program, state: State) -> Tensor:
    """Return a view of the parameters, of shape (blocks, width)."""
    return program.rows(state)[0]


def apart(program: Program, a: Tensor, b: Tensor) -> float:
    """Return the distance between two sets of parameters: the root of the sum of squared distances of their blocks.

    If blocks use the Euclidean distance, the result is the Euclidean distance. Computed in 64 bits, because the square
    of a 32-bit number with a flipped exponent bit overflows 32 bits.
    """
    wide = [values.double() if values.is_floating_point() else values for values in (a, b)]
    return float(torch.linalg.vector_norm(program.distance(*wide).double()))


class Undisturbed(Protocol):
    """The unperturbed run."""

    def at(self, iteration: int) -> State:
        """Return x(iteration), read-only and valid until the next call; iterations must be requested in order."""
        ...


class CachedUndisturbed:
    """An unperturbed run whose states are kept in memory and computed on demand.

    Args:
        program: The program to run.
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


class LazyUndisturbed:
    """An unperturbed run that keeps only its current state.

    Args:
        program: The program to run.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._state, self._iteration = program.start(), 0

    def at(self, iteration: int) -> State:
        """Return x(iteration)."""
        if iteration < self._iteration:
            raise ConfigError(
                f"iteration {iteration} was requested after {self._iteration}, but only later ones are available; "
                "use Kept for random access"
            )
        for passed in range(self._iteration, iteration):
            self._program.iterate(self._state, passed)
        self._iteration = iteration
        return self._state


def undisturbed(program: Program, iterations: int, most_bytes: int = KEPT_BYTES) -> Callable[[], Undisturbed]:
    """Return a function that returns an unperturbed run: always the same one if it fits into memory.

    Args:
        program: The program to run.
        iterations: Number of iterations.
        most_bytes: Memory limit in bytes.
    """
    state_bytes = sum(tensor.nbytes for tensor in program.start().values())
    if state_bytes * (iterations + 1) > most_bytes:
        return lambda: LazyUndisturbed(program)
    kept = CachedUndisturbed(program)
    return lambda: kept


class PerturbationRecorder:
    """Applies a perturbation, and records its size and the distance of the run from the unperturbed one.

    Args:
        perturbation: The perturbation.
        beside: The unperturbed run. For a run that starts at x(T), T > 0, all earlier distances are 0.
    """

    def __init__(self, perturbation: Perturbation, beside: Undisturbed) -> None:
        self._perturbation, self._beside = perturbation, beside
        self.distances: list[float] = []
        """||y(k) - x(k)||, before d(k) is added; that of x(0) first."""
        self.sizes: list[float] = []
        """||d(k)||; ``inf`` if the state before or after is NaN."""

    def disturb(self, state: State, program: Program, iteration: int) -> None:
        """Apply the perturbation and record it."""
        missed = [0.0] * (iteration - len(self.sizes))
        self.sizes += missed
        self.distances += missed
        self.close(state, program, iteration)
        before = parameters(program, state).clone()
        self._perturbation.disturb(state, program, iteration)
        self.sizes.append(_finite(apart(program, parameters(program, state), before)))

    def close(self, state: State, program: Program, iteration: int) -> None:
        """Record the distance between the runs after the last iteration; ``iteration`` is the number of iterations."""
        theirs = parameters(program, self._beside.at(iteration))
        self.distances.append(_finite(apart(program, parameters(program, state), theirs)))


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value
