"""Draws plans: each is determined by its seed."""

from __future__ import annotations

import random
from dataclasses import replace

from campaign.attacks import KINDS
from campaign.attacks.base import Kind
from campaign.jobs import SPLIT
from campaign.plan import Attack, Job, Plan

COUNTS = (1,) * 9 + (2,) * 6 + (3,) * 3 + (4,) * 2
"""Numbers of attacks."""


def draw(seed: int, kinds: frozenset[str] | None = None) -> Plan:
    """Return the plan of a seed, with attacks of these kinds only; None: all.

    With other kinds a seed has another plan. A campaign draws from what the machine can do, so seeds are comparable
    between machines only if these can do the same; the JSON of a plan is the same everywhere.

    Raises:
        ValueError: if there are no kinds.
    """
    if kinds is not None and not kinds:
        msg = "there is no kind of attack to draw from"
        raise ValueError(msg)
    rng = random.Random(f"campaign {seed}")
    job = draw_job(rng)
    attacks = []
    for _ in range(rng.choice(COUNTS)):
        usable = [kind for name, kind in sorted(KINDS.items()) if (kinds is None or name in kinds) and kind.suits(job)]
        usable = [kind for kind in usable if not any(_conflict(kind, KINDS[each.kind]) for each in attacks)]
        if not usable:
            break
        kind = rng.choices(usable, [each.weight for each in usable])[0]
        attacks.append(kind.draw(rng, job))
        job = kind.adjust(attacks[-1], job)
        attacks += kind.also(rng, attacks[-1], job)
    return Plan(job, tuple(attacks), seed)


def _conflict(kind: Kind, other: Kind) -> bool:
    """Whether the kinds are of two families that replace, or need, the same of a job."""
    return bool(kind.takes & other.takes) and type(kind).__module__ != type(other).__module__


def draw_job(rng: random.Random) -> Job:
    """Return a job."""
    fabric = rng.choice(("gloo",) * 5 + ("ulfm",) * 5 + ("virtual",))
    script = rng.choice(("session",) * 7 + ("prepared", "ddp")) if fabric != "virtual" else "session"
    job = Job(
        script=script,
        model=rng.choice(("mlp", "mlp", "mlp", "cnn", *SPLIT)) if script == "session" else "mlp",
        optimizer=rng.choice(("sgd", "adam")),
        workers=rng.choice((2, 2, 3, 3, 3, 4)),
        fabric=fabric,
        spares=rng.choice((0, 0, 0, 1)) if fabric != "virtual" else 0,
        respawn=fabric == "gloo" and rng.random() < 0.3,
        every=rng.choice((1, 2, 2, 5)),
        pause_ms=rng.choice((20, 50, 100)),
        preload=rng.random() < 0.85,
    )
    if script == "session":
        job = replace(job, strategy=_strategy(rng, job))
    if script == "session" and job.model not in SPLIT and job.strategy == "rollback" and rng.random() < 0.15:
        target = rng.choice(("weights", "optimizer"))
        flip = f"flip:rank={rng.randrange(job.workers)},step={rng.randrange(2, 10)},target={target}"
        job = replace(job, guard="heal", flip=flip)
    return job


def _strategy(rng: random.Random, job: Job) -> str:
    if job.model in SPLIT:
        return rng.choice(("rollback", "rollback", "rollback", "reinit", "partial"))
    return rng.choice(("rollback", "rollback", "rollback", "rollback", "restart", "restart", "reinit", "forward"))


def what_lacks(attack: Attack) -> str:
    """What an attack lacks to be one of its kind, as a plan that was not drawn may; "" if it has all."""
    drawn = [KINDS[attack.kind].draw(random.Random(seed), Job()) for seed in range(20)]
    needed = set.intersection(*(set(each.values) for each in drawn))
    lacks = [f"values.{name}" for name in sorted(needed - set(attack.values))]
    lacks += ["victim"] if not attack.victim and all(each.victim for each in drawn) else []
    return ", ".join(lacks)
