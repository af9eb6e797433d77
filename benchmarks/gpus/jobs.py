"""Jobs of real workers that the sections run, and what they read from their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpus.results import ROOT, SectionFailed, Where

TRAIN = Path(__file__).with_name("train.py")
JOB_S = 300.0
"""Time limit of a job, seconds."""


def environment() -> dict[str, str]:
    """Return the environment of a job: this checkout, one thread for each worker, no settings of another job."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))
    }
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


def ended_in(command: Sequence[str]) -> str:
    """Run a command, and return what it printed; for errors see :func:`ended_in_all`."""
    return ended_in_all([(command, {})])[0]


def ended_in_all(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], limit_s: float = JOB_S) -> list[str]:
    """Run commands beside each other, each with more environment, and return what each printed.

    Raises:
        SectionFailed: if not all ended with exit code 0 in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs, errs = ([Path(folder) / f"{k}.{end}" for k in range(len(commands))] for end in ("out", "err"))
        started = []
        try:
            for (command, more), out, err in zip(commands, outs, errs, strict=True):
                with out.open("w") as o, err.open("w") as e:
                    started.append(
                        subprocess.Popen(command, stdout=o, stderr=e, env=environment() | dict(more), cwd=ROOT)
                    )
            deadline_s = time.monotonic() + limit_s
            for process in started:
                process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired as expired:
            raise SectionFailed(f"no end within {limit_s:.0f} s: {' '.join(commands[0][0][1:])}") from expired
        finally:
            for process in started:
                process.kill()
        for process, (command, _), out, err in zip(started, commands, outs, errs, strict=True):
            if process.returncode:
                said = f"{out.read_text()[-1500:]}\n{err.read_text()[-3000:]}"
                raise SectionFailed(f"exit code {process.returncode}: {' '.join(command[1:])}\n{said}")
        return [out.read_text() for out in outs]


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
