"""The job that the launchers run, from what the trainer was given. Pure: does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.base.options import declared
from holdfast.base.rules import check_rules
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.integrations.ray import function
from holdfast.integrations.ray.configs import JobScale
from holdfast.launch.job import MAX_RESPAWNS, Job
from holdfast.launch.job_rules import NODE_RULES, check
from holdfast.launch.target import module_file

_CHOSEN_HERE = (
    *("workers", "fabric", "spares", "token"),
    *("nnodes", "node_rank", "rdzv", "gpus", "hosts", "launch_agent", "network", "run_dir", "log_dir", "report_dir"),
)
"""Options that follow from the configurations, or have no meaning on Ray."""
_OPTIONS = {
    kind: tuple(each.name for each in declared(kind) if each.name not in _CHOSEN_HERE) for kind in (Settings, Job)
}
_ALSO = ("auto_slices", "checkpoint_auto", "bucket_bytes", "faults")
"""Settings without an option of their own, which options or scripts set."""


def make_job(
    script: Path | None, args: Sequence[str], scale: JobScale, options: Mapping[str, Any], folder: str, rdzv: str
) -> Job:
    """Return the job, without the address of its store.

    Args:
        script: The script; None for the function that :mod:`holdfast.integrations.ray.function` keeps.
        args: Arguments of the script.
        scale: Its nodes.
        options: Values of fields of :class:`~holdfast.config.Settings` and :class:`~holdfast.launch.job.Job`.
        folder: Where the run writes, or "".
        rdzv: A store outside of Ray, or "".

    Raises:
        ConfigError: if a value is not allowed, or an option is unknown or follows from something else.
    """
    if rdzv and not rdzv.startswith("etcd://"):
        raise ConfigError(f"rdzv must be etcd://HOST:PORT[,HOST:PORT...]/JOB, or not given, got {rdzv!r}")
    _check_names(options)
    values = {name: value for name, value in options.items() if name in (*_OPTIONS[Settings], *_ALSO)}
    for_launcher = {name: value for name, value in options.items() if name in _OPTIONS[Job]}
    if folder and not values.get("checkpoint_dir"):
        values["checkpoint_dir"] = f"{folder}/checkpoints"
    settings = _settings(values, scale)
    has_gpus = scale.bundle.get("GPU", 0) > 0
    job = Job(
        script=script or module_file(function.MODULE),
        args=tuple(args),
        module="" if script is not None else function.MODULE,
        settings=settings,
        is_managed=True,
        nnodes=scale.max_nodes,
        rdzv=rdzv,
        gpus="auto" if has_gpus else "none",
        report_dir=Path(folder, "report") if folder and "://" not in folder else None,
        **{"max_respawns": MAX_RESPAWNS, **for_launcher},
    )
    _check(job)
    return job


def _check_names(options: Mapping[str, Any]) -> None:
    names = sorted({*_OPTIONS[Settings], *_OPTIONS[Job], *_ALSO})
    for name in options:
        if name in _CHOSEN_HERE:
            raise ConfigError(f"options[{name!r}] is not for Ray: scaling_config, run_config and Ray determine it")
        if name not in names:
            raise ConfigError(f"options[{name!r}] is unknown; known options are {', '.join(names)}")


def _settings(values: Mapping[str, Any], scale: JobScale) -> Settings:
    """Return the settings of the workers, with a number of slices that does not depend on when nodes arrive."""
    settings = Settings.from_env(**values)
    folder = settings.checkpoint_dir
    if folder and "://" not in folder:
        settings = replace(settings, checkpoint_dir=str(Path(folder).absolute()))
    is_open = settings.slices or settings.auto_slices >= 0 or settings.resume
    slices = settings.slices if is_open else scale.max_nodes * scale.workers_per_node
    return replace(settings, fabric="gloo", workers=scale.workers_per_node, spares=0, slices=slices)


def _check(job: Job) -> None:
    """Check what can be checked here; the launcher of each node checks the rest."""
    job = replace(job, rdzv=job.rdzv or "holdfast://127.0.0.1:1")  # the address follows
    check_rules(NODE_RULES, job)
    if job.script.is_file():
        check(job)
