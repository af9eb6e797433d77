"""Drawing faults from a seed: plans for soak tests, and when random workers die."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.faults.kinds import PHASES, STUCK, Fault
from holdfast.faults.reading import refuse


def draw_faults(
    seed: int,
    workers: int,
    steps: int,
    kills: int,
    num_buckets: int,
    *,
    kinds: Sequence[str] = ("kill",),
    newcomers: int = 0,
) -> tuple[Fault, ...]:
    """Draw faults for a soak test; see :meth:`holdfast.faults.plan.FaultPlan.random`.

    Raises:
        ConfigError: if a number is out of range, or there is no such kind.
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
    return tuple(faults)


def _draw(
    rng: random.Random, rank: int, steps: int, num_buckets: int, phases: Sequence[str], last: Fault | None
) -> Fault:
    if last is not None and rng.random() < 0.4:
        # With the one before: in the same phase, in another, or while the others recover from it.
        step, phase = last.step, rng.choice((last.phase, "recovery", rng.choice(phases)))
    else:
        # Nobody recovers in a step in which nobody else dies.
        step, phase = rng.randrange(steps), rng.choice([p for p in phases if p != "recovery"])
    bucket = rng.choice((None, *range(num_buckets))) if phase == "allreduce" else None
    return Fault("kill", rank, step, phase, bucket)


def _of_some_kind(rng: random.Random, fault: Fault, kinds: Sequence[str]) -> Fault:
    """Return ``fault`` with a kind of ``kinds``; who gets stuck mostly stays so."""
    kind = rng.choice(kinds)
    if kind == "slow":
        return replace(fault, kind=kind, seconds=rng.choice((0.2, 1.0)))
    return replace(fault, kind=kind, seconds=rng.choice((None, None, 0.2)) if kind in STUCK else None)


def mtbf_schedule(mtbf_s: float, seed: int, workers: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Draw when workers die and which: exponential times, a victim chosen evenly among those alive.

    Args:
        mtbf_s: Mean time between failures of the *whole job*, seconds, more than 0. It stays the same
            while the job shrinks.
        seed: Same seed, same schedule.
        workers: The ranks of the job; one of them is spared.

    Returns:
        Seconds since the start, growing, and the victim.

    Raises:
        ConfigError: if ``mtbf_s`` is not a positive number, or a rank is there twice.
    """
    if not (math.isfinite(mtbf_s) and mtbf_s > 0):
        refuse(f"mtbf_s must be more than 0 and finite, got {mtbf_s}")
    if len(set(workers)) != len(workers):
        refuse(f"workers must be different ranks, got {list(workers)}")
    return _draw_deaths(mtbf_s, random.Random(seed), sorted(workers))


def _draw_deaths(mtbf_s: float, rng: random.Random, alive: list[int]) -> Iterator[tuple[float, int]]:
    now_s = 0.0
    while len(alive) > 1:
        now_s += rng.expovariate(1 / mtbf_s)
        yield now_s, alive.pop(rng.randrange(len(alive)))
