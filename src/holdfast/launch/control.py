"""Asking something of a job that runs: a line in a file of its run folder, which only its owner can reach."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.launch.processes import Process
from holdfast.settings import STRATEGIES

_ABOUT = "job.json"
_ASKED = "asked.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that runs on this machine.

    Args:
        pid: Of its launcher; this is how the job is named.
        run_dir: Where its files are.
        script: What it runs.
        fabric: How its workers talk.
        workers: How many it was started with.
    """

    pid: int
    run_dir: Path
    script: str
    fabric: str
    workers: int


def announce(run_dir: Path, *, script: str, fabric: str, workers: int) -> None:
    """Let others find the job of this launcher."""
    about = {"process": str(Process.of(os.getpid())), "script": script, "fabric": fabric, "workers": workers}
    draft = run_dir / f"{_ABOUT}.draft"
    draft.write_text(json.dumps(about))
    draft.replace(run_dir / _ABOUT)


def find(pid: int | None = None) -> Running:
    """Return the job whose launcher has the number ``pid``, or the only one.

    Raises:
        ConfigError: if there is none, or more than one to choose from.
    """
    jobs = list(_jobs())
    if pid is not None:
        jobs = [job for job in jobs if job.pid == pid]
    if len(jobs) == 1:
        return jobs[0]
    there = ", ".join(f"{job.pid} ({job.script})" for job in _jobs()) or "none"
    what = "there is no such job" if pid is not None else "which job? name one with --job" if jobs else "no job runs"
    msg = f"{what}; jobs of yours that run on this machine, by the number of their launcher: {there}"
    raise ConfigError(msg)


def _jobs() -> Iterator[Running]:
    for about in sorted(Path(tempfile.gettempdir()).glob(f"holdfast-*/{_ABOUT}")):
        try:
            if about.stat().st_uid != os.getuid():
                continue
            said = json.loads(about.read_text())
        except OSError:  # it ended just now, or is another user's
            continue
        process = Process.parse(said["process"])
        if process is not None and process.is_alive():
            yield Running(
                pid=process.pid,
                run_dir=about.parent,
                script=said["script"],
                fabric=said["fabric"],
                workers=said["workers"],
            )


def ask(job: Running, **changes: Any) -> None:
    """Ask for changes to a running job; see :data:`CHANGES`.

    Raises:
        ConfigError: if a value is not allowed, or the job has ended.
    """
    check(changes, job.fabric)
    try:
        append(job.run_dir / _ASKED, changes)
    except OSError as error:
        msg = f"job {job.pid} has ended: {error.strerror}"
        raise ConfigError(msg) from error


def check(changes: Mapping[str, Any], fabric: str) -> None:
    """Make sure that a running job can be asked this.

    Raises:
        ConfigError: if not.
    """
    if not changes:
        msg = f"nothing is asked for; {', '.join(CHANGES)} can be changed"
        raise ConfigError(msg)
    for name, value in changes.items():
        if name not in CHANGES:
            msg = f"{name} cannot be changed while a job runs; {', '.join(CHANGES)} can"
            raise ConfigError(msg)
        if name == "workers" and fabric != "gloo":
            msg = (
                f"the {fabric} fabric cannot take in or give up workers while it runs; start the job with --fabric gloo"
            )
            raise ConfigError(msg)
        kind, least = CHANGES[name]
        if kind is str:
            if value not in STRATEGIES:
                msg = f"strategy must be one of {', '.join(STRATEGIES)}, got {value!r}"
                raise ConfigError(msg)
        elif type(value) not in (int, kind) or not least <= value < 2**31:
            msg = f"{name} must be at least {least:g}, got {value!r}"
            raise ConfigError(msg)


CHANGES: dict[str, tuple[type, float]] = {
    "workers": (int, 1),
    "lr": (float, 0.0),
    "batch_size": (int, 1),
    "strategy": (str, 0),
    "checkpoint_every": (int, 0),
}
"""What can be asked of a running job: its type, and its least value."""


class Asked:
    """What the job of this launcher is asked, line by line.

    Args:
        run_dir: Of the job.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _ASKED
        self._taken = 0

    def new(self) -> list[dict[str, Any]]:
        """Return what was asked since the last call."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        new, self._taken = lines[self._taken :], len(lines)
        return [json.loads(line) for line in new]


def append(path: Path, request: Mapping[str, Any]) -> None:
    """Append one line, whole."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, (json.dumps(request) + "\n").encode())
    finally:
        os.close(file)
