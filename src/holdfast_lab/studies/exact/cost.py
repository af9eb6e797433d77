"""What sums in order cost while nothing fails, in time and in memory: real processes, the same training summed in several ways."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row, Task
from holdfast_lab.studies.exact.workers.cost import ANY_ORDER, CERTIFICATE, DDP, FOLD, PLAIN, TREE, VARIANTS, WHOLE
from holdfast_lab.studies.guard.cost import NO_MPIRUN, mpirun_words
from holdfast_lab.studies.parallelism.jobs import ended, own_environment
from holdfast_lab.studies.stats import bootstrap, median

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that run in processes of their own."""

NETWORKS = ("mlp", "cnn", "gpt")
QUICK_NETWORK = "cnn"
BATCH = {"mlp": 128, "cnn": 128, "gpt": 32}
"""Samples of a mini-batch, whatever the number of workers."""
SHARES = (1, 2, 4, 8)
"""Slices of a worker."""
_MORE_SLICES = tuple(variant for variant in VARIANTS if variant != CERTIFICATE)
"""What takes turns where a worker has several slices: what the certificate costs does not depend on them."""
_ROUNDS_OF_ONE = 60
"""Blocks of each variant where a worker has one slice: there differences are looked for that are as small as the noise."""
_START_S = 240.0
_ROUND_S = 60.0
"""A round of all variants may take so long, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A training whose steps are timed.

    Args:
        network: Which.
        workers: How many.
        share: Slices of each of them.
        rounds: Blocks of each variant; 0 looks at what is allocated alone.
        block_s: How long a block lasts, about.
        variants: Which take turns.
    """

    network: str
    workers: int
    share: int
    rounds: int = 16
    block_s: float = 0.3
    variants: tuple[str, ...] = VARIANTS

    @property
    def slices(self) -> int:
        """Those of a mini-batch."""
        return self.workers * self.share

    def about(self, part: str) -> Row:
        """Return the columns that all its rows have."""
        names = {name: getattr(self, name) for name in ("network", "workers", "slices", "share", "rounds")}
        return {"part": part, **names, "batch": BATCH[self.network]}

    def words(self, out: Path) -> list[str]:
        """Return the command line of the script, behind its interpreter."""
        words = [SCRIPTS / "cost.py", "--network", self.network, "--workers", self.workers]
        words += ["--slices", self.slices, "--batch", BATCH[self.network], "--rounds", self.rounds]
        return [str(word) for word in [*words, "--block-s", self.block_s, "--out", out, "--variants", *self.variants]]


def cost_tasks(networks: Sequence[str], seed: int, *, quick: bool) -> list[Task]:
    """Return what is timed."""
    if quick:
        found = [
            Timed(network=name, workers=2, share=share, rounds=4, block_s=0.1) for name in networks for share in (1, 4)
        ]
    else:
        found = [
            Timed(network=name, workers=workers, share=share, rounds=_ROUNDS_OF_ONE)
            if share == 1
            else Timed(network=name, workers=workers, share=share, variants=_MORE_SLICES)
            for name in networks
            for workers in (2, 4)
            for share in SHARES
        ]
    return [
        Task(f"cost: {one.network}, {one.workers} workers, {one.slices} slices", partial(_time, one, seed))
        for one in found
    ]


def memory_tasks(networks: Sequence[str], *, quick: bool) -> list[Task]:
    """Return where is looked what is allocated."""
    shares, workers = ((2,), 2) if quick else (SHARES, 4)
    found = [
        Timed(network=name, workers=workers, share=share, rounds=0, variants=(FOLD, TREE, DDP))
        for name in networks
        for share in shares
    ]
    return [Task(f"memory: {one.network}, {one.slices} slices", partial(_weigh, one)) for one in found]


def _found(timed: Timed) -> dict[str, Any] | str:
    """Return what the workers wrote down, or why they did not."""
    mpirun = mpirun_words(timed.workers)
    if not mpirun:
        return NO_MPIRUN
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        out = Path(name, "found.json")
        limit_s = _START_S + _ROUND_S * timed.rounds
        code, said = ended([*mpirun, *timed.words(out)], own_environment(), Path(name), limit_s)
        if code or not out.is_file():
            return f"ended with {code}: {said}"
        found: dict[str, Any] = json.loads(out.read_text())
        return found["failed"] or found


def _time(timed: Timed, seed: int, _: Sequence[Row]) -> list[Row]:
    about, found = timed.about("cost"), _found(timed)
    if isinstance(found, str):
        return [about | {"status": NOT_RUN, "why": found}]
    return cost_rows(about | {"parameters": found["parameters"]}, found["blocks"], seed)


def cost_rows(about: Row, blocks: dict[str, list[float]], seed: int) -> list[Row]:
    """Return a row of each variant: its step, and its ratios to others' within a round, which may be slower than the others altogether.

    Args:
        about: What all rows have.
        blocks: By variant, the mean step of each block, seconds; those of one round have the same place.
        seed: Of the bootstrap.
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


def _weigh(timed: Timed, _: Sequence[Row]) -> list[Row]:
    about, found = timed.about("memory"), _found(timed)
    if isinstance(found, str):
        return [about | {"status": NOT_RUN, "why": found}]
    return memory_rows(about, found["parameters"], found["bytes"])


def memory_rows(about: Row, parameters: int, sizes: dict[str, dict[str, int]]) -> list[Row]:
    """Return what sums take on the machine, beside what they should: a gradient for each slice and one for the result.

    DDP has at every worker its buckets, and the gradients that it copies into them.
    """
    gradient = 4 * parameters
    rows: list[Row] = []
    for variant, parts in sizes.items():
        expected = 2 * about["workers"] * gradient if variant == DDP else (about["slices"] + 1) * gradient
        row = about | {"status": MEASURED, "variant": variant, "parameters": parameters, "bytes": sum(parts.values())}
        rows.append(row | {"expected_bytes": expected, "gradient_bytes": gradient})
    return rows
