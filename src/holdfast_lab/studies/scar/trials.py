"""A trial: one run, one failure, and the continuation under every policy, all with the same randomness.

Until the failure every policy shares the failure-free run, so it is computed only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from holdfast.checkpoint.priority import PriorityPolicy, RunningCheckpoint
from holdfast.checkpoint.priority_codec import coded_bytes
from holdfast.tools.iteration_cost import iteration_cost
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.scar.kappa import kappa
from holdfast_lab.studies.scar.policies import LEAST, NODES, ScarPolicy
from holdfast_lab.studies.scar.restore import WAYS, RestoredRun, RestoreScene, Rows
from holdfast_lab.workloads.iterative.base import Program, State

KINDS_OF_TRIALS = ("main", "late", "rehearsal", "several", "pilot")
"""Kinds of trials, which share no randomness; in late trials, nodes fail after the first full save."""
TOO_SOON = "the failure-free run reached the last level before all failures, or never"
Policies = Callable[[Program], Sequence[ScarPolicy]]
_SLOTS = 16
"""Number of past saves that hindsight may choose from: twice the number that saves all blocks."""
_CAP = 4
"""A run is stopped, and counted as censored, after so many times the iterations of the failure-free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """The settings of a program in trials.

    Args:
        name: Its name in rows and on the page.
        make: Creates the program from a seed, with the same data for every seed; accepts another ``learning_rate`` if
            the program has one.
        every: C, iterations per full save.
        window: Window of the trailing mean of the loss in iterations.
        iterations: Iterations of the pilot run, which reaches the last level.
        seed: Seed of all random draws.
        levels: Levels of the loss, descending; empty before the pilot.
        last: Iterations at which the pilot reached the last level.
    """

    name: str
    make: Callable[..., Program]
    every: int
    window: int
    iterations: int
    seed: int = 0
    levels: tuple[float, ...] = ()
    last: float = 0.0

    def chance(self, kind: str, number: int) -> np.random.Generator:
        """Return the random generator of a trial, a function of the seed, the kind of trials and the number alone."""
        return np.random.default_rng([self.seed, KINDS_OF_TRIALS.index(kind), number])

    @property
    def limit(self) -> int:
        """Return the number of iterations after which a run is stopped."""
        return math.ceil(_CAP * self.last)


# -- a run


def run_on(program: Program, state: State, losses: list[float], course: ProgramRun) -> None:
    """Continue a run until the trailing mean of the loss reaches the last level, or the run is stopped.

    Args:
        program: The program.
        state: The state before iteration ``len(losses) - 1``; modified in place.
        losses: Losses so far, that of ``state`` last; further losses are appended.
        course: The settings with the last level and the limit.
    """
    while len(losses) <= course.limit and np.mean(losses[-course.window :]) > course.levels[-1]:
        program.iterate(state, len(losses) - 1)
        losses.append(program.loss(state))


def running_for(
    program: Program, state: State, start: Rows, policy: ScarPolicy, course: ProgramRun, seed: int
) -> RunningCheckpoint | None:
    """Return the checkpoint of a policy, None if it saves nothing; ``state`` is the live state that it will save."""
    if policy.saves == "nothing":
        return None
    rows = saved_rows(program, start, policy)
    sizes = _sizes(program, start, policy)
    share = float(sizes.sum()) / float(program.block_bytes.sum())
    if policy.fraction == 1 and policy.codec != "exact":
        share *= _shrinks(
            rows, policy.codec
        )  # a smaller full save cannot take more blocks, but it can be more frequent
    every = max(1, math.ceil(course.every * share))
    saving = PriorityPolicy(
        every=every,
        fraction=max(policy.fraction, 1 / every),
        choice=policy.choice,
        predictor=policy.predictor,
        codec=policy.codec,
        seed=seed,
    )
    distance = program.distance if policy.distance == "own" else _likelihood_lost(program, state)
    return RunningCheckpoint(rows, saving, block_bytes=sizes, distance=distance)


def _likelihood_lost(program: Any, state: State) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a metric: the change of each document's log-likelihood if it were replaced by its saved value."""

    def distance(_: Tensor, saved: Tensor) -> Tensor:
        changed = program.log_likelihoods(state) - program.log_likelihoods(state, saved)
        return cast("Tensor", changed).abs()

    return distance


