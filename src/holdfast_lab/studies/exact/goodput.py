"""What keeping slices whole costs after a kill: real jobs, in which one worker of four is killed by SIGKILL."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row, Task
from holdfast_lab.studies.parallelism.jobs import ended, own_environment

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that run in processes of their own."""

WORKERS = 4
BATCH = 192
STEPS, STEP = 60, 25
"""Steps of a job, and the one in which the kill strikes."""
KILLED = 2
SAMPLE_S = 0.002
"""What a sample takes its worker: so much more than anything else that it alone decides."""
_WARM_UP_STEPS = 3
_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Divided:
    """How the work is divided among those who are left.

    Args:
        slices: Of a mini-batch, a multiple of :data:`WORKERS`.
        split: ``"slices"``, which change hands whole, or ``"even"``.
        spares: Workers that take the place of who dies.
    """

    slices: int
    split: str = "slices"
    spares: int = 0

    @property
    def name(self) -> str:
        """Return it in words."""
        if self.spares:
            return f"{self.slices} whole slices, a spare"
        return "even split" if self.split == "even" else f"{self.slices} whole slices"

    @property
    def alive(self) -> int:
        """How many share the work after the kill."""
        return WORKERS - (0 if self.spares else 1)

    @property
    def imbalance(self) -> float:
        """What the slowest has to do after the kill, over what each had to if all had the same."""
        if self.split == "even":
            return 1.0
        return -(-self.slices // self.alive) / (self.slices / self.alive)

    def words(self, folder: Path, seed: int) -> list[str]:
        """Return the command line, behind ``holdfast run``."""
        words = ["-n", WORKERS, "--slices", self.slices, "--split", self.split, "--spares", self.spares, "--seed", seed]
        words += ["--no-page", "--report", folder / "report", "--inject", f"kill:rank={KILLED},step={STEP}"]
        words += [SCRIPTS / "job.py", "--steps", STEPS, "--batch", BATCH, "--sample-s", SAMPLE_S]
        return [str(word) for word in words]


FEWEST, EVEN, SPARE = Divided(WORKERS), Divided(WORKERS, "even"), Divided(WORKERS, spares=1)
DIVIDED = (FEWEST, Divided(8), Divided(12), Divided(16), Divided(32), EVEN, SPARE)


def goodput_tasks(runs: int, seed: int, *, quick: bool) -> list[Task]:
    """Return the jobs, so that those of one kind lie apart in time."""
    divided = (FEWEST, EVEN) if quick else DIVIDED
    return [
        Task(f"goodput: {one.name}, {number}", partial(_measure, one, seed + number, number))
        for number in range(runs)
        for one in divided
    ]


def _measure(divided: Divided, seed: int, repetition: int, _: Sequence[Row]) -> list[Row]:
    about: Row = {"part": "goodput", "divided": divided.name, "workers": WORKERS, "alive": divided.alive}
    about |= {"slices": divided.slices, "expected": divided.imbalance, "repetition": repetition}
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "holdfast", "run", *divided.words(folder, seed)]
        code, said = ended(words, own_environment(), folder, _LIMIT_S)
        if code:
            return [about | {"status": NOT_RUN, "why": f"ended with {code}: {said}"}]
        lines = (folder / "report" / "events.jsonl").read_text().splitlines()
    return [about | {"status": MEASURED} | after_the_kill([json.loads(line) for line in lines], divided.alive)]


def after_the_kill(events: Sequence[Mapping[str, Any]], alive: int) -> Row:
    """Return what a job did from the kill to its end.

    Args:
        events: Its records.
        alive: How many shared the work then.

    Returns:
        ``samples_per_s`` that were committed from the kill on, detection and recovery included; ``goodput``, the same over
        that before the kill; ``recover_s``, from the last step before it to the end of the one that it struck; and
        ``imbalance``, by how much steps are longer than all workers' together would be if each had the same to do.
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
    """Return what a step takes, the median of those after ``first`` up to ``last``."""
    return statistics.median(commits[b][0] - commits[a][0] for a, b in pairwise(range(first, last + 1)))
