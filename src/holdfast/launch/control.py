"""Requests to a running job: lines in a file of its run directory, which only its owner can access."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast.base.options import MAX_NUMBER, is_finite, is_whole, request_in
from holdfast.base.temporary import write_private
from holdfast.comm.fabrics.registry import make_fabric
from holdfast.errors import ConfigError, refuse
from holdfast.launch.command_line import command_line
from holdfast.launch.job import Job
from holdfast.launch.run_paths import SHARED
from holdfast.launch.supervise.processes import Process
from holdfast.launch.supervise.tail import LineTail
from holdfast.recovery.registry import strategy_class, strategy_names

_ABOUT = "job.json"
_ASKED = "asked.jsonl"
_WAITS_FOR = "waits-for"

MAX_WORKERS = 1024

CHANGES = ("workers", "lr", "batch_size", "strategy", "checkpoint_every", "save")
"""Settings that a running job can change, and ``save``, a request for one checkpoint after the step in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that runs on this machine, as commands that send it requests see it."""

    process: str  # the launcher's process; its PID names the job
    script: str
    fabric: str
    slices: int  # slices per mini-batch; 0 if a checkpoint determines the number
    split: str
    min_workers: int
    folder: str = ""  # directory in which the launcher was started
    run_dir: Path = Path()  # directory of its files
    origin_s: float = 0.0  # value of time.monotonic() of this machine when the run began; 0: unknown
    command: str = ""
    report_dir: str = ""  # the directory of its report, absolute; "" for none
    checkpoint_dir: str = ""  # "": it saves nothing
    guard: str = "off"
    workers: int = 0  # workers and spares that it starts with, on all nodes
    spares: int = 0
    nnodes: int = 1
    node_rank: int = 0  # node of this launcher
    log_dir: str = ""  # directory of its workers' output

    @classmethod
    def of(cls, job: Job, origin_s: float = 0.0) -> Self:
        """Return the description of this launcher's job, which began at ``origin_s`` of the monotonic clock."""
        of_settings = ("fabric", "split", "min_workers", "checkpoint_dir", "guard")
        values = {name: getattr(job.settings, name) for name in of_settings}
        return cls(
            process=str(Process.of(os.getpid())),
            script=job.script.name,
            slices=job.slices,
            folder=str(Path.cwd()),
            origin_s=origin_s,
            command=command_line(job),
            report_dir="" if job.report_dir is None else str(job.report_dir.absolute()),
            workers=len(job.ranks),
            spares=len(job.ranks) - job.workers,
            nnodes=job.nnodes,
            node_rank=job.node_rank,
            **values,
        )

    def home(self, rank: int) -> int:
        """Return the node of a worker that the job begins with, as :meth:`Job.home` does."""
        computing = self.workers - self.spares
        if rank < computing:
            return rank // (computing // self.nnodes)
        return (rank - computing) // (self.spares // self.nnodes) if rank < self.workers else 0

    @property
    def pid(self) -> int:
        """PID of the launcher."""
        return int(self.process.split()[0])

    @property
    def is_from_here(self) -> bool:
        """Whether the job was started in the current directory."""
        try:
            return bool(self.folder) and Path().samefile(self.folder)
        except OSError:  # that directory no longer exists
            return False


def announce(run_dir: Path, job: Job, origin_s: float = 0.0, log_dir: Path | None = None) -> RunningJob:
    """Publish the job of this launcher, so that commands can find it; return the published description."""
    running = dataclasses.replace(RunningJob.of(job, origin_s), run_dir=run_dir, log_dir=str(log_dir or ""))
    write_private(run_dir / _ABOUT, json.dumps(dataclasses.asdict(running) | {"run_dir": ""}))
    return running


def find(pid: int | None = None) -> RunningJob:
    """Return the job whose launcher has this ``pid``; if None, the only job, if it was started in this directory.

    Raises:
        ConfigError: if there is no such job, more than one, or one that was started elsewhere.
    """
    all_jobs = list(running_jobs())
    jobs = [job for job in all_jobs if pid in (None, job.pid)]
    if len(jobs) == 1 and (pid is not None or jobs[0].is_from_here):
        return jobs[0]
    if not all_jobs:
        detail = "" if pid is None else f", and none has a launcher with PID {pid}"
        where = tempfile.gettempdir()
        refuse(f"no job of yours runs on this machine{detail} (searched {where}); start one with holdfast run")
    if len(jobs) == 1:
        job = jobs[0]
        where = f"in {job.folder}" if job.folder else "elsewhere"
        refuse(f"job {job.pid} ({job.script}) was started {where}, not here: name it with --job {job.pid}")
    there = ", ".join(f"{job.pid} ({job.script})" for job in all_jobs)
    if pid is None:
        refuse(f"{len(all_jobs)} jobs are running: {there}; choose one with --job NUMBER")
    return refuse(f"--job must be the PID of a running launcher: {there}; got {pid}")


def writing_to(report_dir: Path) -> RunningJob | None:
    """Return the running job whose report goes to this directory, None if there is none."""
    wanted = report_dir.resolve()
    return next((job for job in running_jobs() if job.report_dir and Path(job.report_dir).resolve() == wanted), None)


def running_jobs() -> Iterator[RunningJob]:
    """Yield this user's jobs that run on this machine."""
    place = Path(tempfile.gettempdir())
    for about in sorted([*place.glob(f"holdfast-*/{_ABOUT}"), *place.glob(f"holdfast-*/{SHARED}/{_ABOUT}")]):
        running = _read(about)
        process = None if running is None else Process.parse(running.process)
        if running is not None and process is not None and process.is_alive():
            yield running


