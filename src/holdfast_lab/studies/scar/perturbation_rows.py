"""The cost of perturbations by size, compared with its bounds.

A linear contraction with known optimum and rate runs thousands of trials at once, and a count above the absolute bound
would be an error in the theory or in this code. Any other program runs one trial at a time; x* is the end of a long
run, and c is fitted. There a count above the bound means that the program did not contract at that c everywhere on the
perturbed run's path, and a count below it proves nothing. Rows say which case applies (``means``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.tools.iteration_cost import iteration_cost, levels
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.scar.perturbation import (
    Contraction,
    ConvergenceRate,
    LazyUndisturbed,
    Perturbation,
    PerturbationRecorder,
    Undisturbed,
    apart,
    fit_rate,
    parameters,
    undisturbed,
)
from holdfast_lab.studies.scar.perturbation_batch import (
    ADVERSARIAL,
    ALL_KINDS,
    KINDS,
    LEVELS,
    RANDOM,
    RESET,
    ContractionBatch,
    PerturbationCosts,
    joined,
    matrix_of,
    measured,
)
from holdfast_lab.studies.scar.perturbation_kinds import Adversarial, RandomDirection, Reset, at
from holdfast_lab.workloads.iterative.base import Program, copy_of

Numbers = NDArray[np.float64]

KNOWN, FITTED, WORST = "known", "fitted", "worst ratio"
MEANS = {
    KNOWN: "a count above the absolute bound is an error in the theory or in this code",
    FITTED: "a count above the absolute bound means that the program did not contract at the fitted c everywhere",
    WORST: "a count above the absolute bound means an iteration with a worse ratio than any of the unperturbed run",
}
"""For each source of c, the meaning of a count above the absolute bound."""

LONG = 10
"""An unknown x* is the end of a run with so many times the iterations."""
BINS = 4
"""Number of size bins per power of ten."""
CAP = 3
"""A run is stopped, and counted as censored, after so many times the iterations of the unperturbed one."""
_SIZES = (-2.0, 0.25)
"""Range of perturbation sizes, as powers of ten relative to the current distance from x(0)."""
ROUNDING = 1e-6
"""Tolerance for rounding errors when iterations are compared with a bound."""


def cost_rows(program: Program, trials: int, seed: int, iterations: int = 300, window: int = 8) -> list[Row]:
    """Return the cost of perturbations by kind and size, and how often it was above each bound.

    Args:
        program: The program.
        trials: Total number of trials, divided equally among the kinds; for a linear contraction 20,000 take seconds,
            for other programs each trial is a separate run.
        seed: Seed of the perturbations.
        iterations: Iterations of the unperturbed run that defines the levels; ignored for a linear contraction.
        window: Window of the trailing mean of its loss in iterations; ignored for a linear contraction.

    Returns:
        Rows with ``part`` "perturbation" for each kind and size bin, and with ``part`` "bound" for each kind and source
        of c. All distances are in units of ||x(0) - x*||. ``least_room`` and ``undisturbed_room`` are the smallest
        difference between absolute bound and iteration count, of perturbed runs and of the unperturbed run. If the
        latter is below 0, the unperturbed run itself does not converge at that c.
    """
    matrix = matrix_of(program)
    if matrix is not None:
        batch = ContractionBatch(cast("Contraction", program), matrix)
        each = math.ceil(trials / len(ALL_KINDS))
        costs = {kind: batch.costs(kind, each, seed) for kind in ALL_KINDS}
        return [*_binned(program, costs), *(_bound_row(program, kind, costs[kind], KNOWN, batch.c) for kind in costs)]
    try:
        scene = PerturbationScene.of(program, iterations, window)
    except ConfigError as error:
        return [{"part": "bound", "status": NOT_RUN, "program": program.name, "why": str(error)}]
    return _one_by_one(scene, trials, seed)


# -- one run at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbationScene:
    """A program and its unperturbed run.

    Args:
        program: The program.
        beside: Returns the unperturbed run.
        optimum: x*, known, or the end of a run with :data:`LONG` times the iterations.
        distances: ||x(k) - x*||, of shape (iterations + 1,).
        losses: Losses of the same states.
        window: Window of their trailing mean in iterations.
        rate: The fitted rate.
        begin: Perturbations are before this iteration, and after the first one, where a reset has no effect; levels are
            reached after it.
        eps: Levels of the distance, descending, within the range that the rate was fitted to.
        loss_levels: Levels of the loss, descending.
    """

    program: Program
    beside: Callable[[], Undisturbed]
    optimum: Tensor
    distances: Numbers
    losses: Numbers
    window: int
    rate: ConvergenceRate
    begin: int
    eps: list[float]
    loss_levels: list[float]

    @classmethod
    def of(cls, program: Program, iterations: int, window: int) -> PerturbationScene:
        """Run a program without perturbation.

        Raises:
            ConfigError: if its distance to x*, or its loss, does not fall enough to define levels.
        """
        beside = undisturbed(program, CAP * iterations)
        optimum = getattr(program, "optimum", None)
        if optimum is None:
            optimum = parameters(program, LazyUndisturbed(program).at(LONG * iterations))
        distances, losses = [], []
        run = beside()
        for iteration in range(iterations + 1):
            state = run.at(iteration)
            distances.append(apart(program, parameters(program, state), optimum))
            losses.append(program.loss(state))
        begin, rate = max(2, iterations // 3), fit_rate(distances)
        return cls(
            program=program,
            beside=beside,
            optimum=optimum,
            distances=np.array(distances),
            losses=np.array(losses),
            window=window,
            rate=rate,
            begin=begin,
            eps=levels(distances[: rate.iterations + 1], window, LEVELS, begin),
            loss_levels=levels(losses, window, LEVELS, begin),
        )

    @property
    def iterations(self) -> int:
        """Return the number of iterations of the unperturbed run."""
        return len(self.distances) - 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of perturbations that the program supports."""
        return KINDS if self.optimum.is_floating_point() else (RESET,)

    def is_there(self, distance: float, loss: float) -> bool:
        """Return whether a run has reached the last level of the distance and, by its trailing mean, of the loss."""
        return distance <= self.eps[-1] and loss <= self.loss_levels[-1]


