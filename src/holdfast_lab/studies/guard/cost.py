"""Cost of the guard in clean steps: two real processes run the same training with and without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast_lab.studies.base import MEASURED, Row, Task
from holdfast_lab.studies.processes import run_script
from holdfast_lab.studies.stats import bootstrap, median

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that run in separate processes."""

WORKERS_OF_IT = 2
_START_S = 300.0
_STEP_S = 2.0
"""Time limit of a step in seconds, on a busy machine."""
_VARIANTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGuardTraining:
    """A training whose steps are timed.

    Args:
        name: Description.
        size: Height and width of the images in pixels.
        samples: Number of samples in the dataset.
        batch: Mini-batch size in samples.
        blocks: Blocks of each variant.
        steps: Steps of a block, more than the longest check rotation.
    """

    name: str
    size: int = 8
    samples: int = 1024
    batch: int = 64
    blocks: int = 12
    steps: int = 70

    def words(self, out: Path) -> list[object]:
        """Return the script, and its arguments."""
        words: list[object] = [SCRIPTS / "cost.py", "--size", self.size, "--samples", self.samples]
        return [*words, "--batch", self.batch, "--blocks", self.blocks, "--steps", self.steps, "--out", out]


SMALL = TimedGuardTraining(name="mlp, 26 thousand parameters")
LARGE = TimedGuardTraining(name="mlp, 8.4 million parameters", size=256, samples=256)


def cost_tasks(seed: int, blocks: int | None = None, *, quick: bool) -> list[Task]:
    """Return the tasks that time steps, ``blocks`` of each variant; None: the number of the design."""
    timed = [TimedGuardTraining(name=SMALL.name, blocks=6)] if quick else [SMALL, LARGE]
    timed = timed if blocks is None else [replace(one, blocks=blocks) for one in timed]
    return [Task(f"cost: {one.name}", partial(_task, one, seed)) for one in timed]


def _task(timed: TimedGuardTraining, seed: int, _: Sequence[Row]) -> list[Row]:
    about: Row = {"part": "cost", "training": timed.name, "workers": WORKERS_OF_IT, "blocks": timed.blocks}
    limit_s = _START_S + _STEP_S * _VARIANTS * (timed.blocks + 1) * timed.steps
    found = run_script(WORKERS_OF_IT, timed.words, limit_s)
    if "status" in found:
        return [about | found]
    return cost_rows(about | {"parameters": found["parameters"]}, found["blocks"], seed)


def cost_rows(about: Row, blocks: dict[str, list[float]], seed: int) -> list[Row]:
    """Return a row for each variant: its step time, and its ratio to that without the guard, taken within each round.

    Args:
        about: Columns common to all rows.
        blocks: Mean step time in seconds of each block, by variant; blocks of one round have the same index.
        seed: Seed of the bootstrap.
    """
    rows: list[Row] = []
    for guard, times in blocks.items():
        ratios = [mine / without for mine, without in zip(times, blocks["off"], strict=True)]
        low, high = bootstrap([ratios], lambda drawn: median(drawn[0]), seed)
        more_s = statistics.median(mine - without for mine, without in zip(times, blocks["off"], strict=True))
        row = about | {"status": MEASURED, "guard": guard, "step_s": median(times), "more_s": more_s}
        rows.append(row | {"ratio": median(ratios), "ratio_low": low, "ratio_high": high})
    return rows
