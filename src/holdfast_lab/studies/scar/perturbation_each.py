"""Compares all kinds of perturbations: once, several times, and at every step.

The cost of each perturbation is compared with its bound. A perturbation at every step also leaves an irreducible error:
with e the distance in the middle of a run and s the largest perturbation since then, a later distance is at most
c / (1 - c) s, which stays, plus c^k e, which decays.

A run that diverges to NaN or infinity is kept. It never reaches a level, so it is censored, and its cost is counted as
if it had reached the level when it was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast.tools.iteration_cost import iteration_cost
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.scar.perturbation import (
    Contraction,
    NoPerturbation,
    Perturbation,
    check_rate,
    irreducible_error,
)
from holdfast_lab.studies.scar.perturbation_batch import PerturbationCosts, joined, matrix_of
from holdfast_lab.studies.scar.perturbation_kinds import (
    EVERY_STEP,
    Adversarial,
    Asynchronous,
    BitFlip,
    IterationChoice,
    LostUpdate,
    RandomDirection,
    Reset,
    Rounded,
    Stale,
    at,
)
from holdfast_lab.studies.scar.perturbation_rows import (
    CAP,
    FITTED,
    KNOWN,
    MEANS,
    ROUNDING,
    PerturbationScene,
    PerturbedRun,
    costs_of,
    finite,
    interval_of_mean,
    perturbed_run,
)
from holdfast_lab.workloads.iterative.base import Program

TIMES = 3
NOTHING = "nothing"
"""The name of the unperturbed run among the kinds."""
ONCE, SEVERAL, ALWAYS = OFTEN = ("once", f"{TIMES} times", "every step")
"""How often a run is perturbed."""
ASUNDER = 0.1
"""Size of a perturbation added once or several times, in units of ||x(0) - x*||."""
STANDING = 0.01
"""Size of a perturbation added at every step, in the same unit."""
_NEAR = 1e-6
"""Distance at which the unperturbed run of a linear contraction ends, as a multiple of its initial distance."""
_SMALL = 1e-12
"""Tolerance for rounding errors in 64 bits, as a multiple of the initial distance."""
_FEWER = 4
"""Runs that are perturbed at every step are fewer by this factor: they are longer, and very similar."""
_PAST = 16
"""A run starts so many iterations before its first perturbation, the longest history that any kind needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbationKind:
    """A kind of perturbation.

    Args:
        name: Its name in rows and on the page.
        make: Creates a perturbation from its iterations and a seed.
        often: The values of :data:`OFTEN` that make sense for it.
        is_drawn: Whether it is random; if not, all runs that are perturbed at every step are the same.
    """

    name: str
    make: Callable[[IterationChoice, int], Perturbation]
    often: tuple[str, ...] = OFTEN
    is_drawn: bool = True


