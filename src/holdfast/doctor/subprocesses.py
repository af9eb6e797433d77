"""Having two processes look, as two workers would compute: with the same settings, and nothing else in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, JobError

_HOWS = ("full", "brief")
_POLL_S = 0.05


def ask(script: Path | None, args: Sequence[str], *, workers: int, timeout_s: float) -> dict[str, Any]:
    """Return what the full and the brief process found.

    Args:
        script: Whose model is looked at; None: the usual layers.
        args: The script's.
        workers: Of the job that it is for: a slice is what one of so many computes.
        timeout_s: How long looking may take.

    Raises:
        ConfigError: if the script cannot be looked at.
        JobError: if it fails, or does not come to its first step in time.
    """
    if script is not None and not script.is_file():
        raise ConfigError(f"there is no script {str(script)!r}")
    words = [] if script is None else [str(script), *args]
    with tempfile.TemporaryDirectory(prefix="holdfast-doctor-") as name, ExitStack() as closing:
        folder = Path(name)
        started = {}
        for number, how in enumerate(_HOWS, 1):
            log = closing.enter_context(Path(folder, f"{how}.log").open("w"))
            command = [sys.executable, "-m", "holdfast.doctor", how, name, *words]
            env = worker_environment(workers, number)
            started[how] = process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            closing.callback(process.wait)
            closing.callback(process.kill)
        _wait(started, folder, timeout_s)
        return {how: _read(folder, how) for how in _HOWS}


def worker_environment(workers: int, number: int) -> dict[str, str]:
    """Return the variables of a process that stands for a worker.

    Args:
        workers: Of the job.
        number: Of the process: Python's hashes, which decide the order of sets, are seeded anew in each one, unless the user
            has set that.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    env.setdefault("OMP_NUM_THREADS", "1")  # as the launcher does
    env.setdefault("PYTHONHASHSEED", str(number))
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    return env | here | {"HOLDFAST_FABRIC": "virtual", "HOLDFAST_WORKERS": str(workers)}


def _wait(started: dict[str, subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    """Wait until both have ended; one that fails would let the other wait.

    Raises:
        JobError: if they do not.
    """
    ends_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in started.values()):
        for how in _HOWS:
            if started[how].poll() is not None:
                _read(folder, how)
        if time.monotonic() > ends_s:
            raise JobError(
                f"it was not seen within {timeout_s:g} s (--timeout): does the script come to session.steps(...) by itself?"
            )
        time.sleep(_POLL_S)


def _read(folder: Path, how: str) -> dict[str, Any]:
    path = folder / f"{how}.json"
    log = (folder / f"{how}.log").read_text(errors="replace").rstrip()
    if not path.exists():
        raise JobError(f"the process that looked died:\n{log[-2000:]}")
    said: dict[str, Any] = json.loads(path.read_text())
    if "refused" in said:
        raise ConfigError(said["refused"])
    if "error" in said:
        raise JobError("\n".join(filter(None, (said["error"], log[-2000:]))))
    return said