def saved_rows(program: Program, rows: Rows, policy: ScarPolicy) -> Rows:
    """Return the rows that a policy saves."""
    if policy.saves == "parameters":
        return rows[:1]
    if policy.saves == "live":
        assert program.live is not None
        return tuple(row[program.live] for row in rows)
    return rows


def _sizes(program: Program, start: Rows, policy: ScarPolicy) -> Tensor:
    if policy.saves == "parameters":
        widths = [coded_bytes(row, "exact") for row in start]
        return program.block_bytes * widths[0] // sum(widths)
    if policy.saves == "live":
        assert program.live is not None
        return program.block_bytes[program.live]
    return program.block_bytes


def _shrinks(rows: Rows, codec: str) -> float:
    return sum(coded_bytes(row, codec) for row in rows) / sum(coded_bytes(row, "exact") for row in rows)


class FollowedRun:
    """A run with the checkpoints of several policies.

    Args:
        program: The program.
        policies: The policies to keep checkpoints for.
        course: The settings with the save interval.
        seed: Seed of random choices of blocks.
    """

    def __init__(self, program: Program, policies: Sequence[ScarPolicy], course: ProgramRun, seed: int) -> None:
        self.program, self.course = program, course
        self.state = program.start()
        self.start: Rows = tuple(row.clone() for row in program.rows(self.state))
        self._checkpoints: dict[Any, tuple[ScarPolicy, RunningCheckpoint | None]] = {}
        for policy in policies:
            if policy.saving not in self._checkpoints:
                self._checkpoints[policy.saving] = (
                    policy,
                    running_for(program, self.state, self.start, policy, course, seed),
                )
        self.bytes = dict.fromkeys(self._checkpoints, 0.0)
        self._remembers = any(policy.restore.startswith("hindsight") for policy in policies)
        self.history: list[tuple[int, Rows]] = [(0, self.start)]
        self.iteration = 0

    def advance(self, until: int) -> None:
        """Iterate up to ``until`` iterations in total, and write the checkpoints that are due."""
        for iteration in range(self.iteration, until):
            self.program.iterate(self.state, iteration)
            self._save(iteration + 1)
        self.iteration = until

    def _save(self, step: int) -> None:
        rows = self.program.rows(self.state)
        for key, (policy, running) in self._checkpoints.items():
            if running is not None and running.is_due(step):
                saved = running.save(saved_rows(self.program, rows, policy), step)
                sizes, shrinks = _sizes(self.program, self.start, policy), _shrinks(rows, policy.codec)
                self.bytes[key] += float(sizes[saved.blocks].sum()) * shrinks
        if self._remembers and step % max(1, round(LEAST * self.course.every)) == 0:
            self.history.append((step, tuple(row.clone() for row in rows)))
            del self.history[1:-_SLOTS]

    def restored(self, policy: ScarPolicy, lost: Tensor, reseeded: Callable[[], Program]) -> RestoredRun:
        """Return the state with which a policy continues if blocks are lost now."""
        period = max(1, round(LEAST * self.course.every))
        scene = RestoreScene(
            program=self.program,
            state=self.state,
            iteration=self.iteration,
            lost=lost,
            start=self.start,
            running=self._checkpoints[policy.saving][1],
            history=self.history,
            room_bytes=float(self.program.block_bytes.sum()) * period / self.course.every,
            reseeded=reseeded,
        )
        return WAYS[policy.restore](scene)


# -- trials


def trial(course: ProgramRun, kind: str, number: int, policies: Policies) -> list[Row]:
    """Return a row for each policy with the cost of one failure.

    Args:
        course: Settings of the program, with levels.
        kind: One of :data:`KINDS_OF_TRIALS`.
        number: Number of the trial.
        policies: Returns the policies to compare for a program.
    """
    chance = course.chance(kind, number)
    seed, other_seed = (int(drawn) for drawn in chance.integers(2**31, size=2))
    program = course.make(seed)
    undisturbed = undisturbed_losses(program, course)
    about: Row = {"part": "trial", "kind": kind, "program": course.name, "trial": number}
    failure = failure_at(chance, course, undisturbed, least=course.every if kind == "late" else 1)
    if failure is None:
        return [about | {"status": NOT_RUN, "why": TOO_SOON}]
    order = torch.from_numpy(chance.permutation(program.blocks))
    compared = policies(program)
    followed = FollowedRun(program, compared, course, seed)
    followed.advance(failure)
    rows = []
    for policy in compared:
        lost = lost_of(order, policy.nodes)
        restored = followed.restored(policy, lost, lambda: course.make(other_seed))
        error = distance_of(program, restored.state, followed.state)
        losses = [*undisturbed[:failure], restored.program.loss(restored.state)]
        run_on(restored.program, restored.state, losses, course)
        rows.append(
            about
            | {"status": MEASURED, "policy": policy.name, "failure": failure, "late": failure >= course.every}
            | _cost(course, losses, undisturbed, failure, restored.work)
            | {"error": error, "bytes": followed.bytes[policy.saving] / failure}
        )
    return rows


