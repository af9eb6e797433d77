"""The design of the guard study: the bit flips injected into training runs, and the clean training runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_lab.studies.campaign_plan import Cell
from holdfast_lab.studies.guard.setup import CRITICAL, MESSAGE, STRATA, TARGETS, WEIGHTS, GuardCase, GuardSetup

CRITICAL_PART, KINDS, LONGER, CLEAN, CLEAN_NETWORKS = (
    "the critical bit of weights",
    "every kind, every bit",
    "other networks",
    "clean",
    "clean, with a convolution",
)
QUICK = "the critical bit of every kind"

_CRITICAL_TRIALS = 4400
"""For each of two training runs: nearly half of the flips change the class, and 3,838 flips, all healed, show 99.9 %."""
_KIND_TRIALS = 60
_LONGER_TRIALS = 60
_QUICK_TRIALS = 20
_CLEAN_EPOCHS = 44
"""Epochs of 23 steps: 1,012 steps."""
_CLEAN_RUNS = 22
_CLEAN_NETWORK_RUNS = 6
_QUICK_CLEAN_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGroup:
    """A group of cells with the same number of trials.

    Args:
        name: Unique name.
        cells: The cells.
        trials: Trials of each cell.
        clean: Whether the runs are without bit flips.
    """

    name: str
    cells: tuple[Cell, ...]
    trials: int
    clean: bool = False


def parts(seed: int, *, quick: bool, trials: int | None) -> list[CellGroup]:
    """Return the whole design, the most important parts first.

    Args:
        seed: Seed of all training runs.
        quick: Whether to return only a design that takes about a minute.
        trials: Trials of each cell; None: the numbers of the design.
    """
    found = _quick(seed) if quick else list(_whole(seed))
    return found if trials is None else [dataclasses.replace(part, trials=trials) for part in found]


def _quick(seed: int) -> list[CellGroup]:
    setup = GuardSetup(optimizer="sgd", epochs=3, training_seed=seed)
    checked = dataclasses.replace(setup, sums=True)
    cells = (*(_cell(setup, target, CRITICAL) for target in TARGETS), _cell(checked, MESSAGE, CRITICAL))
    clean = (_clean(GuardSetup(epochs=_CLEAN_EPOCHS)),)
    return [
        CellGroup(name=QUICK, cells=cells, trials=_QUICK_TRIALS),
        CellGroup(name=CLEAN, cells=clean, trials=_QUICK_CLEAN_RUNS, clean=True),
    ]


def _whole(seed: int) -> Iterator[CellGroup]:
    small = [
        GuardSetup(optimizer="adam", workers=2, training_seed=seed),
        GuardSetup(optimizer="sgd", workers=4, training_seed=seed),
    ]
    struck = [(setup, target) for setup in small for target in TARGETS]
    struck += [(dataclasses.replace(setup, sums=True), MESSAGE) for setup in small]
    kinds = tuple(_cell(setup, target, bits) for setup, target in struck for bits in STRATA)
    yield CellGroup(name=KINDS, cells=kinds, trials=_KIND_TRIALS)
    clean = [
        GuardSetup(optimizer=o, workers=w, sums=w > 2, epochs=_CLEAN_EPOCHS) for o in ("adam", "sgd") for w in (2, 4)
    ]
    yield CellGroup(name=CLEAN, cells=tuple(map(_clean, clean)), trials=_CLEAN_RUNS, clean=True)
    # Shorter training runs give more trials per hour, and a harmful flip still shows after two epochs.
    short = [dataclasses.replace(setup, epochs=2) for setup in small]
    yield CellGroup(
        name=CRITICAL_PART, cells=tuple(_cell(s, WEIGHTS, CRITICAL) for s in short), trials=_CRITICAL_TRIALS
    )
    wide = GuardSetup(size=88, batch=16, warm=1, epochs=1, training_seed=seed)
    cnn = GuardSetup(network="cnn", optimizer="sgd", warm=3, epochs=2, training_seed=seed)
    longer = tuple(_cell(setup, WEIGHTS, CRITICAL) for setup in (wide, cnn))
    yield CellGroup(name=LONGER, cells=longer, trials=_LONGER_TRIALS)
    larger = [GuardSetup(network="cnn", optimizer=o, epochs=_CLEAN_EPOCHS) for o in ("adam", "sgd")]
    yield CellGroup(name=CLEAN_NETWORKS, cells=tuple(map(_clean, larger)), trials=_CLEAN_NETWORK_RUNS, clean=True)


def _cell(setup: GuardSetup, target: str, bits: str) -> Cell:
    case = GuardCase(target=target, bits=bits)
    return Cell(case.name(setup), case.settings(setup))


def _clean(setup: GuardSetup) -> Cell:
    return Cell(f"clean: {setup.name}", dataclasses.asdict(setup))
