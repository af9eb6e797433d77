"""What a job was, so that it can be done again: for the report."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from holdfast.launch.job import Job

_NOT_THE_JOB = ("token", "store", "rank", "ranks", "run_dir", "origin_s", "faults")
"""Settings that say how this start of it was made, or are a secret."""
_LIBRARIES = ("holdfast", "torch", "numpy")


def job_facts(job: Job) -> dict[str, Any]:
    """Return what ``report.json`` has under ``job``: the script and its arguments, the settings, the versions."""
    settings = dataclasses.asdict(job.settings)
    return {
        "script": str(job.script),
        "path": str(job.script.resolve()),
        "sha256": _sha256(job.script),
        "args": list(job.args),
        "folder": str(Path.cwd()),
        "settings": {name: value for name, value in settings.items() if name not in _NOT_THE_JOB},
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "versions": _versions(),
    }


def _sha256(script: Path) -> str:
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError:  # it is gone since it was looked for, and no worker will find it either
        return ""


def _versions() -> dict[str, str]:
    """Return those of Python, and of the libraries that bits depend on; "" of one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
