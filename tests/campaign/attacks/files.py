"""The folders of a job: full, read-only, removed; checkpoints and manifests that are damaged while the job runs."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms.afterwards import afterwards
from campaign.plan import LAUNCHER, Attack, Job

SIZE = "48m"
"""Size of a folder that can be full."""
FILLER = ".filler"
FOLDERS = ("saved", "t", "report")
"""Checkpoints, the temporary directory, the report."""


def folder_of(attack: Attack, launch: Launch) -> Path:
    """The attacked folder."""
    return launch.folder / str(attack.values["folder"])


class Folder(Kind):
    """A kind that attacks a folder of the job, at any time."""

    def draw(self, rng: random.Random, job: Job) -> Attack:
        folder = rng.choice(("saved", "saved", *FOLDERS))
        return Attack(self.name, values={"folder": folder}, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        # Checkpoints that cannot be written cost a warning, but a job does not start where it cannot write any. Without
        # its temporary directory it cannot start; one that cannot write its report says so, and ends with 1.
        begun = attack.since != "start"
        return End.SURVIVES if begun and attack.values["folder"] == "saved" else End.REFUSES

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["folder"] != "saved":
            yield replace(attack, values={**attack.values, "folder": "saved"})


class Mounted(Folder):
    """A kind that needs a small file system of its own for the folder."""

    def missing(self) -> str:
        return "" if os.getuid() == 0 and shutil.which("mount") else "only root can mount a small file system"

    def prepare(self, attack: Attack, launch: Launch) -> None:
        folder = folder_of(attack, launch)
        folder.mkdir(exist_ok=True)
        if not os.path.ismount(folder):
            _call("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", folder)
            launch.undo.enter_context(afterwards('umount --lazy "$1"', folder))

    def repair(self, attack: Attack, launch: Launch) -> None:
        folder = folder_of(attack, launch)
        if os.path.ismount(folder) and os.statvfs(folder).f_flag & os.ST_RDONLY:
            _call("mount", "-o", "remount,rw,bind", folder)


class Full(Mounted):
    """The file system of a folder is full from some time on, or for a while."""

    name = "disk-full"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        attack = super().draw(rng, job)
        return replace(attack, values={**attack.values, "lasts_s": rng.choice((0.0, 0.3, 1.0))})

    def strike(self, attack: Attack, running: Running) -> bool:
        folder = folder_of(attack, running.launch)
        if not _is_filled(folder / FILLER):
            return False
        running.notes.append(f"{folder.name} is full")
        if attack.values["lasts_s"]:
            running.sleep(attack.values["lasts_s"])
        else:
            while running.sleep(1.0):
                pass
        with contextlib.suppress(OSError):  # it is read-only meanwhile
            (folder / FILLER).unlink(missing_ok=True)  # what the job leaves is looked at next
        return True

    def repair(self, attack: Attack, launch: Launch) -> None:
        super().repair(attack, launch)
        (folder_of(attack, launch) / FILLER).unlink(missing_ok=True)


def _is_filled(filler: Path) -> bool:
    """Fill the file system of a file; return whether it is full."""
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError as error:
        return error.errno == errno.ENOSPC  # else it is read-only, or its folder is removed
    return True


class ReadOnly(Mounted):
    """The file system of a folder is read-only from some time on, as after an error of the disk."""

    name = "disk-read-only"

    def strike(self, attack: Attack, running: Running) -> bool:
        folder = folder_of(attack, running.launch)
        # The kernel refuses to remount while a file is open for writing. Through a bind mount all new files are refused.
        _call("mount", "--bind", folder, folder)
        running.launch.undo.enter_context(afterwards('umount --lazy "$1"', folder))
        _call("mount", "-o", "remount,ro,bind", folder)
        running.notes.append(f"{folder.name} is read-only")
        return True

    def leaves_files(self, attack: Attack) -> bool:
        return bool(attack.values["folder"] == "t")


class Removed(Folder):
    """A folder, or one file in it, is removed while the job runs."""

    name = "removed"
    takes = frozenset(("temporary",))

    def strike(self, attack: Attack, running: Running) -> bool:
        folder = folder_of(attack, running.launch)
        if not folder.exists():
            return False
        for each in folder.iterdir() if folder.name == "t" else [folder]:  # TMPDIR itself belongs to the system
            shutil.rmtree(each, ignore_errors=True)
        running.notes.append(f"{folder.name} removed")
        return True


class Damage(Kind):
    """A file of a checkpoint is altered, cut or removed, as by a faulty disk."""

    name = "damage"
    weight = 2.0
    takes = frozenset(("checkpoints",))

    def suits(self, job: Job) -> bool:
        return bool(job.every) and job.script != "ddp"  # which saves nothing

    def draw(self, rng: random.Random, job: Job) -> Attack:
        how = rng.choice(("flip", "flip", "cut", "remove", "empty"))
        values = {"how": how, "file": rng.choice(("manifest", "data")), "at": round(rng.random(), 3)}
        values["newest"] = rng.choice((0, 0, 1))
        commit = rng.randint(job.every, 12)  # before the first checkpoint there is nothing to damage
        return Attack(self.name, values=values, since=f"commit {commit}", ms=round(rng.uniform(0, 80), 1))

    def also(self, rng: random.Random, attack: Attack, job: Job) -> tuple[Attack, ...]:
        """Mostly the launcher dies afterwards, so that the damage is met."""
        if rng.random() < 0.3:
            return ()
        name = rng.choice(("SIGKILL", "SIGKILL", "SIGTERM"))
        return (Attack("signal", LAUNCHER, "landed", round(rng.uniform(0, 300), 1), {"signal": name}),)

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        while not (damaged := _damage_one(attack, Path(running.launch.checkpoints))):
            if not running.sleep(0.01):
                return False
        running.notes.append(f"{attack.values['how']} of {damaged}")
        return True


def _damage_one(attack: Attack, checkpoints: Path) -> str:
    """Damage the file of the attack, and return its name; "" if it is not there yet, or was just removed by the job."""
    number, at = attack.values["newest"], attack.values["at"]
    complete = sorted(checkpoints.glob("step-*/manifest.json"))
    if len(complete) <= number:
        return ""
    manifest = complete[-1 - number]
    files = [manifest]
    if attack.values["file"] == "data":
        files = sorted(path for path in manifest.parent.rglob("*") if path.is_file() and path != manifest)
    try:
        path = files[int(at * len(files))]
        _damage(path, attack.values["how"], at)
    except (IndexError, OSError):
        return ""
    return f"{manifest.parent.name}/{path.name}"


def _damage(path: Path, how: str, at: float) -> None:
    size = path.stat().st_size
    if how == "remove":
        path.unlink()
    elif how in ("cut", "empty"):
        os.truncate(path, int(size * at) if how == "cut" else 0)
    else:
        with path.open("r+b") as file:
            file.seek(min(int(size * at), size - 1))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ (1 << int(at * 1000) % 8)]))


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


KINDS: tuple[Kind, ...] = (Full(), ReadOnly(), Removed(), Damage())
