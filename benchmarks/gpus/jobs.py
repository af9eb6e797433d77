"""Jobs of real workers that the sections run, and what they read from their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpus.results import ROOT, SectionFailed, Where

TRAIN = Path(__file__).with_name("train.py")
JOB_S = 300.0
"""Time limit of a job, seconds."""


def environment() -> dict[str, str]:
    """Return the environment of a job: this checkout, one thread for each worker, no settings of another job."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True, slots=True)
class Job:
    """A training of ``train.py``.

    Args:
        where: Its device.
        model: A model of ``train.py``.
        workers: Number of processes, or of virtual workers.
        words: Further arguments of ``train.py``.
        faults: Of ``--inject``.
        fabric: Of ``holdfast run``.
        options: Further options of ``holdfast run``.
    """

    where: Where
    model: str
    workers: int
    words: Sequence[object] = ("--deterministic",)
    faults: Sequence[str] = ()
    fabric: str = "gloo"
    options: Sequence[object] = ()

    def run(self) -> dict[str, Any]:
        """Return the report, with its records as ``events``.

        Raises:
            SectionFailed: if the job did not end with exit code 0 in time.
        """
        inject = [word for fault in self.faults for word in ("--inject", fault)]
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(sys.executable, "-m", "holdfast", "run", "--fabric", self.fabric, "-n", self.workers),
                *("--report", folder, "--no-page", *inject, *self.options),
                *(TRAIN, self.model, "--device", self.where.device, *self.words),
            ]
            ended_in(list(map(str, command)))
            report = json.loads((Path(folder) / "report.json").read_text())
            lines = (Path(folder) / "events.jsonl").read_text().splitlines()
        report["events"] = [json.loads(line) for line in lines]
        return report


def ended_in(command: Sequence[str], limit_s: float = JOB_S) -> str:
    """Run a command, and return what it printed.

    Raises:
        SectionFailed: if it did not end with exit code 0 in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=environment(), cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired as expired:
        raise SectionFailed(f"no end within {limit_s:.0f} s: {' '.join(command[1:])}") from expired
    if done.returncode:
        raise SectionFailed(f"exit code {done.returncode}: {' '.join(command[1:])}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return done.stdout


def state_of(report: dict[str, Any]) -> str:
    """Return the hash of the weights and the optimizer that all survivors ended with; "" if they differ."""
    replicas = report["replicas"]
    return str(replicas["state_sha256"]) if replicas["identical"] else ""


def killed(report: dict[str, Any]) -> list[int]:
    """Return the workers whose processes ended by SIGKILL."""
    return sorted({e["rank"] for e in report["events"] if e["event"] == "WorkerEnded" and e["exit_code"] == -9})


def whole(report: dict[str, Any]) -> bool:
    """Return whether every sample was committed once."""
    samples = report["samples"]
    return samples["lost"] == samples["repeated"] == 0 and samples["committed"] == samples["planned"]