@dataclass(frozen=True, slots=True)
class PerturbedRun:
    """A perturbed run: ||y(k) - x*||, its losses, and ||d(k)||; those of x(0) first."""

    distances: Numbers
    losses: Numbers
    sizes: Numbers


def perturbed_run(
    scene: PerturbationScene,
    perturbation: Perturbation,
    begin: int,
    most: int,
    until: Callable[[float, float], bool] | None = None,
) -> PerturbedRun:
    """Run a program with a perturbation, from the first perturbed iteration on.

    Args:
        scene: The program and its unperturbed run.
        perturbation: A perturbation that has no effect before iteration ``begin``.
        begin: Iterations before this one are taken from the unperturbed run.
        most: Maximum number of iterations.
        until: Stops the run earlier, if true for its distance and the trailing mean of its loss.
    """
    program, beside = scene.program, scene.beside()
    state, recorder = copy_of(beside.at(begin)), PerturbationRecorder(perturbation, beside)
    distances, losses = list(scene.distances[: begin + 1]), list(scene.losses[: begin + 1])
    for iteration in range(begin, most):
        recorder.disturb(state, program, iteration)
        program.iterate(state, iteration)
        distances.append(apart(program, parameters(program, state), scene.optimum))
        losses.append(program.loss(state))
        if until is not None and until(distances[-1], float(np.mean(losses[-scene.window :]))):
            break
    return PerturbedRun(np.array(distances), np.array(losses), np.array(recorder.sizes))


def _one_by_one(scene: PerturbationScene, trials: int, seed: int) -> list[Row]:
    each, program = math.ceil(trials / len(scene.kinds)), scene.program
    runs = {
        kind: [_trial(scene, kind, np.random.default_rng([seed, KINDS.index(kind), number])) for number in range(each)]
        for kind in scene.kinds
    }
    rows = []
    for source, c in ((FITTED, scene.rate.fitted), (WORST, scene.rate.worst)):
        if not 0 < c < 1:
            why = f"c = {c:.4g} is not below 1: there is no bound"
            rows.append(
                {"part": "bound", "status": NOT_RUN, "program": program.name, "c": c, "c_from": source, "why": why}
            )
            continue
        costs = {kind: joined([costs_of(scene, run, c) for run in runs[kind]]) for kind in runs}
        rows += _binned(program, costs) if source == FITTED else []
        alone = costs_of(scene, PerturbedRun(scene.distances, scene.losses, np.zeros(1)), c)
        extra = {
            "c_ci": list(scene.rate.interval) if source == FITTED else None,
            "undisturbed_room": finite(alone.room[0]),
        }
        rows += [_bound_row(program, kind, costs[kind], source, c) | extra for kind in costs]
    return rows


