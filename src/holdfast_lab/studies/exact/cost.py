"""Cost of the deterministic all-reduce without failures, in time and memory, compared with other ways to all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import FAILED, MEASURED, Row, Task
from holdfast_lab.studies.exact.workers.cost import ANY_ORDER, CERTIFICATE, DDP, FOLD, PLAIN, TREE, VARIANTS, WHOLE
from holdfast_lab.studies.processes import run_script
from holdfast_lab.studies.stats import bootstrap, median

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that run in separate processes."""

NETWORKS = ("mlp", "cnn", "gpt")
QUICK_NETWORK = "cnn"
BATCH = {"mlp": 128, "cnn": 128, "gpt": 32}
"""Mini-batch size in samples, for any number of workers."""
SHARES = (1, 2, 4, 8)
"""Slices per worker."""
_MORE_SLICES = tuple(variant for variant in VARIANTS if variant != CERTIFICATE)
"""Variants to time with several slices per worker: the cost of the certificate does not depend on the slices."""
_ROUNDS_OF_ONE = 60
"""Blocks of each variant with one slice per worker: the differences to measure there are as small as the noise."""
_START_S = 240.0
_ROUND_S = 60.0
"""Time limits in seconds, on a busy machine: of the start, and of a round of all variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTraining:
    """A training whose steps are timed.

    Args:
        network: Name of the network.
        workers: Number of workers.
        share: Slices per worker.
        rounds: Blocks of each variant; 0 measures only allocated memory.
        block_s: Approximate duration of a block in seconds.
        variants: Variants to time, in turns.
    """

    network: str
    workers: int
    share: int
    rounds: int = 16
    block_s: float = 0.3
    variants: tuple[str, ...] = VARIANTS

    @property
    def slices(self) -> int:
        """Number of slices of a mini-batch."""
        return self.workers * self.share

    def about(self, part: str) -> Row:
        """Return the columns common to all its rows."""
        names = {name: getattr(self, name) for name in ("network", "workers", "slices", "share", "rounds")}
        return {"part": part, **names, "batch": BATCH[self.network]}

    def words(self, out: Path) -> list[str]:
        """Return the command line of the script, after the interpreter."""
        words = [SCRIPTS / "cost.py", "--network", self.network, "--workers", self.workers]
        words += ["--slices", self.slices, "--batch", BATCH[self.network], "--rounds", self.rounds]
        return [str(word) for word in [*words, "--block-s", self.block_s, "--out", out, "--variants", *self.variants]]


def cost_tasks(networks: Sequence[str], seed: int, rounds: int | None = None, *, quick: bool) -> list[Task]:
    """Return the tasks that time steps, ``rounds`` blocks of each variant; None: the number of the design."""
    if quick:
        found = [
            TimedTraining(network=name, workers=2, share=share, rounds=4, block_s=0.1)
            for name in networks
            for share in (1, 4)
        ]
    else:
        found = [
            TimedTraining(network=name, workers=workers, share=share, rounds=_ROUNDS_OF_ONE)
            if share == 1
            else TimedTraining(network=name, workers=workers, share=share, variants=_MORE_SLICES)
            for name in networks
            for workers in (2, 4)
            for share in SHARES
        ]
    found = found if rounds is None else [replace(one, rounds=rounds) for one in found]
    return [
        Task(f"cost: {one.network}, {one.workers} workers, {one.slices} slices", partial(_time, one, seed))
        for one in found
    ]


def memory_tasks(networks: Sequence[str], *, quick: bool) -> list[Task]:
    """Return the tasks that measure allocated memory."""
    shares, workers = ((2,), 2) if quick else (SHARES, 4)
    found = [
        TimedTraining(network=name, workers=workers, share=share, rounds=0, variants=(FOLD, TREE, DDP))
        for name in networks
        for share in shares
    ]
    return [Task(f"memory: {one.network}, {one.slices} slices", partial(_weigh, one)) for one in found]


def _found(timed: TimedTraining) -> dict[str, Any]:
    """Return the results of the workers; without any, the status and the reason."""
    found = run_script(timed.workers, timed.words, _START_S + _ROUND_S * timed.rounds)
    return {"status": FAILED, "why": found["failed"]} if found.get("failed") else found


def _time(timed: TimedTraining, seed: int, _: Sequence[Row]) -> list[Row]:
    about, found = timed.about("cost"), _found(timed)
    if "status" in found:
        return [about | found]
    return cost_rows(about | {"parameters": found["parameters"]}, found["blocks"], seed)


def cost_rows(about: Row, blocks: dict[str, list[float]], seed: int) -> list[Row]:
    """Return a row for each variant: its step time, and its ratios to other variants.

    Ratios are taken within a round, because a whole round may be slower than other rounds.

    Args:
        about: Columns common to all rows.
        blocks: Mean step time in seconds of each block, by variant; blocks of one round have the same index.
        seed: Seed of the bootstrap.
    """
    quickest = min(ANY_ORDER, key=lambda variant: median(blocks[variant]))
    rows: list[Row] = []
    for variant, times in blocks.items():
        row = about | {"status": MEASURED, "variant": variant, "step_s": median(times), "any_order": quickest}
        for name, base in (("any", quickest), ("fold", FOLD), ("plain", PLAIN), ("ddp", DDP), ("whole", WHOLE)):
            ratios = [time / other for time, other in zip(times, blocks[base], strict=True)]
            low, high = bootstrap([ratios], lambda drawn: median(drawn[0]), seed)
            row |= {f"to_{name}": median(ratios), f"to_{name}_low": low, f"to_{name}_high": high}
        rows.append(row)
    return rows


def _weigh(timed: TimedTraining, _: Sequence[Row]) -> list[Row]:
    about, found = timed.about("memory"), _found(timed)
    if "status" in found:
        return [about | found]
    return memory_rows(about, found["parameters"], found["bytes"])


def memory_rows(about: Row, parameters: int, sizes: dict[str, dict[str, int]]) -> list[Row]:
    """Return the memory of the all-reduce on the machine, and its expected size.

    Expected are one gradient per slice and one for the result.
    DDP has in every worker its buckets, and the gradients that it copies into them.
    """
    gradient = 4 * parameters
    rows: list[Row] = []
    for variant, parts in sizes.items():
        expected = 2 * about["workers"] * gradient if variant == DDP else (about["slices"] + 1) * gradient
        row = about | {"status": MEASURED, "variant": variant, "parameters": parameters, "bytes": sum(parts.values())}
        rows.append(row | {"expected_bytes": expected, "gradient_bytes": gradient})
    return rows
