"""Every kind of perturbation side by side: once, several times, and at every step.

What befalls a run once or several times has a cost, held against its bound. What befalls it at every step has one, too, and
leaves an error that stays: with e the distance in the middle of a run and s the largest perturbation since, a later distance
is at most c / (1 - c) s, which stays, and c^k e, which goes.

A run that a perturbation has taken out of the numbers, to NaN or infinity, is kept: it never gets to a level, so that it is
censored, and its cost is counted as if it had got there when it was given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast.report.iteration_cost import iteration_cost
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.scar.perturbation import Contraction, Nothing, Perturbation, check_rate, irreducible_error
from holdfast_lab.studies.scar.perturbation_batch import Costs, joined, matrix_of
from holdfast_lab.studies.scar.perturbation_kinds import (
    EVERY_STEP,
    Adversarial,
    Asynchronous,
    BitFlip,
    LostUpdate,
    RandomDirection,
    Reset,
    Rounded,
    Stale,
    When,
    at,
)
from holdfast_lab.studies.scar.perturbation_rows import (
    CAP,
    FITTED,
    KNOWN,
    MEANS,
    ROUNDING,
    Run,
    Scene,
    costs_of,
    finite,
    interval_of_mean,
    perturbed_run,
)
from holdfast_lab.workloads.iterative.base import Program

TIMES = 3
NOTHING = "nothing"
"""The kind that is the undisturbed run."""
ONCE, SEVERAL, ALWAYS = OFTEN = ("once", f"{TIMES} times", "every step")
"""How often something befalls a run."""
ASUNDER = 0.1
"""Size of a step that is added once or several times, in units of ||x(0) - x*||."""
STANDING = 0.01
"""Size of one that is added at every step."""
_NEAR = 1e-6
"""A linear contraction is followed for as long as it takes undisturbed to come so near to x*, of where it began."""
_SMALL = 1e-12
"""Of where a run began, what rounding to 64 bits may amount to."""
_FEWER = 4
"""Of what befalls a run at every step, so many times fewer runs: they are longer, and much alike."""
_PAST = 16
"""A run begins so many iterations before it is first disturbed: no further back does any kind look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of perturbation, and how often it is tried.

    Args:
        name: In rows and on the page.
        make: Makes one, given its iterations and a seed.
        often: Those of :data:`OFTEN` that make sense.
        is_drawn: Whether something in it is drawn; two runs that it befalls at every step are the same if not.
    """

    name: str
    make: Callable[[When, int], Perturbation]
    often: tuple[str, ...] = OFTEN
    is_drawn: bool = True


def kind_rows(
    program: Program, trials: int, seed: int, iterations: int, window: int, part: int = 0, parts: int = 1
) -> list[Row]:
    """Return what each kind of perturbation costs, once, several times and at every step.

    Args:
        program: Any; one that counts in integers is only reset, stale, asynchronous, or loses updates.
        trials: Of each kind, of once and of several times; of every step a quarter as many, one if nothing is drawn.
            Number by number all kinds befall the same iterations.
        seed: Of all that is drawn.
        iterations: Of the undisturbed run; a linear contraction takes as long as it takes to come a million times nearer.
        window: Of the trailing mean of the loss, in iterations; 1 of a linear contraction.
        part: Which of ``parts`` equal parts of the rows to return, from 0.
        parts: In how many parts the work is done, in as many calls.

    Returns:
        Of ``part`` "kind" a row for each kind and how often, in the order of :func:`kinds_of`. Distances are in units of
        ||x(0) - x*||. ``size``: the median over the runs of the sum of ||d(l)||, at every step of the largest.
        ``violations`` of the absolute bound, ``bound`` is that less the undisturbed count. ``error``, ``error_bound``,
        ``left`` and ``holds``: what stays, at every step; of the run of the largest error.
    """
    is_known = matrix_of(program) is not None
    if is_known:
        iterations, window = math.ceil(math.log(_NEAR) / math.log(cast("Contraction", program).rate)), 1
    try:
        scene = Scene.of(program, iterations, window)
        source, c = (KNOWN, cast("Contraction", program).rate) if is_known else (FITTED, scene.rate.fitted)
        check_rate(c)
    except ConfigError as error:
        why = {"part": "kind", "status": NOT_RUN, "program": program.name, "why": str(error)}
        return [why] if part == 0 else []
    every = [(kind, often) for kind in kinds_of(scene) for often in kind.often]
    first, last = (len(every) * number // parts for number in (part, part + 1))
    return [_row(scene, kind, often, trials, seed, source, c) for kind, often in every[first:last]]


def kinds_of(scene: Scene) -> list[Kind]:
    """Return the kinds that there are for a program, the undisturbed run first."""
    struck, always = (ONCE, SEVERAL), (ALWAYS,)
    nothing = Kind(name=NOTHING, make=lambda *_: Nothing(), often=always, is_drawn=False)
    of_blocks = [
        Kind(name="1/4 of the blocks reset", make=lambda when, seed: Reset(when, 1 / 4, seed), often=struck),
        Kind(name="1/16 of the blocks reset", make=lambda when, seed: Reset(when, 1 / 16, seed), often=always),
        Kind(name="gradient lost", make=lambda when, seed: LostUpdate(when, 1.0, seed), often=struck),
        Kind(name="half of the gradient lost", make=lambda when, seed: LostUpdate(when, 1.0, seed, part=0.5)),
        Kind(name="stale by 4", make=lambda when, seed: Stale(when, 4, 1.0, seed), often=struck),
        Kind(name="stale by 16", make=lambda when, seed: Stale(when, 16, 1.0, seed), often=struck),
        Kind(name="1/4 of the blocks stale by 4", make=lambda when, seed: Stale(when, 4, 1 / 4, seed), often=always),
        Kind(name="1/4 of the blocks stale by 16", make=lambda when, seed: Stale(when, 16, 1 / 4, seed), often=always),
        Kind(name="asynchronous, at most 4 late", make=lambda _, seed: Asynchronous(1 / 2, 4, seed), often=always),
    ]
    return [nothing, *(_of_numbers(scene) if scene.optimum.is_floating_point() else []), *of_blocks]


def _of_numbers(scene: Scene) -> list[Kind]:
    """Return the kinds that add to the parameters, flip their bits or round them."""
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


def _random(scene: Scene, size: float, often: tuple[str, ...]) -> Kind:
    length = size * float(scene.distances[0])
    return Kind(name=f"random, {size:g}", make=lambda when, seed: RandomDirection(when, length, seed), often=often)


def _away(scene: Scene, size: float, often: tuple[str, ...]) -> Kind:
    length, name = size * float(scene.distances[0]), f"adversarial, {size:g}"
    return Kind(name=name, make=lambda when, _: Adversarial(when, length, scene.optimum), often=often, is_drawn=False)


def _flipped(name: str, bit: int | None) -> Kind:
    return Kind(name=f"bit flip, {name}", make=lambda when, seed: BitFlip(when, seed, bit))


def _rounded(name: str, dtype: torch.dtype) -> Kind:
    return Kind(name=f"rounded to {name}", make=lambda when, _: Rounded(when, dtype), is_drawn=False)


# ---------------------------------------------------------------------------------------------
# The runs


def _row(scene: Scene, kind: Kind, often: str, trials: int, seed: int, source: str, c: float) -> Row:
    if often == ALWAYS:
        trials = max(1, trials // _FEWER) if kind.is_drawn else 1
    runs = [_run(scene, kind, often, np.random.default_rng([seed, number])) for number in range(trials)]
    row: Row = {"part": "kind", "status": MEASURED, "program": scene.program.name, "kind": kind.name, "often": often}
    row |= {"trials": trials, "c": c, "c_from": source, "means": MEANS[source]}
    return row | _cost(scene, runs, c) | (_what_stays(scene, runs, c) if often == ALWAYS else {})


def _run(scene: Scene, kind: Kind, often: str, rng: np.random.Generator) -> Run:
    struck, seed = rng.choice(np.arange(1, scene.begin), TIMES, replace=False), int(rng.integers(2**31))
    most = CAP * scene.iterations
    if often == ALWAYS:
        return perturbed_run(scene, kind.make(EVERY_STEP, seed), 0, most)
    times = [int(time) for time in (struck[:1] if often == ONCE else struck)]
    return perturbed_run(scene, kind.make(at(*times), seed), max(0, min(times) - _PAST), most, scene.is_there)


def _cost(scene: Scene, runs: Sequence[Run], c: float) -> Row:
    found: Costs = joined([costs_of(scene, run, c) for run in runs])
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


def _what_stays(scene: Scene, runs: Sequence[Run], c: float) -> Row:
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


def _error(scene: Scene, run: Run, c: float) -> Row:
    """Return the largest distance in the last quarter of a run, and its bound from what befell it in its second half."""
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
    """Return a distance, of what is no number an infinite one."""
    return math.inf if math.isnan(distance) else distance
