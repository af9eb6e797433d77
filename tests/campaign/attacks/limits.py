"""Limits of the kernel on the processes of a job: open files, memory, file size, processor time, processes."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Iterable
from dataclasses import replace

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.plan import LAUNCHER, WORKER, Attack, Job

MB = 1 << 20
AT_START = {
    "nofile": (8, 16, 24, 32, 48, 64, 96, 128, 256),
    "as": tuple(size * MB for size in (64, 256, 512, 1024, 2048, 3072, 6144)),
    "fsize": (4096, 65536, MB),  # below, the file with the output of the launcher could not say why it ends
    "stack": (64 << 10, 512 << 10, 8 * MB),
    "nproc": (1, 8, 32),
    "memlock": (0,),
    "core": (0,),
}
"""Values of a limit from the start on; some are enough."""
LATER = {"nofile": (0, 4, 12, 40), "as": (0, 64 * MB), "fsize": (0, 512, 65536), "cpu": (1,)}
"""Values of a limit of a running process; of files and memory, beyond what it has."""

FAIL_IMPORTS = ("as", "nofile", "stack", "nproc")
"""Limits by which the script's own imports may fail."""


class StartLimit(Kind):
    """A limit from the launcher's start on, which all of the job inherits."""

    name = "limit-at-start"
    weight = 1.5

    def draw(self, rng: random.Random, job: Job) -> Attack:
        limit = rng.choice([name for name in AT_START if name != "nproc" or os.getuid()])  # root has none of processes
        return Attack(self.name, values={"limit": limit, "value": rng.choice(AT_START[limit])})

    def end(self, attack: Attack, job: Job) -> End:
        return End.REFUSES

    def acts_from_start(self, attack: Attack) -> bool:
        return True

    def codes(self, attack: Attack) -> frozenset[int]:
        """Without a stack, Python itself crashes before the launcher begins."""
        return frozenset((-signal.SIGSEGV,)) if attack.values["limit"] == "stack" else frozenset()

    def fails_script(self, attack: Attack) -> bool:
        return attack.values["limit"] in FAIL_IMPORTS

    def prepare(self, attack: Attack, launch: Launch) -> None:
        others = [int(word.rpartition("=")[2]) for word in launch.words if word.startswith(_option(attack))]
        if others and min(others) <= attack.values["value"]:  # two attacks of a plan; a limit cannot be raised again
            return
        at = launch.words.index("holdfast") - 2  # before Python: what other attacks put before it needs files, too
        launch.words[at:at] = _prefix(attack)

    def strike(self, attack: Attack, running: Running) -> bool:
        """Wait until a process of the job has the limit; it may have ended by it before that was seen."""
        while not (has_it := any(_has(attack, process.pid) for process in running.processes.all())):
            if not running.sleep(0.02):
                break
        running.notes.append(f"{attack.values['limit']} limited to {attack.values['value']}")
        is_new = not _has(attack, os.getpid())  # the campaign has no limit, or another
        return is_new and (has_it or running.process.returncode != 0)

    def repair(self, attack: Attack, launch: Launch) -> None:
        prefix = _prefix(attack)
        found = [i for i in range(len(launch.words)) if launch.words[i : i + len(prefix)] == prefix]
        for at in found[:1]:
            del launch.words[at : at + len(prefix)]

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        values = AT_START[attack.values["limit"]]
        larger = [value for value in values if value > attack.values["value"]]
        return [replace(attack, values={**attack.values, "value": value}) for value in reversed(larger)]


class LaterLimit(Kind):
    """A limit that a running process gets from outside."""

    name = "limit"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        victims = [LAUNCHER] if job.fabric == "virtual" else [LAUNCHER, *[f"{WORKER} {i}" for i in range(job.workers)]]
        victim = rng.choice(victims)
        # The launcher prints into a file, which would have the limit, too: it could not say why it ends.
        limit = rng.choice([name for name in sorted(LATER) if victim != LAUNCHER or name != "fsize"])
        values = {"limit": limit, "value": rng.choice(LATER[limit])}
        return Attack(self.name, victim, values=values, **moment(rng, victim))

    def end(self, attack: Attack, job: Job) -> End:
        return End.MAY_STOP

    def codes(self, attack: Attack) -> frozenset[int]:
        is_ended = attack.role == LAUNCHER and attack.values["limit"] == "cpu"
        return frozenset((-signal.SIGKILL, -signal.SIGXCPU)) if is_ended else frozenset()

    def fails_script(self, attack: Attack) -> bool:
        return attack.values["limit"] in FAIL_IMPORTS

    def strike(self, attack: Attack, running: Running) -> bool:
        process = running.processes.wait_for(attack.victim, running)
        if process is None:
            return False
        limit, value = attack.values["limit"], attack.values["value"]
        try:
            value += {"nofile": _highest_file, "as": _address_space}.get(limit, lambda pid: 0)(process.pid)
            resource.prlimit(process.pid, getattr(resource, f"RLIMIT_{limit.upper()}"), (value, value))
        except OSError:  # it has just ended
            return False
        running.notes.append(f"{limit} of {attack.victim} limited to {value}")
        return True


def _option(attack: Attack) -> str:
    return f"--{attack.values['limit']}="


def _prefix(attack: Attack) -> list[str]:
    return ["prlimit", f"{_option(attack)}{attack.values['value']}"]


def _has(attack: Attack, pid: int) -> bool:
    """Whether a process has the limit of the attack."""
    try:
        soft, _ = resource.prlimit(pid, getattr(resource, f"RLIMIT_{attack.values['limit'].upper()}"))
    except OSError:  # it has just ended
        return False
    return bool(soft == attack.values["value"])


def _highest_file(pid: int) -> int:
    return 1 + max((int(name) for name in os.listdir(f"/proc/{pid}/fd")), default=0)


def _address_space(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


KINDS: tuple[Kind, ...] = (StartLimit(), LaterLimit())
