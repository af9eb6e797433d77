"""Shrinks a failing plan to the smallest that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from campaign import jobs
from campaign.attacks import KINDS
from campaign.plan import WATCHER, WORKER, Attack, Job, Plan

TRIES = 3
NEEDED = 2
"""So many of the tries must fail in the same way: times are not exact, and a plan may fail once by chance."""

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails, most: int = 60) -> Plan:
    """Return the smallest plan found that fails; it is the plan itself if nothing smaller does.

    Args:
        plan: A plan that fails.
        fails: Runs a plan once, and says whether it fails in the same way.
        most: How many smaller plans are tried at most.
    """
    tried = {plan.to_json()}
    while True:
        for smaller in smaller_plans(plan):
            if len(tried) > most:
                return plan
            if smaller.to_json() in tried:
                continue
            tried.add(smaller.to_json())
            if fails_again(smaller, fails):
                plan = smaller
                break
        else:
            return plan


def fails_again(plan: Plan, fails: Fails) -> bool:
    """Whether the plan fails in :data:`NEEDED` of at most :data:`TRIES` tries."""
    failed = 0
    for left in range(TRIES, 0, -1):
        if failed + left < NEEDED:
            return False
        failed += fails(plan)
        if failed >= NEEDED:
            return True
    return False


def smaller_plans(plan: Plan) -> Iterator[Plan]:
    """Yield smaller plans, those with fewer attacks first: each is simpler in one thing."""
    bare = replace(plan, seed=None)
    for number in range(len(plan.attacks)):
        yield bare.without(number)
    yield from (replace(bare, job=job) for job in _simpler_jobs(plan))
    for number, attack in enumerate(plan.attacks):
        for simpler in (*KINDS[attack.kind].simpler(attack), *_simpler_times(attack)):
            attacks = (*plan.attacks[:number], simpler, *plan.attacks[number + 1 :])
            yield replace(bare, attacks=attacks)


def _simpler_jobs(plan: Plan) -> Iterator[Job]:
    """Yield jobs with one value less, or with one value that is the default."""
    job = plan.job
    flipped = jobs.flipped_rank(job)
    ranks = [] if flipped is None else [flipped]
    ranks += [each.rank for each in plan.attacks if each.role in (WORKER, WATCHER) and each.rank is not None]
    for workers in range(max(2, 1 + max(ranks, default=0) - job.spares), job.workers):
        yield replace(job, workers=workers)
    for item in fields(Job):
        if item.name == "workers" or getattr(job, item.name) == item.default:
            continue
        simpler = replace(job, **{item.name: item.default})
        if item.name in ("guard", "flip"):  # without its guard a flip is no fault that is survived
            simpler = replace(job, guard=Job.guard, flip=Job.flip)
        if item.name == "fabric":  # other fabrics have other processes, and other options
            simpler = None if job.fabric == "virtual" or any(a.role == "mpirun" for a in plan.attacks) else simpler
        if item.name in ("model", "script"):
            simpler = replace(simpler, strategy=job.strategy if job.strategy != "partial" else "rollback")
        if simpler is not None and all(KINDS[each.kind].suits(simpler) for each in plan.attacks):
            yield simpler


def _simpler_times(attack: Attack) -> Iterator[Attack]:
    """Yield the attack at the beginning, and at rounder times."""
    if attack.since != "start":
        yield replace(attack, since="start")
    for digits in (-3, -2, -1, 0):
        if (rounded := round(attack.ms, digits)) != attack.ms:
            yield replace(attack, ms=rounded)
