"""Memory and processes that a control group limits, as in a container: the kernel ends a worker, or refuses to start one."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms import cgroups
from campaign.attacks.mechanisms.cgroups import ControlGroup
from campaign.attacks.mechanisms.kept import Kept
from campaign.plan import WORKER, Attack, Job

MB = 1 << 20
ROOM = 32 * MB
"""What a job may use beyond what it uses when the limit is set."""
EATER = """
import time
eaten = []
while True:
    eaten.append(bytearray(1 << 20))
    eaten[-1][::4096] = b"x" * 256
    time.sleep(0.002)
"""
_GROUPS: dict[str, Kept[ControlGroup]] = {"memory": Kept(), "pids": Kept()}


def put_in_group(launch: Launch, controller: str) -> ControlGroup:
    """Have a job start in a group of its own; return the group."""

    def make() -> ControlGroup:
        return launch.undo.enter_context(ControlGroup(controller, f"holdfast-{uuid.uuid4().hex[:8]}"))

    group, is_new = _GROUPS[controller].make(launch, make)
    if is_new:
        launch.words[:0] = group.prefix()
    return group


class OutOfMemory(Kind):
    """Something beside the workers takes memory until the kernel ends one: that worker, or the largest process."""

    name = "memory-oom"

    def missing(self) -> str:
        return cgroups.missing("memory")

    def draw(self, rng: random.Random, job: Job) -> Attack:
        victim = rng.choice(["", *(f"{WORKER} {rank}" for rank in range(job.workers))])
        victim = victim if job.fabric != "virtual" else ""
        return Attack(self.name, victim, **moment(rng, victim))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES if attack.victim else End.MAY_STOP

    def codes(self, attack: Attack) -> frozenset[int]:
        """The kernel may end the launcher, too: while a job begins, others of its processes may need the memory left."""
        return frozenset((-signal.SIGKILL,))

    def prepare(self, attack: Attack, launch: Launch) -> None:
        put_in_group(launch, "memory")

    def strike(self, attack: Attack, running: Running) -> bool:
        group = _GROUPS["memory"].get(running.launch)
        victim = running.processes.wait_for(attack.victim, running) if attack.victim else None
        if attack.victim and (victim is None or not _prefer(victim.pid)):
            return False
        before = group.struck()
        with eating(group) as eater:
            with contextlib.suppress(OSError):
                group.limit(group.used() + ROOM)
                while group.struck() == before and running.sleep(0.01):
                    pass
            struck = group.struck() - before
            if struck and eater.poll() is not None:  # the kernel ended what takes the memory instead
                struck -= 1
        group.limit(None)
        running.notes.append(f"the kernel ended {struck} processes for memory")
        return struck > 0

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if not attack.victim:
            yield replace(attack, victim=f"{WORKER} 0")


@contextlib.contextmanager
def eating(group: ControlGroup) -> Iterator[subprocess.Popen[bytes]]:
    """Have a process take memory in a group; it is too small for the kernel to choose it."""
    with subprocess.Popen([*group.prefix(), sys.executable, "-IS", "-c", EATER], stderr=subprocess.DEVNULL) as eater:
        try:
            yield eater
        finally:
            eater.kill()


def _prefer(pid: int) -> bool:
    """Have the kernel choose this process first; return whether it still exists."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    except OSError:
        return False
    return True


class LittleMemory(Kind):
    """The limit is too low from the start: what imports PyTorch is ended by the kernel."""

    name = "memory-too-small"
    weight = 0.3

    def missing(self) -> str:
        return cgroups.missing("memory")

    def suits(self, job: Job) -> bool:
        return job.fabric != "virtual"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        return Attack(self.name, values={"mb": rng.choice((60, 80, 110, 150, 250))}, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.REFUSES

    def acts_from_start(self, attack: Attack) -> bool:
        return True

    def codes(self, attack: Attack) -> frozenset[int]:
        return frozenset((-signal.SIGKILL, 93))  # 93: no worker gets through its start, so no restart commits a step

    def prepare(self, attack: Attack, launch: Launch) -> None:
        put_in_group(launch, "memory").limit(attack.values["mb"] * MB)

    def strike(self, attack: Attack, running: Running) -> bool:
        group = _GROUPS["memory"].get(running.launch)
        while group.struck() == 0 and running.sleep(0.05):
            pass
        running.notes.append(f"{group.struck()} processes ended for memory, {attack.values['mb']} MB")
        return group.struck() > 0

    def repair(self, attack: Attack, launch: Launch) -> None:
        _GROUPS["memory"].get(launch).limit(None)


class FewProcesses(Kind):
    """No process and no thread can be started beyond those that there are, for a while or from the first on."""

    name = "process-limit"
    weight = 0.5

    def missing(self) -> str:
        return cgroups.missing("pids")

    def draw(self, rng: random.Random, job: Job) -> Attack:
        at = moment(rng)
        most = rng.choice((1, 2, 3, 5, 8, 12)) if at["since"] == "start" and rng.random() < 0.5 else 0
        return Attack(self.name, values={"most": most, "lasts_s": 0 if most else rng.choice((1.0, 5.0))}, **at)

    def end(self, attack: Attack, job: Job) -> End:
        return End.REFUSES if attack.values["most"] or attack.since == "start" else End.MAY_STOP

    def acts_from_start(self, attack: Attack) -> bool:
        return bool(attack.values["most"])

    def prepare(self, attack: Attack, launch: Launch) -> None:
        group = put_in_group(launch, "pids")
        if attack.values["most"]:
            group.limit(attack.values["most"])

    def strike(self, attack: Attack, running: Running) -> bool:
        group, before = _GROUPS["pids"].get(running.launch), 0
        if attack.values["most"]:
            while group.struck() == 0 and running.sleep(0.05):
                pass
        else:
            before = group.struck()
            group.limit(max(1, group.used()))
            running.sleep(attack.values["lasts_s"])
            group.limit(None)
        struck = group.struck() - before
        running.notes.append(f"{struck} times no process could be started")
        return struck > 0

    def repair(self, attack: Attack, launch: Launch) -> None:
        _GROUPS["pids"].get(launch).limit(None)

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["most"] > 1:
            yield replace(attack, values={**attack.values, "most": 1})


KINDS: tuple[Kind, ...] = (OutOfMemory(), LittleMemory(), FewProcesses())
