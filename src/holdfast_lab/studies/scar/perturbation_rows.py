"""What perturbations cost by their size, held against the bounds.

Of a linear contraction whose optimum and rate are known, thousands of runs at once, and a count above the absolute bound
would be an error in the theory or in this code. Of any other program one run at a time, x* is where a long run ends and c is
fitted: there a count above the bound says that the program did not contract at that c wherever the perturbed run went, and
one below it proves nothing. The rows say which it is (``means``).
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
from holdfast.report.iteration_cost import iteration_cost, levels
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.scar.perturbation import (
    Beside,
    Contraction,
    Perturbation,
    Rate,
    Recorder,
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
    Batch,
    Costs,
    joined,
    matrix_of,
    measured,
)
from holdfast_lab.studies.scar.perturbation_kinds import Adversarial, RandomDirection, Reset, at
from holdfast_lab.workloads.iterative.base import Program, copy_of

Numbers = NDArray[np.float64]

KNOWN, FITTED, WORST = "known", "fitted", "worst ratio"
MEANS = {
    KNOWN: "above the absolute bound would be an error in the theory or in this code",
    FITTED: "above the absolute bound: the program did not contract at the fitted c wherever the run went",
    WORST: "above the absolute bound: the perturbed run met an iteration worse than any of the undisturbed one",
}
"""Where c comes from, and what a count above the absolute bound means then."""

LONG = 10
"""Where x* is not known, it is where a run of so many times the iterations ends."""
BINS = 4
"""Of sizes, in each power of ten."""
CAP = 3
"""A run is given up, and counted as censored, after so many times the iterations of the undisturbed one."""
_SIZES = (-2.0, 0.25)
"""Powers of ten, of the way from x(0) that the run has come, between which the size of a perturbation is."""
ROUNDING = 1e-6
"""Iterations; what is closer to a bound than this is at it."""


def cost_rows(program: Program, trials: int, seed: int, iterations: int = 300, window: int = 8) -> list[Row]:
    """Return the cost of perturbations by kind and size, and how often it was above each bound.

    Args:
        program: Any.
        trials: In all, the same for each kind; of a linear contraction 20,000 take seconds, else each is a run.
        seed: Of what is perturbed.
        iterations: Of the undisturbed run whose levels are to be reached; of no meaning for a linear contraction.
        window: Of the trailing mean of its loss, in iterations; as above.

    Returns:
        Of ``part`` "perturbation" a row for each kind and bin of sizes, of ``part`` "bound" one for each kind and source
        of c. All distances are in units of ||x(0) - x*||. ``least_room`` and ``undisturbed_room`` are by how many
        iterations the absolute bound is above the count, at least; where the latter is below 0 the undisturbed run
        itself does not converge at that c, and no perturbation is needed to exceed it.
    """
    matrix = matrix_of(program)
    if matrix is not None:
        batch = Batch(cast("Contraction", program), matrix)
        each = math.ceil(trials / len(ALL_KINDS))
        costs = {kind: batch.costs(kind, each, seed) for kind in ALL_KINDS}
        return [*_binned(program, costs), *(_bound_row(program, kind, costs[kind], KNOWN, batch.c) for kind in costs)]
    try:
        scene = Scene.of(program, iterations, window)
    except ConfigError as error:
        return [{"part": "bound", "status": NOT_RUN, "program": program.name, "why": str(error)}]
    return _one_by_one(scene, trials, seed)


# ---------------------------------------------------------------------------------------------
# One run at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A program, and all that is known of its undisturbed run.

    Args:
        program: Any.
        beside: Gives the undisturbed run.
        optimum: x*, known or where a run of :data:`LONG` times the iterations ends.
        distances: ||x(k) - x*||, of shape (iterations + 1,).
        losses: Of the same states.
        window: Of their trailing mean.
        rate: Fitted.
        begin: Perturbations are before this iteration, and after the first, where a reset is nothing; levels after it.
        eps: Levels of the distance, falling, of those that the rate was fitted to.
        loss_levels: Of the loss, falling.
    """

    program: Program
    beside: Callable[[], Undisturbed]
    optimum: Tensor
    distances: Numbers
    losses: Numbers
    window: int
    rate: Rate
    begin: int
    eps: list[float]
    loss_levels: list[float]

    @classmethod
    def of(cls, program: Program, iterations: int, window: int) -> Scene:
        """Run a program undisturbed.

        Raises:
            ConfigError: if its distance to where it ends, or its loss, does not fall so that levels can be told apart.
        """
        beside = undisturbed(program, CAP * iterations)
        optimum = getattr(program, "optimum", None)
        if optimum is None:
            optimum = parameters(program, Beside(program).at(LONG * iterations))
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
        """Return how many the undisturbed run has."""
        return len(self.distances) - 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of perturbations that there can be."""
        return KINDS if self.optimum.is_floating_point() else (RESET,)

    def is_there(self, distance: float, loss: float) -> bool:
        """Return whether a run has reached the last level of the distance, and with its trailing mean that of the loss."""
        return distance <= self.eps[-1] and loss <= self.loss_levels[-1]


@dataclass(frozen=True, slots=True)
class Run:
    """A perturbed run: ||y(k) - x*||, its losses, and ||d(k)||; those of x(0) first."""

    distances: Numbers
    losses: Numbers
    sizes: Numbers


def perturbed_run(
    scene: Scene, perturbation: Perturbation, begin: int, most: int, until: Callable[[float, float], bool] | None = None
) -> Run:
    """Run a program with a perturbation, from where it comes.

    Args:
        scene: Of the program.
        perturbation: That does nothing before iteration ``begin``.
        begin: The undisturbed run serves until then.
        most: Iterations after which it ends.
        until: Ends it before that, given its distance and the trailing mean of its loss.
    """
    program, beside = scene.program, scene.beside()
    state, recorder = copy_of(beside.at(begin)), Recorder(perturbation, beside)
    distances, losses = list(scene.distances[: begin + 1]), list(scene.losses[: begin + 1])
    for iteration in range(begin, most):
        recorder.disturb(state, program, iteration)
        program.iterate(state, iteration)
        distances.append(apart(program, parameters(program, state), scene.optimum))
        losses.append(program.loss(state))
        if until is not None and until(distances[-1], float(np.mean(losses[-scene.window :]))):
            break
    return Run(np.array(distances), np.array(losses), np.array(recorder.sizes))


def _one_by_one(scene: Scene, trials: int, seed: int) -> list[Row]:
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
        alone = costs_of(scene, Run(scene.distances, scene.losses, np.zeros(1)), c)
        extra = {
            "c_ci": list(scene.rate.interval) if source == FITTED else None,
            "undisturbed_room": finite(alone.room[0]),
        }
        rows += [_bound_row(program, kind, costs[kind], source, c) | extra for kind in costs]
    return rows


def _trial(scene: Scene, kind: str, rng: np.random.Generator) -> Run:
    when, seed = int(rng.integers(1, scene.begin)), int(rng.integers(2**31))
    come = apart(scene.program, *(parameters(scene.program, scene.beside().at(k)).clone() for k in (0, when)))
    size = float(10 ** rng.uniform(*_SIZES)) * come
    kinds: dict[str, Callable[[], Perturbation]] = {
        RANDOM: lambda: RandomDirection(at(when), size, seed),
        ADVERSARIAL: lambda: Adversarial(at(when), size, scene.optimum),
        RESET: lambda: Reset(at(when), float(rng.uniform(1 / scene.program.blocks, 1)), seed),
    }
    return perturbed_run(scene, kinds[kind](), when, CAP * scene.iterations, scene.is_there)


def costs_of(scene: Scene, run: Run, c: float) -> Costs:
    """Return what a perturbed run costs, in levels of the distance and of the loss, and what it may; of shape (1,).

    Args:
        scene: Of its program.
        run: As :func:`perturbed_run` returns it.
        c: Rate, between 0 and 1.
    """
    found = measured(run.distances[:, None], scene.distances, run.sizes[:, None], c, scene.eps)
    in_loss = iteration_cost(run.losses, scene.losses, scene.loss_levels, scene.window)
    return replace(found, loss_cost=np.array([in_loss.iterations]))


# ---------------------------------------------------------------------------------------------
# Rows


def _binned(program: Program, costs: dict[str, Costs]) -> Iterator[Row]:
    """Yield a row for each kind and each bin of D / ||x(0) - x*||, of which the paper's bound is a function."""
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


def _bound_row(program: Program, kind: str, found: Costs, source: str, c: float) -> Row:
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
    """Return the 95 % interval of the mean of independent values, from the normal distribution; None of fewer than two."""
    if len(values) < 2:
        return None
    mean, half = float(values.mean()), 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return [mean - half, mean + half]


def finite(value: float) -> float | None:
    """Return a number as it can stand in a row: None if it is infinite, or no number."""
    return float(value) if math.isfinite(value) else None
