"""The command line of a job: how it was started, and how it is resumed."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from holdfast.base.options import fields_of
from holdfast.config import Settings
from holdfast.launch.job import MAX_RESPAWNS, Job

_SAID_APART = ("workers", "token", "certificate", "resume", "max_respawns", "page", "log_to")
"""Fields whose options :func:`command_line` writes in a special way, or omits."""
OPTIONS, _JOB_OPTIONS = (
    tuple(
        (each.flag, each.name, each.kind is bool)
        for each in fields_of(kind)
        if each.option.help and each.name not in _SAID_APART
    )
    for kind in (Settings, Job)
)
"""Option, field name, and whether the option has no value."""

HIDDEN = "***"
"""Stands for a password."""
_USER_IN_URL = re.compile(r"(?P<scheme>://)(?P<user>[^/?#:@]*:)?[^/?#]*@")


def command_line(job: Job, *, faults: Sequence[str] = ()) -> str:
    """Return the command that runs the job, with every non-default setting except the rendezvous token and passwords."""
    settings = job.settings
    words = ["holdfast", "run", "-n", str(settings.workers), *_output_tail(settings, OPTIONS, Settings(fabric="ulfm"))]
    words += ["--checkpoint-every", "auto"] if settings.checkpoint_auto else []
    words += ["--slices", settings.auto_text] if settings.auto_text else []
    words += [] if settings.certificate else ["--no-certificate"]
    words += ["--resume"] if settings.resume else []
    words += ["--respawn"] if job.max_respawns else []
    words += ["--max-respawns", str(job.max_respawns)] if job.max_respawns not in (0, MAX_RESPAWNS) else []
    words += _output_tail(job, _JOB_OPTIONS, Job(script=job.script, settings=settings))
    for target in job.log_to:
        words += ["--log-to", _without_password(target)]
    for fault in faults:
        words += ["--inject", fault]
    return shlex.join([*words, *job.words])


def _output_tail(given: object, options: Sequence[tuple[str, str, bool]], usual: object) -> list[str]:
    """Return the options whose values are not the default, each with its value; switches have none."""
    words = []
    for flag, name, is_switch in options:
        value = getattr(given, name)
        if value != getattr(usual, name):
            words += [flag] if is_switch else [flag, _word(value)]
    return words


def _word(value: Any) -> str:
    """Return a value in command-line syntax."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _without_password(text: str) -> str:
    """Return a target of ``--log-to`` as it may be published: :data:`HIDDEN` stands for the password, or the token, in its URL."""
    return _USER_IN_URL.sub(lambda match: f"{match['scheme']}{match['user'] or ''}{HIDDEN}@", text)


def resume_command(job: Job, workers: int, checkpoint_dir: str) -> str:
    """Return the command that resumes the job from ``checkpoint_dir``, the same on every node.

    ``workers`` are left, including spares; the job may need more.
    """
    if job.hosts:  # all workers end with a lost host, and the remaining hosts have free slots again
        workers = min(len(job.ranks), sum(host.slots for host in job.hosts))
    share = max(min(workers, job.workers) if job.settings.spares else workers, job.settings.min_workers)
    settings = dataclasses.replace(
        job.settings, workers=math.ceil(share / job.nnodes), slices=job.slices, auto_slices=-1, stop_after=-1
    )
    settings = dataclasses.replace(settings, checkpoint_dir=checkpoint_dir, resume=True)
    return command_line(dataclasses.replace(job, settings=settings, mtbf_s=0.0))