def undisturbed_losses(program: Program, course: ProgramRun) -> list[float]:
    """Return the losses of the failure-free run until their trailing mean reaches the last level."""
    state = program.start()
    losses = [program.loss(state)]
    run_on(program, state, losses, course)
    return losses


def failure_at(
    chance: np.random.Generator, course: ProgramRun, undisturbed: Sequence[float], least: int = 1
) -> int | None:
    """Return the iteration after which nodes fail: geometric, redrawn until it is before the last level is reached.

    Args:
        chance: The random generator.
        course: Settings with levels.
        undisturbed: Losses of the failure-free run.
        least: Smallest allowed iteration; earlier ones are redrawn, too.

    Returns:
        The iteration, None if there is none in that range, or if the last level is never reached.
    """
    last = kappa(undisturbed, course.levels[-1], course.window)
    if not least < last < math.inf:
        return None
    while True:
        failure = int(chance.geometric(min(1.0, 2 / course.last)))
        if least <= failure < last:
            return failure


def lost_of(order: Tensor, nodes: int) -> Tensor:
    """Return the blocks lost if ``nodes`` of :data:`NODES` fail, given a random order; at least one if any fails."""
    return order[: max(len(order) * nodes // NODES, min(nodes, 1))]


def distance_of(program: Program, a: State, b: State) -> float:
    """Return the distance between two states: the root of the sum of squares over the blocks."""
    return float(program.distance(program.rows(a)[0], program.rows(b)[0]).double().norm())


def _cost(course: ProgramRun, losses: list[float], undisturbed: list[float], failure: int, work: float) -> Row:
    # Levels reached before the failure contain no information about its cost.
    ahead = [level for level in course.levels if kappa(undisturbed, level, course.window) > failure]
    cost = iteration_cost(losses, undisturbed, ahead, course.window)
    return {"cost": cost.iterations + work, "censored": cost.censored, "levels": len(ahead)}


def trial_of_several(course: ProgramRun, number: int, policies: Policies, failures: int) -> list[Row]:
    """Return a row for each policy with the cost of several failures in one run.

    Args:
        course: Settings of the program, with levels.
        number: Number of the trial.
        policies: Returns the policies to compare for a program.
        failures: Number of failures.
    """
    chance = course.chance("several", number)
    seed, other_seed = (int(drawn) for drawn in chance.integers(2**31, size=2))
    program = course.make(seed)
    undisturbed = undisturbed_losses(program, course)
    about: Row = {"part": "several", "kind": "several", "program": course.name, "trial": number, "failures": failures}
    drawn = [failure_at(chance, course, undisturbed) for _ in range(failures)]
    times = sorted(failure for failure in drawn if failure is not None)
    if len(times) < failures:
        return [about | {"status": NOT_RUN, "why": TOO_SOON}]
    orders = [torch.from_numpy(chance.permutation(program.blocks)) for _ in times]
    rows = []
    for policy in policies(program):
        followed = FollowedRun(program, [policy], course, seed)
        losses = [program.loss(followed.state)]
        for failure, order in zip(times, orders, strict=True):
            while followed.iteration < failure:
                followed.advance(followed.iteration + 1)
                losses.append(program.loss(followed.state))
            lost = lost_of(order, policy.nodes)
            restored = followed.restored(policy, lost, lambda: course.make(other_seed))
            for name, tensor in restored.state.items():  # in place, because the checkpoint refers to this state
                followed.state[name].copy_(tensor)
            losses[-1] = program.loss(followed.state)
        run_on(program, followed.state, losses, course)
        rows.append(
            about
            | {"status": MEASURED, "policy": policy.name, "failure": times[0], "late": times[0] >= course.every}
            | _cost(course, losses, undisturbed, times[0], 0.0)
        )
    return rows