def kind_rows(
    program: Program, trials: int, seed: int, iterations: int, window: int, part: int = 0, parts: int = 1
) -> list[Row]:
    """Return the cost of each kind of perturbation, once, several times and at every step.

    Args:
        program: The program; one with integer parameters can only be reset, stale, asynchronous, or lose updates.
        trials: Trials of each kind, for once and for several times; for every step a quarter as many, or one if the
            kind is not random. In trials of the same number all kinds perturb the same iterations.
        seed: Seed of all random draws.
        iterations: Iterations of the unperturbed run; a linear contraction ignores it and runs until it is a million
            times nearer to x*.
        window: Window of the trailing mean of the loss in iterations; a linear contraction ignores it and uses 1.
        part: Which of ``parts`` equal parts of the rows to return, from 0.
        parts: Number of parts (calls) that the work is divided into.

    Returns:
        Rows with ``part`` "kind", one for each kind and frequency, in the order of :func:`kinds_of`. Distances are in
        units of ||x(0) - x*||. ``size`` is the median over the runs of the sum of ||d(l)||, or of the largest ||d(l)||
        for every step. ``violations`` counts runs above the absolute bound; ``bound`` is that bound minus the
        unperturbed count. ``error``, ``error_bound``, ``left`` and ``holds`` describe the irreducible error of the run
        with the largest error, for every step.
    """
    is_known = matrix_of(program) is not None
    if is_known:
        iterations, window = math.ceil(math.log(_NEAR) / math.log(cast("Contraction", program).rate)), 1
    try:
        scene = PerturbationScene.of(program, iterations, window)
        source, c = (KNOWN, cast("Contraction", program).rate) if is_known else (FITTED, scene.rate.fitted)
        check_rate(c)
    except ConfigError as error:
        why = {"part": "kind", "status": NOT_RUN, "program": program.name, "why": str(error)}
        return [why] if part == 0 else []
    every = [(kind, often) for kind in kinds_of(scene) for often in kind.often]
    first, last = (len(every) * number // parts for number in (part, part + 1))
    return [_row(scene, kind, often, trials, seed, source, c) for kind, often in every[first:last]]


def kinds_of(scene: PerturbationScene) -> list[PerturbationKind]:
    """Return the kinds of perturbations of a program, the unperturbed run first."""
    struck, always = (ONCE, SEVERAL), (ALWAYS,)
    nothing = PerturbationKind(name=NOTHING, make=lambda *_: NoPerturbation(), often=always, is_drawn=False)
    of_blocks = [
        PerturbationKind(
            name="1/4 of the blocks reset", make=lambda when, seed: Reset(when, 1 / 4, seed), often=struck
        ),
        PerturbationKind(
            name="1/16 of the blocks reset", make=lambda when, seed: Reset(when, 1 / 16, seed), often=always
        ),
        PerturbationKind(name="gradient lost", make=lambda when, seed: LostUpdate(when, 1.0, seed), often=struck),
        PerturbationKind(
            name="half of the gradient lost", make=lambda when, seed: LostUpdate(when, 1.0, seed, part=0.5)
        ),
        PerturbationKind(name="stale by 4", make=lambda when, seed: Stale(when, 4, 1.0, seed), often=struck),
        PerturbationKind(name="stale by 16", make=lambda when, seed: Stale(when, 16, 1.0, seed), often=struck),
        PerturbationKind(
            name="1/4 of the blocks stale by 4", make=lambda when, seed: Stale(when, 4, 1 / 4, seed), often=always
        ),
        PerturbationKind(
            name="1/4 of the blocks stale by 16", make=lambda when, seed: Stale(when, 16, 1 / 4, seed), often=always
        ),
        PerturbationKind(
            name="asynchronous, at most 4 late", make=lambda _, seed: Asynchronous(1 / 2, 4, seed), often=always
        ),
    ]
    return [nothing, *(_of_numbers(scene) if scene.optimum.is_floating_point() else []), *of_blocks]


def _of_numbers(scene: PerturbationScene) -> list[PerturbationKind]:
    """Return the kinds for floating-point parameters: additions, bit flips and rounding."""
    dtype, struck, always = scene.optimum.dtype, (ONCE, SEVERAL), (ALWAYS,)
    bits, fraction = torch.finfo(dtype).bits, round(-math.log2(torch.finfo(dtype).eps))
    return [
        _random(scene, ASUNDER, struck),
        _random(scene, STANDING, always),
        _away(scene, ASUNDER, struck),
        _away(scene, STANDING, always),
        _flipped("any bit", None),
        _flipped("first of the fraction", fraction - 1),
        _flipped("first of the exponent", bits - 2),
        _rounded("bf16", torch.bfloat16),
        _rounded("fp8 (e4m3)", torch.float8_e4m3fn),
    ]


def _random(scene: PerturbationScene, size: float, often: tuple[str, ...]) -> PerturbationKind:
    length = size * float(scene.distances[0])
    return PerturbationKind(
        name=f"random, {size:g}", make=lambda when, seed: RandomDirection(when, length, seed), often=often
    )


def _away(scene: PerturbationScene, size: float, often: tuple[str, ...]) -> PerturbationKind:
    length, name = size * float(scene.distances[0]), f"adversarial, {size:g}"
    return PerturbationKind(
        name=name, make=lambda when, _: Adversarial(when, length, scene.optimum), often=often, is_drawn=False
    )


def _flipped(name: str, bit: int | None) -> PerturbationKind:
    return PerturbationKind(name=f"bit flip, {name}", make=lambda when, seed: BitFlip(when, seed, bit))


def _rounded(name: str, dtype: torch.dtype) -> PerturbationKind:
    return PerturbationKind(name=f"rounded to {name}", make=lambda when, _: Rounded(when, dtype), is_drawn=False)


# -- the runs


def _row(
    scene: PerturbationScene, kind: PerturbationKind, often: str, trials: int, seed: int, source: str, c: float
) -> Row:
    if often == ALWAYS:
        trials = max(1, trials // _FEWER) if kind.is_drawn else 1
    runs = [_run(scene, kind, often, np.random.default_rng([seed, number])) for number in range(trials)]
    row: Row = {"part": "kind", "status": MEASURED, "program": scene.program.name, "kind": kind.name, "often": often}
    row |= {"trials": trials, "c": c, "c_from": source, "means": MEANS[source]}
    return row | _cost(scene, runs, c) | (_what_stays(scene, runs, c) if often == ALWAYS else {})


def _run(scene: PerturbationScene, kind: PerturbationKind, often: str, rng: np.random.Generator) -> PerturbedRun:
    struck, seed = rng.choice(np.arange(1, scene.begin), TIMES, replace=False), int(rng.integers(2**31))
    most = CAP * scene.iterations
    if often == ALWAYS:
        return perturbed_run(scene, kind.make(EVERY_STEP, seed), 0, most)
    times = [int(time) for time in (struck[:1] if often == ONCE else struck)]
    return perturbed_run(scene, kind.make(at(*times), seed), max(0, min(times) - _PAST), most, scene.is_there)


def _cost(scene: PerturbationScene, runs: Sequence[PerturbedRun], c: float) -> Row:
    found: PerturbationCosts = joined([costs_of(scene, run, c) for run in runs])
    bounded = found.most[np.isfinite(found.most)]
    in_loss = [iteration_cost(run.losses, scene.losses, scene.loss_levels, scene.window) for run in runs]
    return {
        "size": finite(float(np.median(found.size))),
        "cost": float(found.cost.mean()),
        "ci": interval_of_mean(found.cost),
        "negative": int((found.cost < 0).sum()),
        "loss_cost": float(np.mean([cost.iterations for cost in in_loss])),
        "loss_censored": sum(cost.censored > 0 for cost in in_loss),
        "bound": float(bounded.mean()) if len(bounded) else None,
        "violations": int((found.room < -ROUNDING).sum()),
        "difference_violations": int((found.cost - found.paper > ROUNDING).sum()),
        "censored": int((found.censored > 0).sum()),
        "diverged": sum(not math.isfinite(run.distances[-1]) for run in runs),
    }


def _what_stays(scene: PerturbationScene, runs: Sequence[PerturbedRun], c: float) -> Row:
    kept = [_error(scene, run, c) for run in runs]
    largest = max(kept, key=lambda one: one["error"])
    holds = [one["holds"] for one in kept if one["holds"] is not None]
    sizes = [one["size"] for one in kept]
    return {
        "size": finite(float(np.median(sizes))),
        "error": finite(largest["error"]),
        "error_bound": finite(largest["error_bound"]),
        "left": finite(largest["left"]),
        "holds": all(holds) if holds else None,
    }


def _error(scene: PerturbationScene, run: PerturbedRun, c: float) -> Row:
    """Return the largest distance in the last quarter of a run, and its bound from perturbations of the second half."""
    length, start = len(run.distances) - 1, float(scene.distances[0])
    half, quarter = length // 2, length // 4
    size, error = float(run.sizes[half:].max()), _no_less(float(run.distances[-quarter:].max()))
    bound, left = irreducible_error(c, size), c ** (length - quarter - half) * _no_less(float(run.distances[half]))
    holds = error <= (bound + left) * (1 + 1e-9) + _SMALL * start if math.isfinite(bound + left) else None
    return {
        "size": size / start,
        "error": error / start,
        "error_bound": bound / start,
        "left": left / start,
        "holds": holds,
    }


def _no_less(distance: float) -> float:
    """Return a distance, with NaN replaced by infinity."""
    return math.inf if math.isnan(distance) else distance
