"""Computes thousands of perturbed runs of a linear contraction as rows of a matrix, and compares costs with bounds.

All states are e = y - x*, in float64: an iteration is a matrix product, and the optimum is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.tools.iteration_cost import levels
from holdfast_lab.studies.scar.kappa import kappa_within
from holdfast_lab.studies.scar.perturbation import Contraction, log_delta, most_iterations, paper_cost, parameters
from holdfast_lab.workloads.iterative.base import Program

Numbers = NDArray[np.float64]

RANDOM, ADVERSARIAL, RESET = KINDS = ("random", "adversarial", "reset")
SLOWEST = "slowest"
"""Perturbation along the direction of slowest convergence, which comes nearest to the absolute bound."""
ALL_KINDS = (*KINDS, SLOWEST)
LEVELS = 7
AT_ONCE = 1000
"""Number of runs whose data fit into the CPU cache."""
_CLOSE = 1e-4
"""The unperturbed run ends at this distance, as a multiple of its initial distance."""
_MOST_TIMES = 4
_SIZES = (-2.0, 1.0)
"""Range of perturbation sizes, as powers of ten relative to the current distance of the unperturbed run."""


@dataclass(frozen=True, slots=True)
class PerturbationCosts:
    """Costs of perturbations of a kind, each of shape (runs,); distances in units of ||x(0) - x*||.

    Args:
        size: Sum of ||d(l)||.
        log_delta: Logarithm of D = sum of c^-l ||d(l)||.
        cost: Extra iterations compared with the unperturbed run, mean over the levels of eps.
        room: Absolute bound minus iteration count, the smallest over the levels; below 0 the bound is exceeded.
        paper: The paper's bound on the cost.
        most: The largest cost that the absolute bound allows, mean over the levels.
        censored: Number of levels that were never reached.
        loss_cost: Like ``cost``, over levels of the loss; nan if not measured.
    """

    size: Numbers
    log_delta: Numbers
    cost: Numbers
    room: Numbers
    paper: Numbers
    most: Numbers
    censored: Numbers
    loss_cost: Numbers


def joined(parts: list[PerturbationCosts]) -> PerturbationCosts:
    """Concatenate the runs of all parts."""
    return PerturbationCosts(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in PerturbationCosts.__slots__)
    )


def matrix_of(program: Program) -> Numbers | None:
    """Return the matrix A of a program whose iteration is y -> x* + A (y - x*); None for other programs.

    Computed from one iteration at x* and one at each point at distance 1 from it along an axis.
    """
    if not hasattr(program, "optimum") or not hasattr(program, "rate"):
        return None
    optimum = cast("Contraction", program).optimum
    axes = torch.eye(optimum.numel(), dtype=optimum.dtype).view(-1, *optimum.shape)
    origin = _image(program, optimum, 0)
    columns = torch.stack([_image(program, optimum + axis, 0) - optimum for axis in axes]).flatten(1).double()
    trial = (_image(program, optimum + axes.sum(0), 1) - optimum).flatten().double()
    scale = 1e-10 * float(optimum.abs().max() + 1)
    is_linear = torch.allclose(trial, columns.sum(0), atol=scale) and torch.allclose(origin, optimum, atol=scale)
    return columns.T.numpy() if is_linear else None


def _image(program: Program, point: torch.Tensor, iteration: int) -> torch.Tensor:
    state = program.start()
    parameters(program, state).copy_(point)
    program.iterate(state, iteration)
    return parameters(program, state).clone()


class ContractionBatch:
    """Batched perturbed runs of a linear contraction.

    Args:
        program: The program.
        matrix: Its matrix, from :func:`matrix_of`.
    """

    def __init__(self, program: Contraction, matrix: Numbers) -> None:
        self.c = program.rate
        self._matrix = matrix
        error = (parameters(program, program.start()) - program.optimum).double()
        self._slowest = np.linalg.svd(matrix)[2][0]
        self._width = error.shape[1]
        self._begin = error.flatten().numpy() / float(error.norm())
        self.distances = np.array(list(self._undisturbed()))
        """||x(k) - x*|| of the unperturbed run, 1 at x(0)."""
        self._struck = len(self.distances) // 2
        """All perturbations are before this iteration, and all levels are reached after it."""
        self.eps = levels(self.distances, count=LEVELS, begin=self._struck)

    def _undisturbed(self) -> Iterator[float]:
        error = self._begin
        while (distance := float(np.linalg.norm(error))) > _CLOSE:
            yield distance
            error = self._matrix @ error

    def costs(self, kind: str, runs: int, seed: int) -> PerturbationCosts:
        """Return the costs of perturbations: half of the runs are perturbed once, the others two to four times.

        Args:
            kind: One of :data:`ALL_KINDS`. Sizes are log-uniform, from a hundredth to ten times the current distance of
                the unperturbed run; for resets, the share of blocks is uniform instead.
            runs: Number of runs, ``>= 1``.
            seed: Seed of all random draws.
        """
        parts = []
        for first in range(0, runs, AT_ONCE):
            rng = np.random.default_rng([seed, ALL_KINDS.index(kind), first])
            parts.append(self._part(kind, min(AT_ONCE, runs - first), rng))
        return joined(parts)

    def _part(self, kind: str, runs: int, rng: np.random.Generator) -> PerturbationCosts:
        strikes = self._strikes(runs, rng)
        strength = rng.random(runs) if kind == RESET else 10 ** rng.uniform(*_SIZES, runs)
        error, sizes = np.tile(self._begin, (runs, 1)), np.zeros((self._struck, runs))
        distances = []
        for iteration in range(self._struck):
            distances.append(np.linalg.norm(error, axis=1))
            if (hit := np.flatnonzero(strikes[iteration])).size:
                change = self._change(kind, error[hit], strength[hit], iteration, rng)
                error[hit] += change
                sizes[iteration, hit] = np.linalg.norm(change, axis=1)
            error = error @ self._matrix.T
        delta = log_delta(sizes, self.c)
        # A run that has not reached a level by then has exceeded the bound, and is counted so.
        for _ in range(self._struck, math.ceil(most_iterations(self.c, 1.0, delta.max(), self.eps[-1])) + 2):
            distances.append(np.linalg.norm(error, axis=1))
            error = error @ self._matrix.T
        return measured(np.array(distances), self.distances, sizes, self.c, self.eps)

    def _strikes(self, runs: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Return a mask of perturbed iterations, of shape (iterations, runs); never x(0), where a reset has no effect."""
        count = np.where(rng.random(runs) < 0.5, 1, rng.integers(2, _MOST_TIMES + 1, runs))
        order = rng.random((self._struck - 1, runs)).argsort(axis=0).argsort(axis=0)
        return np.concatenate([np.zeros((1, runs), dtype=np.bool_), order < count])

    def _change(
        self, kind: str, error: Numbers, strength: Numbers, iteration: int, rng: np.random.Generator
    ) -> Numbers:
        """Return d, of the shape of ``error``."""
        if kind == RESET:
            drawn = rng.random((len(error), error.shape[1] // self._width))
            blocks = drawn <= np.maximum(strength[:, None], drawn.min(axis=1, keepdims=True))  # at least one
            return np.where(blocks.repeat(self._width, axis=1), self._begin - error, 0.0)
        if kind == RANDOM:
            direction = rng.standard_normal(error.shape)
        elif kind == ADVERSARIAL:
            direction = error
        else:
            direction = np.where(error @ self._slowest < 0, -1.0, 1.0)[:, None] * self._slowest
        size = strength * self.distances[iteration]
        return np.asarray(direction * (size / np.linalg.norm(direction, axis=1))[:, None])


def measured(distances: Numbers, plain: Numbers, sizes: Numbers, c: float, eps: list[float]) -> PerturbationCosts:
    """Return the costs of perturbations and their bounds.

    Args:
        distances: ||y(k) - x*|| of the perturbed runs, of shape (iterations + 1, runs).
        plain: ||x(k) - x*|| of the unperturbed run, which reaches every level; of shape (iterations + 1,).
        sizes: ||d(l)||, of shape (iterations, runs).
        c: Rate, between 0 and 1.
        eps: Levels of the distance.
    """
    start = float(plain[0])
    delta = log_delta(sizes, c)
    counts = np.array([kappa_within(distances, level) for level in eps])
    base = np.array([float(kappa_within(plain, level)) for level in eps])[:, None]
    most = np.array([most_iterations(c, start, delta, level) for level in eps])
    censored = np.isinf(counts)
    # A run that was stopped before its bound has neither met nor exceeded it.
    end = len(distances) - 1.0
    counted = np.minimum(counts, end)
    with np.errstate(invalid="ignore"):  # a NaN state has no bound, and exceeds none
        room = np.where(censored & (most > end), np.inf, most - counts)
    return PerturbationCosts(
        size=sizes.sum(axis=0) / start,
        log_delta=delta - math.log(start),
        cost=(counted - base).mean(axis=0),
        room=room.min(axis=0),
        paper=paper_cost(c, start, delta),
        most=(most - base).mean(axis=0),
        censored=censored.sum(axis=0).astype(np.float64),
        loss_cost=np.full(delta.shape, np.nan),
    )
