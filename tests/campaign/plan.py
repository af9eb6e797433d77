"""Plans: a job, and what attacks it. A plan is one line of JSON, so that a shrunk one can be run again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

WORKER, WATCHER = "worker", "watcher"
LAUNCHER, MPIRUN, FORK_SERVER = "launcher", "mpirun", "fork server"
AGENT = "agent"
"""What reaches another host, as ssh does."""


@dataclass(frozen=True)
class Job:
    """A job of ``holdfast run``; the defaults are the simplest one.

    Args:
        script: "session", the loop of Holdfast; "ddp", an unmodified script of DistributedDataParallel.
        model: A model of the reference, "pipeline" or "sharded".
        optimizer: An optimizer of the reference.
        workers: Number of workers.
        fabric: "gloo", "ulfm" or "virtual".
        strategy: As of ``--strategy``.
        spares: Number of spares.
        respawn: Whether failed workers are replaced.
        every: Steps between checkpoints; 0: none are written.
        guard: As of ``--guard``.
        flip: A fault that the job injects into itself, as of ``--inject``; "" for none.
        pause_ms: Time before each step, so that attacks have time to hit it.
        preload: Whether workers are forked from a process that has imported torch.
    """

    script: str = "session"
    model: str = "mlp"
    optimizer: str = "sgd"
    workers: int = 2
    fabric: str = "gloo"
    strategy: str = "rollback"
    spares: int = 0
    respawn: bool = False
    every: int = 2
    guard: str = "stop"
    flip: str = ""
    pause_ms: int = 50
    preload: bool = True


@dataclass(frozen=True)
class Attack:
    """Something that is done to a job from outside.

    Args:
        kind: Name of a :class:`campaign.attacks.base.Kind`.
        victim: What is attacked: "worker 1", "watcher 1", "launcher", "mpirun", "fork server", "agent", or "" for
            the job.
        since: From when the time counts: "start" of the launcher; "exists": the victim exists; "commit 3": that many
            steps are committed; "landed": the attack before it in the plan has struck; of the first, the launcher's start.
        ms: Milliseconds after that. If the victim does not exist yet, it is attacked as soon as it does.
        values: What else the kind needs, as JSON values.
    """

    kind: str
    victim: str = ""
    since: str = "start"
    ms: float = 0
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The victim without its number."""
        return self.victim.rstrip("0123456789 ")

    @property
    def rank(self) -> int | None:
        """The number of the victim, None if it has none."""
        word = self.victim.rpartition(" ")[2]
        return int(word) if word.isdecimal() else None

    def __str__(self) -> str:
        values = "".join(f" {name}={value}" for name, value in self.values.items())
        since = "the attack before" if self.since == "landed" else self.since
        at = f"{self.ms:g} ms old" if since == "exists" else f"{self.ms:g} ms after {since}"
        return f"{self.kind}{values} to {self.victim or 'the job'} {at}"


@dataclass(frozen=True)
class Plan:
    """A job and what attacks it; ``seed`` is None for a plan that was not drawn, such as a shrunk one."""

    job: Job
    attacks: tuple[Attack, ...]
    seed: int | None = None

    def to_json(self) -> str:
        """One line, without what has its default."""
        job = {f.name: getattr(self.job, f.name) for f in fields(Job) if getattr(self.job, f.name) != f.default}
        attacks = [{k: v for k, v in asdict(each).items() if v or k == "kind"} for each in self.attacks]
        found = {"job": job, "attacks": attacks} | ({} if self.seed is None else {"seed": self.seed})
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            ValueError: if it is none; the message says what is wrong.
        """
        try:
            found = json.loads(text)
            attacks = tuple(Attack(**each) for each in found["attacks"])
            return cls(Job(**found["job"]), attacks, found.get("seed"))
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            msg = f"not a plan: {text[:200]!r}: {error}"
            raise ValueError(msg) from None

    def without(self, number: int) -> Plan:
        """The plan without one of its attacks."""
        return replace(self, attacks=self.attacks[:number] + self.attacks[number + 1 :], seed=None)