def _read(about: Path) -> RunningJob | None:
    """Return the job that a description file names; None if the file belongs to another user or cannot be parsed."""
    try:
        if any(path.lstat().st_uid != os.getuid() for path in (about, about.parent)):
            return None
        return RunningJob(**json.loads(about.read_text()) | {"run_dir": about.parent})
    except (
        OSError,
        ValueError,
        TypeError,
        RecursionError,
    ):  # the job has just ended, or another version of this program wrote the file
        return None


def note_wait(run_dir: Path, text: str) -> None:
    """Publish what this launcher's job waits for; "" once it trains."""
    with contextlib.suppress(OSError):  # only shown
        write_private(run_dir / _WAITS_FOR, text)


def waits_for(run_dir: Path) -> str:
    """Return what a job waits for before it trains; "" if that is not known."""
    try:
        return (run_dir / _WAITS_FOR).read_text(errors="replace")
    except OSError:
        return ""


FROM_DASHBOARD = "from_dashboard"
"""In a request: the user made it through a dashboard, and the launcher records that."""


def request_changes(job: RunningJob, *, from_dashboard: bool = False, **changes: Any) -> None:
    """Request some of :data:`CHANGES`; raise a ConfigError if a value is not allowed or the job has ended."""
    check(changes, job)
    try:
        append(job.run_dir / _ASKED, changes | ({FROM_DASHBOARD: True} if from_dashboard else {}))
    except OSError:
        refuse(f"job {job.pid} ({job.script}) has ended in the meantime")


def advice(job: RunningJob, changes: Mapping[str, Any]) -> str:
    """Return a warning about an allowed change, or ""."""
    wanted = changes.get("workers", 0)
    if job.split == "even" or not 0 < job.slices < wanted:
        return ""
    return (
        f"a mini-batch of this job has {job.slices} slices, so {wanted - job.slices} of {wanted} workers will be idle spares; "
        f"start the job with --slices {wanted} or more if it may grow to that size"
    )


# -- allowed requests


def check(changes: Mapping[str, Any], job: RunningJob) -> None:
    """Raise a ConfigError if this running job cannot make these changes."""
    check_values(changes)
    if "workers" in changes:
        _check_workers(changes["workers"], job)
    if "strategy" in changes and strategy_class(changes["strategy"]).needs_checkpoint:
        _check_saves(f"--strategy {changes['strategy']}", job)
    if "checkpoint_every" in changes:
        _check_saves("--checkpoint-every", job)
    if "save" in changes:
        _check_saves("a checkpoint", job)


def check_values(changes: Mapping[str, Any]) -> None:
    """Raise a ConfigError if no job could make these changes."""
    if not changes:
        refuse("no change requested: give at least one of --lr, --batch-size, --strategy, --checkpoint-every")
    for name, value in changes.items():
        match name:
            case "workers":
                _check_number("WORKERS", value, 1, MAX_WORKERS)
            case "lr":
                if not is_finite(value):
                    refuse(f"--lr must be a finite number, at least 0, got {value!r}")
            case "batch_size":
                _check_number("--batch-size", value, 1, MAX_NUMBER)
            case "strategy":
                names = strategy_names()
                live = [name for name in names if strategy_class(name).can_change_live]
                if value in names and strategy_class(value).rebuilds:
                    refuse(f"--strategy {value} must be set when the job starts: holdfast.reinit reruns its script")
                if value not in live:
                    refuse(f"--strategy must be one of {', '.join(live)}, got {value!r}")
            case "checkpoint_every":
                _check_number("--checkpoint-every", value, 0, MAX_NUMBER)
            case "save":
                if value is not True:
                    refuse(f"save must be true, got {value!r}")
            case _:
                refuse(f"{name} cannot be changed while a job runs; these can: {', '.join(CHANGES)}")


def _check_workers(value: Any, job: RunningJob) -> None:
    if not make_fabric(job.fabric).can_join:
        refuse(
            f"job {job.pid} ({job.script}) runs with --fabric {job.fabric}, which cannot add or remove workers; "
            "start it with --fabric gloo"
        )
    if value < job.min_workers:
        refuse(f"WORKERS must be at least {job.min_workers}, the job's --min-workers, got {value}")


def _check_number(what: str, value: Any, least: int, most: int) -> None:
    if not is_whole(value, least, most):
        refuse(f"{what} must be a whole number from {least} to {most}, got {value!r}")


def _check_saves(what: str, job: RunningJob) -> None:
    if not job.checkpoint_dir:
        refuse(f"{what} needs a checkpoint directory, and job {job.pid} ({job.script}) runs without --checkpoint-dir")


# -- in the launcher


class ControlRequest:
    """Reads requests to this launcher's job, line by line; calls ``say`` with a message for each invalid request."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._lines = LineTail(run_dir / _ASKED, far=True)  # reopened each time: it is hardly ever there
        self._say = say
        self._taken = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the requests since the last call; an incomplete line is left for the next call."""
        try:
            lines = self._lines.read()
        except OSError:
            return []
        return [request for line in lines if (request := self._request_in(line)) is not None]

    def _request_in(self, line: bytes) -> dict[str, Any] | None:
        self._taken += 1
        try:
            return request_in(line.decode(errors="replace"))
        except ConfigError as error:
            self._say(f"request rejected: line {self._taken} of {_ASKED} is skipped: {error}")
            return None


def append(path: Path, request: Mapping[str, Any]) -> None:
    """Append one complete line."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, (json.dumps(request) + "\n").encode())
    finally:
        os.close(file)
