"""Runs the checks in two processes, as two workers would compute: with the same settings and nothing else in common."""

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
from holdfast.state.gpu_platform import WORKSPACES

_HOWS = ("full", "brief")
_POLL_S = 0.05
_NVIDIA = Path("/proc/driver/nvidia")


def inspect(
    script: Path | None, args: Sequence[str], *, workers: int, timeout_s: float, device: str = "cpu"
) -> dict[str, Any]:
    """Return the findings of the full and the brief process.

    Args:
        script: Script whose model is checked; None for common layers.
        args: Arguments of the script.
        workers: Number of workers of the job, which determines the size of a slice.
        timeout_s: Limit for all checks, in seconds.
        device: Device of the common layers, as torch names it.

    Raises:
        ConfigError: if the script cannot be checked.
        JobError: if it fails, or does not reach its first step in time.
    """
    if script is not None and not script.is_file():
        raise ConfigError(f"there is no script {str(script)!r}")
    words = [] if script is None else [str(script), *args]
    with tempfile.TemporaryDirectory(prefix="holdfast-doctor-") as name, ExitStack() as closing:
        folder = Path(name)
        started = {}
        for number, how in enumerate(_HOWS, 1):
            log = closing.enter_context(Path(folder, f"{how}.log").open("w"))
            command = [sys.executable, "-m", "holdfast.tools.doctor", how, name, device, *words]
            env = worker_environment(workers, number)
            started[how] = process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            closing.callback(process.wait)
            closing.callback(process.kill)
        _wait(started, folder, timeout_s)
        return {how: _read(folder, how) for how in _HOWS}


def worker_environment(workers: int, number: int) -> dict[str, str]:
    """Return the environment of a process that represents a worker.

    Args:
        workers: Number of workers of the job.
        number: Number of the process; unless the user has set it, it becomes the seed of Python's hashes, which
            determine the order of sets.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    env.setdefault("OMP_NUM_THREADS", "1")  # as the launcher does
    if _NVIDIA.is_dir():
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])  # as well
    env.setdefault("PYTHONHASHSEED", str(number))
    rank_env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    return env | rank_env | {"HOLDFAST_FABRIC": "virtual", "HOLDFAST_WORKERS": str(workers)}


def _wait(started: dict[str, subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    """Wait until both processes have ended; if one fails, the other would wait for it.

    Raises:
        JobError: if one fails, or the time is over.
    """
    ends_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in started.values()):
        for how in _HOWS:
            if started[how].poll() is not None:
                _read(folder, how)
        if time.monotonic() > ends_s:
            raise JobError(
                f"the checks did not end within {timeout_s:g} s (--timeout): does the script reach session.steps(...) without input?"
            )
        time.sleep(_POLL_S)


def _read(folder: Path, how: str) -> dict[str, Any]:
    path = folder / f"{how}.json"
    log = (folder / f"{how}.log").read_text(errors="replace").rstrip()
    if not path.exists():
        raise JobError(f"the checking process died:\n{log[-2000:]}")
    findings: dict[str, Any] = json.loads(path.read_text())
    if "refused" in findings:
        raise ConfigError(findings["refused"])
    if "error" in findings:
        raise JobError("\n".join(filter(None, (findings["error"], log[-2000:]))))
    return findings
