"""Signals of every kind to any process of a job."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable
from dataclasses import replace

from campaign.attacks.base import End, Kind, Running, moment
from campaign.plan import FORK_SERVER, LAUNCHER, MPIRUN, WATCHER, WORKER, Attack, Job
from holdfast.cli import INTERRUPTED

OFTEN = ("SIGKILL",) * 8 + ("SIGSTOP",) * 4 + ("SIGTERM",) * 3 + ("SIGINT",) * 2
HARMLESS = {"SIGCHLD", "SIGURG", "SIGWINCH", "SIGCONT"}
"""Ignored by default."""
FREEZES = {"SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
ALL = sorted({each.name for each in signal.Signals} - {"SIGCLD", "SIGPOLL", "SIGIOT"})
THAWS_S = (0.0, 0.2, 1.0, 3.0)


class Signal(Kind):
    """A signal to one process; one that is stopped may continue after a while."""

    name = "signal"
    weight = 6.0

    def draw(self, rng: random.Random, job: Job) -> Attack:
        number = rng.randrange(job.workers + job.spares)
        victims = [f"{WORKER} {number}"] * 6 + [f"{WATCHER} {number}"] * 3 + [LAUNCHER] * 4
        victims += [MPIRUN] * 3 if job.fabric == "ulfm" else []
        victims += [FORK_SERVER] * 2 if job.preload else []
        victim = rng.choice([LAUNCHER] if job.fabric == "virtual" else victims)
        values = {"signal": rng.choice((rng.choice(OFTEN), rng.choice(OFTEN), rng.choice(ALL)))}
        if values["signal"] in FREEZES:
            # Nothing watches a launcher or a fork server from outside: they must continue some time.
            thaws = THAWS_S if victim.startswith((WORKER, WATCHER)) else THAWS_S[1:]
            values["thaw_s"] = rng.choice(thaws)
        return Attack(self.name, victim, values=values, **moment(rng, victim))

    def end(self, attack: Attack, job: Job) -> End:
        if attack.values["signal"] in HARMLESS or attack.role == FORK_SERVER:
            return End.SURVIVES
        if attack.role == LAUNCHER:
            return End.SURVIVES if attack.values.get("thaw_s") else End.MAY_STOP
        if attack.role == WORKER and attack.values["signal"] == "SIGINT":
            return End.MAY_STOP  # in a script this is KeyboardInterrupt, an error of the script like others
        # SIGTERM to mpirun itself ends the job; its death may, too.
        return End.MAY_STOP if attack.role == MPIRUN else End.SURVIVES

    def codes(self, attack: Attack) -> frozenset[int]:
        if attack.role != LAUNCHER:
            return frozenset()
        number = signal.Signals[attack.values["signal"]]
        return frozenset((-number, INTERRUPTED) if number == signal.SIGINT else (-number,))

    def strike(self, attack: Attack, running: Running) -> bool:
        number = signal.Signals[attack.values["signal"]]
        process = running.processes.wait_for(attack.victim, running)
        if process is None or not process.send(number):
            return False
        running.notes.append(f"{number.name} to {attack.victim}, PID {process.pid}")
        if thaw_s := attack.values.get("thaw_s"):
            running.sleep(thaw_s)
            process.send(signal.SIGCONT)
        return True

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        for name in ("SIGKILL", "SIGSTOP"):
            if attack.values["signal"] not in ("SIGKILL", name):
                yield replace(attack, values={**attack.values, "signal": name})


KINDS: tuple[Kind, ...] = (Signal(),)
