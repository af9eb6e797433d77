"""Cost of whole slices after a kill: real jobs in which one of four workers is killed by SIGKILL."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import FAILED, MEASURED, Row, Task
from holdfast_lab.studies.processes import run_job

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that run in separate processes."""

WORKERS = 4
BATCH = 192
STEPS, STEP = 60, 25
"""Steps of a job, and the step of the kill."""
KILLED = 2
SAMPLE_S = 0.002
"""Seconds per sample: so much more than everything else that it dominates the step time."""
_WARM_UP_STEPS = 3
_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class WorkDivision:
    """How the work is divided among the survivors.

    Args:
        slices: Slices of a mini-batch, a multiple of :data:`WORKERS`.
        split: ``"slices"``, which are reassigned whole, or ``"even"``.
        spares: Number of hot spares.
    """

    slices: int
    split: str = "slices"
    spares: int = 0

    @property
    def name(self) -> str:
        """Return a description."""
        if self.spares:
            return f"{self.slices} whole slices, a spare"
        return "even split" if self.split == "even" else f"{self.slices} whole slices"

    @property
    def alive(self) -> int:
        """Number of workers that share the work after the kill."""
        return WORKERS - (0 if self.spares else 1)

    @property
    def imbalance(self) -> float:
        """Work of the slowest worker after the kill, relative to an even division."""
        if self.split == "even":
            return 1.0
        return -(-self.slices // self.alive) / (self.slices / self.alive)

    def words(self, seed: int) -> list[str]:
        """Return the command line after ``holdfast run``."""
        words = ["-n", WORKERS, "--slices", self.slices, "--split", self.split, "--spares", self.spares, "--seed", seed]
        words += ["--inject", f"kill:rank={KILLED},step={STEP}"]
        words += [SCRIPTS / "job.py", "--steps", STEPS, "--batch", BATCH, "--sample-s", SAMPLE_S]
        return [str(word) for word in words]


FEWEST, EVEN, SPARE = WorkDivision(WORKERS), WorkDivision(WORKERS, "even"), WorkDivision(WORKERS, spares=1)
DIVIDED = (FEWEST, WorkDivision(8), WorkDivision(12), WorkDivision(16), WorkDivision(32), EVEN, SPARE)


def goodput_tasks(runs: int, seed: int, *, quick: bool) -> list[Task]:
    """Return the jobs, ordered so that jobs of one kind are spread over time."""
    divided = (FEWEST, EVEN) if quick else DIVIDED
    return [
        Task(f"goodput: {one.name}, {number}", partial(_measure, one, seed + number, number))
        for number in range(runs)
        for one in divided
    ]


def _measure(divided: WorkDivision, seed: int, repetition: int, _: Sequence[Row]) -> list[Row]:
    about: Row = {"part": "goodput", "divided": divided.name, "workers": WORKERS, "alive": divided.alive}
    about |= {"slices": divided.slices, "expected": divided.imbalance, "repetition": repetition}
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        done = run_job(divided.words(seed), Path(name), _LIMIT_S)
    if done.failed:
        return [about | {"status": FAILED, "why": done.failed}]
    return [about | {"status": MEASURED} | after_the_kill(done.events, divided.alive)]


def after_the_kill(events: Sequence[Mapping[str, Any]], alive: int) -> Row:
    """Return the performance of a job from the kill to its end.

    Args:
        events: The records of the job.
        alive: Number of workers after the kill.

    Returns:
        ``samples_per_s``, committed samples per second from the kill to the end, detection and recovery included;
        ``goodput``, the same relative to the rate before the kill; ``recover_s``, seconds from the last step before the
        kill to the end of the step with the kill; and ``imbalance``, the step time after the kill relative to an even
        division of the work among the workers then alive.
    """
    commits: dict[int, tuple[float, int]] = {}
    for event in events:
        if event["event"] == "StepCommitted":
            commits[event["step"]] = (event["t_s"], event["samples"])
    begun_s, struck_s, end_s = commits[STEP - 1][0], commits[STEP][0], commits[max(commits)][0]
    before_s, after_s = _step_s(commits, _WARM_UP_STEPS, STEP - 1), _step_s(commits, STEP + 1, max(commits))
    samples_per_s = sum(samples for step, (_, samples) in commits.items() if step >= STEP) / (end_s - begun_s)
    return {
        "samples_per_s": samples_per_s,
        "goodput": samples_per_s / (BATCH / before_s),
        "recover_s": struck_s - begun_s,
        "before_s": before_s,
        "after_s": after_s,
        "imbalance": (after_s * alive) / (before_s * WORKERS),
    }


def _step_s(commits: Mapping[int, tuple[float, int]], first: int, last: int) -> float:
    """Return the median time of the steps after ``first``, up to ``last``."""
    return statistics.median(commits[b][0] - commits[a][0] for a, b in pairwise(range(first, last + 1)))
