"""Rehearses failures of the user's own training job, to find the standby settings with which a failure costs least.

The training runs once without failures, and then once with each setting and failure, where the same worker dies in the
same step. All workers are virtual: one process runs them all, and restores the same bits as real workers would.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from holdfast.checkpoint.priority import PREDICTORS, PriorityPolicy
from holdfast.checkpoint.priority_codec import CODECS
from holdfast.errors import ConfigError
from holdfast.tools.against import cost_against, read_losses
from holdfast_lab.studies.processes import own_environment

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The settings of a rehearsal.

    Args:
        script: The training script; it must log the metric in every step, and its model must be split over workers.
        args: Its arguments.
        workers: Number of workers, ``>= 2``.
        every: C of the priority checkpoint; see :class:`~holdfast.checkpoint.priority.PriorityPolicy`.
        fraction: r of the priority checkpoint.
        failures: Number of failures, each in its own run.
        seed: Seed of the job, and of the failed workers and steps.
        metric: Name of the loss in the log.
        limit_s: Time limit of a run in seconds.

    Raises:
        ConfigError: if ``every``, ``fraction`` or ``limit_s`` is out of range, or there is no such script.
    """

    script: Path
    args: tuple[str, ...] = ()
    workers: int
    every: int = 16
    fraction: float = 0.125
    failures: int = 3
    seed: int = 0
    metric: str = "loss"
    limit_s: float = 3600.0

    def __post_init__(self) -> None:
        PriorityPolicy(every=self.every, fraction=self.fraction)
        if not self.script.is_file():
            raise ConfigError(f"there is no script {str(self.script)!r}")
        if not (math.isfinite(self.limit_s) and self.limit_s > 0):
            raise ConfigError(f"--run-timeout must be a number of seconds above 0, got {self.limit_s:g}")
        if not self.metric:
            raise ConfigError("--metric must be the name of the loss in the log, got ''")

    def ways(self) -> list[tuple[str, ...]]:
        """Return the settings to compare, all with the same number of bytes, as options of ``holdfast run``."""
        common = ("--strategy", "partial", "--mirror-every", str(self.every), "--mirror-fraction", f"{self.fraction:g}")
        both = itertools.product(PREDICTORS, CODECS)
        return [(*common, "--mirror-predictor", predictor, "--mirror-codec", codec) for predictor, codec in both]

    def deaths(self, steps: int) -> list[tuple[int, int]]:
        """Return rank and step of each failure: any worker, after everything was saved once, in the run's first half.

        Raises:
            ConfigError: if the training has too few steps for that.
        """
        if steps // 2 <= self.every:
            raise ConfigError(
                f"a rehearsal needs a training of more than {2 * self.every + 1} steps, twice --mirror-every, got "
                f"{steps}: train for more steps, or give a smaller --mirror-every"
            )
        rng = random.Random(f"rehearsal {self.seed}")
        return [(rng.randrange(self.workers), rng.randrange(self.every, steps // 2)) for _ in range(self.failures)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalResult:
    """The cost of failures with one setting.

    Args:
        options: Options of ``holdfast run``.
        costs: Cost of each failure in iterations, compared with the failure-free run; without those that are not
            measurable.
        censored: Number of loss levels that a run never reached, so that its cost is a lower bound.
    """

    options: tuple[str, ...]
    costs: tuple[float, ...]
    censored: int

    @property
    def cost(self) -> float:
        """Return the mean cost."""
        return mean(self.costs)


def rehearse(this: Rehearsal, say: Say) -> list[RehearsalResult]:
    """Return the cost of failures with each setting, the lowest first.

    Args:
        this: The rehearsal.
        say: Called with a progress line for every run.

    Raises:
        ConfigError: if the training fails, or if its loss cannot be distinguished from noise after any of the failures.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-rehearsal-") as name:
        folder = Path(name)
        undisturbed = folder / "undisturbed"
        total = 1 + len(this.ways()) * this.failures
        numbers = itertools.count(1)

        def told(what: str) -> None:
            say(f"run {next(numbers)} of {total}: {what}")

        told("undisturbed")
        report = _run(this, undisturbed)
        deaths = this.deaths(report["steps_planned"] or 0)
        read_losses(undisturbed, this.metric)  # raises the error about a missing metric before the failures
        tried = []
        for number, way in enumerate(this.ways()):
            costs = [
                _cost(this, folder / f"{number}-{at}", undisturbed, way, death, told) for at, death in enumerate(deaths)
            ]
            known = [cost for cost in costs if cost["iterations"] is not None]
            if not known:
                raise ConfigError(
                    "after none of the failures does the loss fall by more than its noise; give more --failures, a "
                    "longer training, or one whose loss still falls"
                )
            iterations = tuple(cost["iterations"] for cost in known)
            tried.append(
                RehearsalResult(options=way, costs=iterations, censored=sum(cost["censored"] for cost in known))
            )
    return sorted(tried, key=lambda one: one.cost)


def _cost(
    this: Rehearsal, folder: Path, undisturbed: Path, way: Sequence[str], death: tuple[int, int], say: Say
) -> dict[str, Any]:
    rank, step = death
    say(f"worker {rank} killed in step {step}: {' '.join(way[2:])}")
    _run(this, folder, *way, "--inject", f"kill:rank={rank},step={step},phase=optimizer")
    return cost_against(folder, undisturbed, this.metric)


def _run(this: Rehearsal, folder: Path, *words: str) -> dict[str, Any]:
    """Run the training and return its report.

    Raises:
        ConfigError: if it fails or exceeds its time limit.
    """
    command = [sys.executable, "-m", "holdfast", "run", "-n", str(this.workers), "--fabric", "virtual"]
    command += ["--seed", str(this.seed), *words, "--no-page", "--report", str(folder), str(this.script), *this.args]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=own_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(this.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # started in its own session, so the group holds no other process
                process.wait()
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if code != 0:
        how = f"did not finish within {this.limit_s:g} s" if code is None else f"ended with exit status {code}"
        raise ConfigError(
            f"a run of {this.script} {how}: {(lines or ['no output'])[-1]}; to reproduce it: holdfast "
            f"{' '.join(command[3:])}"
        )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report
