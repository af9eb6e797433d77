"""Time: the wall clock of a job jumps, and all of a job stands still, as on a machine that was suspended."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable
from dataclasses import replace

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms.kept import Kept
from campaign.attacks.mechanisms.preload import COMPILER, WallClock, preload
from campaign.plan import Attack, Job

JUMPS_S = (3600, -3600, 86400, -86400, 0.5, -0.5, 400 * 86400, -400 * 86400)
STOPS_S = (0.3, 1.5, 4.0, 8.0)
_CLOCKS: Kept[WallClock] = Kept()


class ClockJump(Kind):
    """The wall clock of all processes of a job jumps, perhaps back again; the monotonic clock does not."""

    name = "clock-jump"

    def missing(self) -> str:
        return "" if COMPILER else "there is no C compiler"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"offset_s": rng.choice(JUMPS_S), "lasts_s": rng.choice((0, 0, 0.5, 2.0))}
        return Attack(self.name, values=values, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def prepare(self, attack: Attack, launch: Launch) -> None:
        clock, is_new = _CLOCKS.make(launch, lambda: WallClock(launch.folder / "clock"))
        if is_new:
            launch.env |= clock.env
            preload(launch.env, "clock_jump")

    def strike(self, attack: Attack, running: Running) -> bool:
        if running.is_over():
            return False
        clock = _CLOCKS.get(running.launch)
        clock.jump(attack.values["offset_s"])
        running.notes.append(f"the wall clock jumps by {attack.values['offset_s']} s")
        if lasts_s := attack.values["lasts_s"]:
            running.sleep(lasts_s)
            clock.jump(0)
        return True

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["lasts_s"]:
            yield replace(attack, values={**attack.values, "lasts_s": 0})
        if abs(attack.values["offset_s"]) != 3600:
            yield replace(
                attack, values={**attack.values, "offset_s": 3600 if attack.values["offset_s"] > 0 else -3600}
            )


class Suspend(Kind):
    """All processes of a job stand still for a while, launchers too; connections to other machines stay.

    The store of a job with several nodes takes all of them for lost meanwhile, so this is no attack on such a job.
    """

    name = "suspend"
    takes = frozenset(("nodes",))

    def draw(self, rng: random.Random, job: Job) -> Attack:
        return Attack(self.name, values={"lasts_s": rng.choice(STOPS_S)}, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        """Stop them; what one of them starts before its own turn is found in the next round."""
        stopped = {}
        while new := [each for each in running.processes.all() if each not in stopped.values()]:
            for process in new:
                if process.send(signal.SIGSTOP):
                    stopped[process.pid] = process
        running.notes.append(f"{len(stopped)} processes stand still for {attack.values['lasts_s']} s")
        running.sleep(attack.values["lasts_s"])
        for process in stopped.values():
            process.send(signal.SIGCONT)
        return bool(stopped)

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["lasts_s"] != STOPS_S[0]:
            yield replace(attack, values={"lasts_s": STOPS_S[0]})


KINDS: tuple[Kind, ...] = (ClockJump(), Suspend())
