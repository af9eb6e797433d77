"""Draws fault plans for soak tests from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from holdfast.errors import refuse
from holdfast.faults.plan import PHASES, STUCK, Fault, FaultPlan


def draw_plan(
    seed: int,
    workers: int,
    steps: int,
    kills: int,
    num_buckets: int,
    *,
    kinds: Sequence[str] = ("kill",),
    newcomers: int = 0,
) -> FaultPlan:
    """Draw a plan for a soak test: faults in any phase, alone, in sequence and several at once.

    No rank gets two faults, and at least one of the initial ranks gets none. A fault may never happen: one in
    ``checkpoint`` needs its rank to write a checkpoint then, and one in ``rejoin`` needs a newcomer.

    Args:
        seed: Same seed, same plan.
        workers: The job has the ranks 0 to ``workers - 1``.
        steps: The job has the steps 0 to ``steps - 1``.
        kills: Number of ranks with a fault, less than ``workers``.
        num_buckets: Buckets of a step.
        kinds: Kinds of :data:`~holdfast.faults.plan.OF_WORKERS` to choose from; one that is listed twice is twice as
            frequent.
        newcomers: Ranks from ``workers`` on that may join later; about half of them get a fault, too.

    Raises:
        ConfigError: if a number is out of range, or a kind is unknown.
    """
    if not kinds:
        refuse("kinds must name at least one kind")
    for name, value, least in (("workers", workers, 1), ("steps", steps, 1), ("num_buckets", num_buckets, 1)):
        if value < least:
            refuse(f"{name} must be at least {least}, got {value}")
    if not 0 <= kills < workers:
        refuse(f"kills must be from 0 to {workers - 1}, so that one of {workers} workers is left, got {kills}")
    rng = random.Random(seed)
    faults: list[Fault] = []
    victims = rng.sample(range(workers), kills)
    victims += [rank for rank in range(workers, workers + newcomers) if rng.random() < 0.5]
    phases = PHASES if newcomers else tuple(phase for phase in PHASES if phase != "rejoin")
    for rank in victims:
        fault = _draw(rng, rank, steps, num_buckets, phases, faults[-1] if faults else None)
        faults.append(fault if tuple(kinds) == ("kill",) else _of_some_kind(rng, fault, kinds))
    return FaultPlan(tuple(faults), seed)


def _draw(
    rng: random.Random, rank: int, steps: int, num_buckets: int, phases: Sequence[str], last: Fault | None
) -> Fault:
    if last is not None and rng.random() < 0.4:
        # With the previous fault: in the same phase, in another, or during the recovery from it.
        step, phase = last.step, rng.choice((last.phase, "recovery", rng.choice(phases)))
    else:
        # A step in which no other rank fails has no recovery.
        step, phase = rng.randrange(steps), rng.choice([p for p in phases if p != "recovery"])
    bucket = rng.choice((None, *range(num_buckets))) if phase == "allreduce" else None
    return Fault("kill", rank, step, phase, bucket)


def _of_some_kind(rng: random.Random, fault: Fault, kinds: Sequence[str]) -> Fault:
    """Return ``fault`` with a kind of ``kinds``; a rank that gets stuck usually stays stuck."""
    kind = rng.choice(kinds)
    if kind == "slow":
        return replace(fault, kind=kind, seconds=rng.choice((0.2, 1.0)))
    return replace(fault, kind=kind, seconds=rng.choice((None, None, 0.2)) if kind in STUCK else None)
