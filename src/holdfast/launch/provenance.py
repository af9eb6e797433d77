"""Provenance of a job: what is needed to repeat it, for the report, and a note that this user has run it here.

The notes are empty files in ``$XDG_STATE_HOME/holdfast/runs`` (``~/.local/state/holdfast/runs``), outside of report
directories, which may be untrusted. Each is named by a digest of the script and its arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.launch.hash_seed import hash_seed
from holdfast.launch.job import Job

_NOT_THE_JOB = ("token", "store", "rank", "ranks", "run_dir", "origin_s", "launch_dir", "faults")
"""Settings that are specific to one start of the job, or secret."""
_LIBRARIES = ("holdfast", "torch", "numpy")


def job_provenance(job: Job) -> dict[str, Any]:
    """Return the ``job`` entry of ``report.json``: the script and its arguments, the settings, the versions."""
    settings = dataclasses.asdict(job.settings)
    return {
        "script": str(job.script),
        "path": str(job.script.resolve()),
        "sha256": _sha256(job.script),
        "args": list(job.args),
        **({"module": job.module} if job.module else {}),
        "folder": str(Path.cwd()),
        "settings": {name: value for name, value in settings.items() if name not in _NOT_THE_JOB},
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "hash_seed": hash_seed(job.settings),
        "versions": _versions(),
    }


def _sha256(script: Path) -> str:
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError:  # removed since it was checked; no worker will find it either
        return ""


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that bits depend on; "" for one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


_MOST = 1000
"""Maximum number of notes; the newest are kept."""


def note(facts: Mapping[str, Any]) -> None:
    """Note that a job with these :func:`job_provenance` was run here; else ``holdfast verify`` needs ``--trust`` or ``--script``."""
    with suppress(OSError, RuntimeError):  # no home directory, or it is not writable
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(folder, _digest(facts)).touch(mode=0o600)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST]:
            old.unlink(missing_ok=True)


def is_noted(facts: Mapping[str, Any]) -> bool:
    """Return whether this user has run here the same script, byte for byte, with the same arguments, as in a report."""
    try:
        status = Path(_folder(), _digest(facts)).lstat()
        return status.st_uid == Path(_folder()).lstat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return False


def _folder() -> Path:
    """Return the directory of the notes; raise a RuntimeError if this user has no home."""
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    return Path(state_home if state_home.is_absolute() else Path.home() / ".local" / "state", "holdfast", "runs")


def _digest(facts: Mapping[str, Any]) -> str:
    ran = [facts["path"], facts["sha256"], list(facts["args"])]
    return hashlib.sha256(json.dumps(ran).encode()).hexdigest()
