"""Rehearsing failures of a training of one's own: with which way of keeping copies do they cost least?

The training is run once undisturbed, and then with each way, the same worker dying in the same step. All workers are virtual,
so one process plays them, and what it loses and restores has the bits that real workers would have.
"""

from __future__ import annotations

import itertools
import json
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

from holdfast.checkpoint.priority import PREDICTORS, Saving
from holdfast.checkpoint.priority_codec import CODECS
from holdfast.errors import ConfigError
from holdfast.report.against import cost_against
from holdfast_lab.studies.parallelism.jobs import own_environment

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is rehearsed.

    Args:
        script: The training script; it logs the metric in every step, and its model is split.
        args: Its arguments.
        workers: How many, ``>= 2``.
        every: C of the running checkpoint; see :class:`~holdfast.checkpoint.priority.Saving`.
        fraction: r of it.
        failures: How many, each in a run of its own.
        seed: Of the job, and of who dies when.
        metric: What the loss is called in the log.
        limit_s: A run that takes longer is ended.

    Raises:
        ConfigError: if blocks cannot be saved so.
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
        Saving(every=self.every, fraction=self.fraction)

    def ways(self) -> list[tuple[str, ...]]:
        """Return the ways that are tried, at equal bytes, each as the options of ``holdfast run`` that ask for it."""
        common = ("--strategy", "partial", "--mirror-every", str(self.every), "--mirror-fraction", f"{self.fraction:g}")
        both = itertools.product(PREDICTORS, CODECS)
        return [(*common, "--mirror-predictor", predictor, "--mirror-codec", codec) for predictor, codec in both]

    def deaths(self, steps: int) -> list[tuple[int, int]]:
        """Return who dies in which step: any worker, when all has been saved once, and the loss still has half of the run to fall.

        Raises:
            ConfigError: if the training has too few steps for that.
        """
        if steps // 2 <= self.every:
            raise ConfigError(
                f"a training must have more than {2 * self.every + 1} steps, twice --mirror-every, to be rehearsed, got {steps}: give it more, or a smaller --mirror-every"
            )
        rng = random.Random(f"rehearsal {self.seed}")
        return [(rng.randrange(self.workers), rng.randrange(self.every, steps // 2)) for _ in range(self.failures)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What failures cost with one way.

    Args:
        options: Of ``holdfast run``.
        costs: Of each failure, in iterations against the undisturbed run; those that could be told.
        censored: Levels of the loss that a run never came to: what it cost is a lower bound.
    """

    options: tuple[str, ...]
    costs: tuple[float, ...]
    censored: int

    @property
    def cost(self) -> float:
        """Return the mean cost."""
        return mean(self.costs)


def rehearse(this: Rehearsal, say: Say) -> list[Tried]:
    """Return what failures cost with each way, the least first.

    Args:
        this: What is rehearsed.
        say: Is told of every run that begins.

    Raises:
        ConfigError: if the training fails, or its loss cannot be told from its noise after any of the failures.
    """
    if not this.script.is_file():
        raise ConfigError(f"there is no script {str(this.script)!r}")
    with tempfile.TemporaryDirectory(prefix="holdfast-rehearsal-") as name:
        folder = Path(name)
        undisturbed = folder / "undisturbed"
        say("undisturbed")
        report = _run(this, undisturbed)
        deaths = this.deaths(report["steps_planned"] or 0)
        tried = []
        for number, way in enumerate(this.ways()):
            costs = [
                _cost(this, folder / f"{number}-{at}", undisturbed, way, death, say) for at, death in enumerate(deaths)
            ]
            told = [cost for cost in costs if cost["iterations"] is not None]
            if not told:
                raise ConfigError(
                    "the loss falls nowhere after the failures by more than chance; give more --failures, a longer training, or one that still learns"
                )
            iterations = tuple(cost["iterations"] for cost in told)
            tried.append(Tried(options=way, costs=iterations, censored=sum(cost["censored"] for cost in told)))
    return sorted(tried, key=lambda one: one.cost)


def _cost(
    this: Rehearsal, folder: Path, undisturbed: Path, way: Sequence[str], death: tuple[int, int], say: Say
) -> dict[str, Any]:
    rank, step = death
    say(f"worker {rank} dies in step {step}: {' '.join(way[2:])}")
    _run(this, folder, *way, "--inject", f"kill:rank={rank},step={step},phase=optimizer")
    return cost_against(folder, undisturbed, this.metric)


def _run(this: Rehearsal, folder: Path, *words: str) -> dict[str, Any]:
    """Run the training, and return its report.

    Raises:
        ConfigError: if it fails, or takes too long.
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
                os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in it
                process.wait()
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if code != 0:
        how = f"was not done after {this.limit_s:g} s" if code is None else f"ended with {code}"
        raise ConfigError(
            f"a run of {this.script} {how}: {(lines or ['it said nothing'])[-1]}; try it: holdfast {' '.join(command[3:])}"
        )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report
