"""Pilot runs without failures: levels of the loss, skew of the drift, and the best learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.tools.iteration_cost import levels
from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.scar.kappa import kappa
from holdfast_lab.studies.scar.trials import ProgramRun
from holdfast_lab.workloads.iterative.base import Program

LEVELS = 7
_PILOTS = 3
_WIDER = (1, 2, 4)
"""Multiples of a program's window to try, until the loss falls by more than its noise."""


class ProgramCannotRun(ConfigError):
    """A program cannot be run with these settings: a finding, which another run would repeat."""


def pilot(course: ProgramRun) -> list[Row]:
    """Run without failures, and return a row with the levels of the loss and the skew of the drift.

    Raises:
        ConfigError: if the loss falls nowhere by more than its noise.
    """
    runs, skews, began = [], [], time.perf_counter()
    for number in range(_PILOTS):
        program = course.make(int(course.chance("pilot", number).integers(2**31)))
        losses, drift = _watched(program, course)
        runs.append(losses)
        skews.append(skew(drift))
    seconds = (time.perf_counter() - began) / (_PILOTS * course.iterations)
    found, window = _levels(runs, course)
    rows = program.rows(program.start())
    row: Row = {
        "part": "pilot",
        "status": MEASURED,
        "program": course.name,
        "levels": found,
        "kappas": [kappa(runs[0], level, window) for level in found],
        "skew": float(np.mean(skews)),
        "blocks": program.blocks,
        "block_bytes": int(program.block_bytes.sum()),
        "optimizer_state": len(rows) > 1,
        "every": course.every,
        "window": window,
        "iteration_s": seconds,
    }
    return [row]


def _levels(runs: Sequence[Sequence[float]], course: ProgramRun) -> tuple[list[float], int]:
    """Return the levels of the loss that every run reaches, and the window of its trailing mean.

    The window is the course's, or the smallest multiple of it with which the loss falls by more than its noise: at the
    best learning rate the loss can be too noisy for the window that is enough at the stated rate.

    Raises:
        ConfigError: if the loss falls by more than its noise with none of the windows.
    """
    for times in _WIDER:
        window = times * course.window
        try:
            reached = levels(runs[0], window, LEVELS, begin=2 * course.every)
        except ConfigError:
            if times == _WIDER[-1]:
                raise
            continue
        # A level that some seeds do not reach would measure the seed, not the failure.
        if found := [level for level in reached if all(math.isfinite(kappa(run, level, window)) for run in runs)]:
            return found, window
    raise ProgramCannotRun(
        f"{course.name}: no level of the loss is reached with every seed; run the pilot for more iterations"
    )


def _watched(program: Program, course: ProgramRun) -> tuple[list[float], Tensor]:
    """Return the losses, and the drift of each block: its distance between iterations 3 C and 4 C."""
    state, losses, then = program.start(), [], None
    drift = torch.zeros(program.blocks)
    for iteration in range(course.iterations + 1):
        losses.append(program.loss(state))
        if iteration == 3 * course.every:
            then = program.rows(state)[0].clone()
        if iteration == 4 * course.every and then is not None:
            drift = program.distance(program.rows(state)[0], then)
        program.iterate(state, iteration)
    return losses, drift


def skew(drift: Tensor) -> float:
    """Return the share of the squared drift in the eighth of the blocks with the largest drift."""
    squares = drift.double().square().sort(descending=True).values
    return float(squares[: math.ceil(len(squares) / 8)].sum() / squares.sum().clamp_min(1e-300))


def with_levels(course: ProgramRun, row: Row) -> ProgramRun:
    """Return the course with the levels and the window of its pilot."""
    return replace(course, levels=tuple(row["levels"]), last=row["kappas"][-1], window=row["window"])


def at_rate(course: ProgramRun, times: float) -> list[Row]:
    """Return a row with the final loss at a multiple of the program's learning rate; None if the loss diverges."""
    seed = int(course.chance("pilot", 0).integers(2**31))
    own: Any = course.make(seed)
    rate = times * (own.optimizer.rate if hasattr(own, "optimizer") else own.learning_rate)
    program = course.make(seed, learning_rate=rate)
    state, losses = program.start(), []
    for iteration in range(course.iterations):
        program.iterate(state, iteration)
        if iteration >= course.iterations - course.window:
            losses.append(program.loss(state))
    loss = float(np.mean(losses))
    row: Row = {"part": "rate", "status": MEASURED, "program": course.name, "rate": rate, "times": times}
    return [row | {"loss": loss if math.isfinite(loss) else None}]
