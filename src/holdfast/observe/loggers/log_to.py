"""What ``--log-to`` asks for, in the launcher: checked, opened, and continued when the job resumes."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.launch.displays import Display
from holdfast.launch.fleet.rendezvous import hub_places
from holdfast.launch.job import Job, check_writable, is_remote
from holdfast.launch.record_bus import RunState
from holdfast.observe.loggers.leftovers import Leftovers, mark_run
from holdfast.observe.loggers.targets import LogTarget, parse_targets
from holdfast.records.paths import media_dir, media_elsewhere_path
from holdfast.records.queued import QueuedSink

if TYPE_CHECKING:
    from holdfast.observe.loggers.sink import StepLogger

RUN_ID = "HOLDFAST_RUN_ID"
"""Variable with the id of the run, if it is given from outside."""
_RUN_ID_FILE = ".holdfast-run-id"
"""File beside the checkpoints: the id of the run that wrote them."""


class LoggerDisplay(Display):
    """The loggers of ``--log-to``."""

    def __init__(self) -> None:
        self._earlier = Leftovers("")

    def check(self, job: Job) -> None:
        targets = parse_targets(job.log_to)
        for target in targets:
            target.check()
            if target.kind == "wandb" and job.node_rank == 0:
                _check_key(target)
            if target.kind == "tensorboard" and job.node_rank == 0:
                check_writable(Path(target.place), f"--log-to {target}: the folder")
        if not _may_return(job):
            _check_new(job, targets)
        run_id = os.environ.get(RUN_ID, "")
        if run_id and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):
            raise ConfigError(f"{RUN_ID} must have 1 to 64 letters, digits, - and _, got {run_id!r}")
        needs_id = [target for target in targets if target.kind in ("wandb", "mlflow")]
        if needs_id and job.settings.resume and is_remote(job.settings.checkpoint_dir) and not run_id:
            raise ConfigError(
                f"--log-to {needs_id[0]} cannot find out which run to resume, because its checkpoints are in remote storage:"
                f" set {RUN_ID} to the same id at each start of the job"
            )

    def prepare(self, job: Job) -> None:
        """Find the records of earlier starts of the job that were not logged, if it resumes and logs."""
        self._earlier = Leftovers(_name_of(job) if job.log_to and job.settings.resume and job.node_rank == 0 else "")

    def open(self, run: RunState) -> Sequence[QueuedSink]:
        """Return the sinks of all targets.

        Raises:
            ConfigError: if the folder of checkpoints cannot be written, or a log is that of another run.
        """
        job, say, run_dir = run.job, run.view.print_line, run.paths.run_dir
        targets = parse_targets(job.log_to)
        if run.fleet.is_late and job.node_rank == 0:
            if targets:
                say("nothing is logged until the job is resumed: it had begun before this launcher arrived (--log-to)")
            return []
        if _may_return(job):  # it was not known before the rendezvous whether this launcher is late
            _check_new(job, targets)
        is_first, shows_media = job.node_rank == 0, any(target.kind != "otel" for target in targets)
        if shows_media and is_first:
            media_dir(run_dir).mkdir(mode=0o700, exist_ok=True)
        elif shows_media:
            media_elsewhere_path(run_dir).touch(mode=0o600)
        if not targets or not is_first:
            return []
        from holdfast.observe.loggers.media import MediaFiles
        from holdfast.observe.loggers.otel import RecoveryTracer
        from holdfast.observe.loggers.sink import LAST_S, LoggerSink

        mark = mark_run(run_dir, _name_of(job), time.time() - run.clock.now_s())
        run_id, files = _find_run_id(job), MediaFiles(sum(target.kind != "otel" for target in targets))
        sinks = [
            RecoveryTracer(target.place, run_id, mark.epoch_s, run.clock)
            if target.kind == "otel"
            else LoggerSink(_logger(target, run_id), mark, self._earlier.runs, files, say)
            for target in targets
        ]
        return [QueuedSink(sink, say, last_s=LAST_S) for sink in sinks]

    def close(self) -> None:
        self._earlier.close()


def _check_key(target: LogTarget) -> None:
    from holdfast.observe.loggers.wandb import has_credentials

    if not has_credentials():
        raise ConfigError(
            f"--log-to {target}: W&B has no API key: run wandb login, or set WANDB_API_KEY; WANDB_MODE=offline needs none"
        )


def _may_return(job: Job) -> bool:
    """Return whether the job may continue without the launcher of node 0, so that another one may replace it."""
    return bool(job.rdzv) and len(hub_places(job.rdzv)) != 1


def _check_new(job: Job, targets: Sequence[LogTarget]) -> None:
    """Raise a ConfigError if a job that begins would write into the log of another one; only node 0 writes logs."""
    if job.node_rank == 0 and not job.settings.resume:
        for target in targets:
            target.check_new()


def _logger(target: LogTarget, run_id: str) -> StepLogger:
    if target.kind == "tensorboard":
        from holdfast.observe.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(Path(target.place).absolute())
    if target.kind == "wandb":
        from holdfast.observe.loggers.wandb import WandbLogger

        return WandbLogger(target.place, run_id)
    from holdfast.observe.loggers.mlflow import MlflowLogger

    return MlflowLogger(target.place, run_id)


def _name_of(job: Job) -> str:
    """Return what all starts of a job have in common: where its checkpoints are; "" if it cannot resume."""
    place = job.settings.checkpoint_dir
    return place if not place or is_remote(place) else str(_local(place).resolve())


def _local(checkpoint_dir: str) -> Path:
    return Path(checkpoint_dir.removeprefix("file://"))


def _find_run_id(job: Job) -> str:
    """Return the id of the run, which stays the same when the job resumes: it is kept beside local checkpoints."""
    if run_id := os.environ.get(RUN_ID):
        return run_id
    place = job.settings.checkpoint_dir
    file = _local(place) / _RUN_ID_FILE if place and not is_remote(place) else None
    if file is not None and job.settings.resume:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if run_id := file.read_text().strip():
                return run_id
    run_id = uuid.uuid4().hex[:16]
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(run_id + "\n")
        except OSError as error:
            raise ConfigError(f"--checkpoint-dir {place} cannot be written: {error.strerror}") from error
    return run_id
