"""The disk of a job is slow, or fails: that of its checkpoints, or of the temporary directory. See also ``files.py``."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms.kept import Kept
from campaign.attacks.mechanisms.preload import COMPILER, BadDisks, preload
from campaign.plan import Attack, Job

CHECKPOINTS, TEMPORARY = "checkpoints", "temporary"
ERRORS = ("EIO", "ENOSPC", "EROFS", "EDQUOT", "ESTALE")
_BAD: Kept[BadDisks] = Kept()


class DiskKind(Kind):
    """An attack on the folder ``values["where"]``."""

    takes = frozenset(("checkpoints",))

    def missing(self) -> str:
        return "" if COMPILER else "there is no C compiler"

    def suits(self, job: Job) -> bool:
        return job.every > 0

    def _draw(self, rng: random.Random, where: str = "", **values: object) -> Attack:
        where = where or rng.choice((CHECKPOINTS, CHECKPOINTS, TEMPORARY))
        return Attack(self.name, values={"where": where, **values}, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def prepare(self, attack: Attack, launch: Launch) -> None:
        """Have the job write files through a library that can delay writes, or have them fail."""
        folders = {CHECKPOINTS: Path(launch.checkpoints), TEMPORARY: launch.temporary}
        disk, is_new = _BAD.make(launch, lambda: BadDisks(launch.folder / "disks", folders))
        if is_new:
            launch.env |= disk.env
            preload(launch.env, "slow_disk")


class DiskSlow(DiskKind):
    """Each write and each ``fsync`` below the folder takes longer, for a while."""

    name = "disk-slow"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        where = rng.choice((CHECKPOINTS, CHECKPOINTS, TEMPORARY))
        write_ms, sync_ms = rng.choice(((20, 0), (0, 1500), (5, 300), (0, 6000))) if where == CHECKPOINTS else (5, 100)
        return self._draw(rng, where, write_ms=write_ms, sync_ms=sync_ms, lasts_s=rng.choice((1.0, 5.0)))

    def strike(self, attack: Attack, running: Running) -> bool:
        disk, values = _BAD.get(running.launch), attack.values
        before = disk.struck(values["where"])
        disk.set(values["where"], write_s=values["write_ms"] / 1000, sync_s=values["sync_ms"] / 1000)
        running.notes.append(f"{values['where']}: a write takes {values['write_ms']} ms, fsync {values['sync_ms']} ms")
        running.sleep(values["lasts_s"])
        disk.set(values["where"], write_s=0, sync_s=0)
        return disk.struck(values["where"]) > before


class DiskFails(DiskKind):
    """Each write and each ``fsync`` below the folder fails with an error, for a while or for good."""

    name = "disk-error"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        return self._draw(rng, error=rng.choice(ERRORS), lasts_s=rng.choice((0, 0.5, 3.0)))

    def end(self, attack: Attack, job: Job) -> End:
        """Space for the records of ends is reserved, which helps against a full disk, but against no other error."""
        if attack.since == "start":
            return End.REFUSES
        return End.MAY_STOP if attack.values["where"] == TEMPORARY else End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        disk, where = _BAD.get(running.launch), attack.values["where"]
        before = disk.struck(where)
        disk.set(where, error=getattr(errno, attack.values["error"]))
        running.notes.append(f"{attack.values['where']}: {attack.values['error']}")
        if lasts_s := attack.values["lasts_s"]:
            running.sleep(lasts_s)
            disk.set(where, error=0)
        while not lasts_s and disk.struck(where) == before and running.sleep(0.02):
            pass
        return disk.struck(where) > before

    def repair(self, attack: Attack, launch: Launch) -> None:
        _BAD.get(launch).set(attack.values["where"], error=0)

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["error"] != "EIO":
            yield replace(attack, values={**attack.values, "error": "EIO"})


KINDS: tuple[Kind, ...] = (DiskSlow(), DiskFails())
