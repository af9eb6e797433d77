"""The definition of a campaign: its cells, its stopping rule, and the contract of a trial."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, InternalError
from holdfast_lab.studies.campaign_table import as_json
from holdfast_lab.studies.explain import shares
from holdfast_lab.studies.outcomes import TF


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting that many trials are run with.

    Args:
        name: Its name, unique in the campaign.
        settings: JSON values; passed to ``prepare``, and part of every row.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The stopping rule: when a cell has enough trials.

    Args:
        width: Stop when the half-width of the 95 % interval (Wilson) of every outcome's share is at most this, from 0
            to 1. A rule that is checked repeatedly stops early by chance now and then, so the final interval is
            slightly too narrow.
        batch: Check the rule after every so many trials, ``>= 1``.
        least: Minimum number of trials.
        most: Maximum number of trials, ``>= least``.
    """

    width: float
    batch: int = 20
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.width <= 1:
            raise ConfigError(
                f"width must be from 0 to 1, got {self.width}: it is the half-width of a share's interval"
            )
        if not (self.batch >= 1 and 1 <= self.least <= self.most):
            raise ConfigError(
                "batch must be at least 1, and least from 1 to most, "
                f"got batch = {self.batch}, least = {self.least}, most = {self.most}"
            )

    def is_enough(self, outcomes: Sequence[str]) -> bool:
        """Return whether the outcomes of the first trials are enough."""
        if len(outcomes) >= self.most:
            return True
        widest = max((share.high - share.low) / 2 for share in shares(outcomes).values())
        return len(outcomes) >= self.least and widest <= self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A campaign: its cells, and the functions that run a trial.

    Args:
        name: Name of the campaign.
        seed: Seed that all trial seeds are derived from.
        cells: Cells with distinct names.
        prepare: Builds the warm state of a cell from its settings: the state that a trial starts from, such as a model
            at the restart epoch (:class:`holdfast_lab.studies.warm.HeldTraining`), the data, and the outcome of the
            failure-free run. Called in each process that needs it, one cell at a time. It must be importable and give
            the same bits in every process. It may cache what cells share, for example with :func:`functools.cache`.
        trial: Runs a trial from a warm state and a seed, and must restore the warm state for the next trial. It must be
            importable. It returns an ``outcome`` and any other JSON values, under names that are neither columns of the
            table nor settings of the cell. If it raises, the outcome is TF and the row holds the ``error``; an
            InternalError ends the campaign.
        stop: The stopping rule.
        limit_s: Time limit of a trial in seconds; a trial that exceeds it counts as one that killed its process. None:
            no limit.
    """

    name: str
    seed: int
    cells: Sequence[Cell]
    prepare: Callable[[Mapping[str, Any]], Any]
    trial: Callable[[Any, int], Mapping[str, Any]]
    stop: StopRule
    limit_s: float | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine every row, besides those of its cell."""
        stop = {name: getattr(self.stop, name) for name in ("width", "batch", "least", "most")}
        return {"campaign": self.name, "seed": self.seed, **stop, "limit_s": self.limit_s}

    def checked_cells(self) -> list[Cell]:
        """Return the cells, with their settings after a JSON round trip.

        Raises:
            ConfigError: if two cells have the same name.
        """
        twice = [name for name, count in Counter(cell.name for cell in self.cells).items() if count > 1]
        if twice:
            raise ConfigError(f"cells of a campaign must have distinct names, got twice: {', '.join(twice)}")
        return [Cell(cell.name, json.loads(json.dumps(dict(cell.settings), allow_nan=False))) for cell in self.cells]


OWN_BUGS = (InternalError, AttributeError, ImportError, NameError)
"""Exceptions that say nothing about a training: wrong numbers in it raise none of them, a bug of the study does."""


def seed_of(seed: int, cell: str, number: int) -> int:
    """Return the seed of a trial: 63 bits derived from all three arguments, the same on every machine."""
    text = json.dumps([seed, cell, number]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def found_by(trial: Callable[[Any, int], Mapping[str, Any]], warm: Any, seed: int) -> dict[str, Any]:
    """Return the result of a trial; an exception counts as a failed training, unless it is one of :data:`OWN_BUGS`."""
    try:
        return dict(trial(warm, seed))
    except OWN_BUGS:
        raise
    except (Exception, SystemExit) as error:
        return {"outcome": TF, "error": f"{type(error).__name__}: {error}"}


def check_alone(campaign: Campaign, cell: Cell, trials: int = 3) -> None:
    """Check that a trial gives the same result from a new warm state as after other trials, in two orders.

    Args:
        campaign: The campaign.
        cell: One of its cells.
        trials: Number of trials to run, three times each.

    Raises:
        InternalError: if results differ: the trial does not restore what it changes, or draws from more than its seed.
    """
    seeds = [seed_of(campaign.seed, cell.name, number) for number in range(trials)]
    alone = {seed: found_by(campaign.trial, campaign.prepare(cell.settings), seed) for seed in seeds}
    warm = campaign.prepare(cell.settings)
    for seed in [*seeds, *reversed(seeds)]:
        after = found_by(campaign.trial, warm, seed)
        for name in alone[seed] | after:
            values = [as_json(found.get(name)) for found in (alone[seed], after)]
            if values[0] != values[1]:
                raise InternalError(
                    f"trial {seeds.index(seed)} of cell {cell.name!r} depends on those before it in its process: "
                    f"{name} is {values[0]} alone, {values[1]} after others"
                )