def _trial(scene: PerturbationScene, kind: str, rng: np.random.Generator) -> PerturbedRun:
    when, seed = int(rng.integers(1, scene.begin)), int(rng.integers(2**31))
    come = apart(scene.program, *(parameters(scene.program, scene.beside().at(k)).clone() for k in (0, when)))
    size = float(10 ** rng.uniform(*_SIZES)) * come
    kinds: dict[str, Callable[[], Perturbation]] = {
        RANDOM: lambda: RandomDirection(at(when), size, seed),
        ADVERSARIAL: lambda: Adversarial(at(when), size, scene.optimum),
        RESET: lambda: Reset(at(when), float(rng.uniform(1 / scene.program.blocks, 1)), seed),
    }
    return perturbed_run(scene, kinds[kind](), when, CAP * scene.iterations, scene.is_there)


def costs_of(scene: PerturbationScene, run: PerturbedRun, c: float) -> PerturbationCosts:
    """Return the cost of a perturbed run, by levels of the distance and of the loss, and its bounds; of shape (1,).

    Args:
        scene: The program and its unperturbed run.
        run: The run, from :func:`perturbed_run`.
        c: Rate, between 0 and 1.
    """
    found = measured(run.distances[:, None], scene.distances, run.sizes[:, None], c, scene.eps)
    in_loss = iteration_cost(run.losses, scene.losses, scene.loss_levels, scene.window)
    return replace(found, loss_cost=np.array([in_loss.iterations]))


# -- rows


def _binned(program: Program, costs: dict[str, PerturbationCosts]) -> Iterator[Row]:
    """Yield a row for each kind and each bin of D / ||x(0) - x*||, the argument of the paper's bound."""
    for kind, found in costs.items():
        bins = np.floor(BINS * found.log_delta / math.log(10))
        for number in np.unique(bins[np.isfinite(bins)]):
            chosen = bins == number
            cost = found.cost[chosen]
            yield {
                "part": "perturbation",
                "status": MEASURED,
                "program": program.name,
                "kind": kind,
                "delta": float(np.exp(found.log_delta[chosen].mean())),
                "size": float(found.size[chosen].mean()),
                "trials": len(cost),
                "cost": float(cost.mean()),
                "ci": interval_of_mean(cost),
                "least": float(cost.min()),
                "greatest": float(cost.max()),
                "negative": int((cost < 0).sum()),
                "censored": int((found.censored[chosen] > 0).sum()),
                "paper_bound": float(found.paper[chosen].mean()),
                "absolute_bound": float(found.most[chosen].mean()),
                "loss_cost": finite(found.loss_cost[chosen].mean()),
            }


def _bound_row(program: Program, kind: str, found: PerturbationCosts, source: str, c: float) -> Row:
    above = found.cost - found.paper
    return {
        "part": "bound",
        "status": MEASURED,
        "program": program.name,
        "kind": kind,
        "c": c,
        "c_from": source,
        "c_ci": None,
        "undisturbed_room": None,
        "means": MEANS[source],
        "perturbations": len(found.cost),
        "violations": int((found.room < -ROUNDING).sum()),
        "least_room": finite(found.room.min()),
        "difference_violations": int((above > ROUNDING).sum()),
        "difference_share": float((above > ROUNDING).mean()),
        "difference_excess": float(above.max()),
        "censored": int((found.censored > 0).sum()),
    }


def interval_of_mean(values: Numbers) -> list[float] | None:
    """Return the normal 95 % interval of the mean of independent values; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean, half = float(values.mean()), 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return [mean - half, mean + half]


def finite(value: float) -> float | None:
    """Return a number as JSON can store it: None if it is infinite or NaN."""
    return float(value) if math.isfinite(value) else None
