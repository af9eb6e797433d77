"""What a campaign is: cells, of each of which trials are made until it has enough; and what it asks of its trials."""

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
    """A setting of which many trials are made.

    Args:
        name: Unique in the campaign.
        settings: What JSON can hold; given to ``prepare``, and in every row.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When a cell has enough trials.

    Args:
        width: When the 95 % interval (Wilson) of every outcome's share reaches at most so far to each side, from 0 to 1. A
            rule that looks again and again stops at a lucky moment now and then: the interval it leaves is a little too narrow.
        batch: It is looked at after so many trials, twice so many, and so on, ``>= 1``.
        least: But not before so many.
        most: After so many it ends in any case, ``>= least``.
    """

    width: float
    batch: int = 20
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.width <= 1:
            raise ConfigError(f"width must be from 0 to 1, got {self.width}: half of an interval of a share")
        if not (self.batch >= 1 and 1 <= self.least <= self.most):
            raise ConfigError(
                "batch must be at least 1, and least from 1 to most, "
                f"got batch = {self.batch}, least = {self.least}, most = {self.most}"
            )

    def is_enough(self, outcomes: Sequence[str]) -> bool:
        """Return whether these first trials say enough."""
        if len(outcomes) >= self.most:
            return True
        widest = max((share.high - share.low) / 2 for share in shares(outcomes).values())
        return len(outcomes) >= self.least and widest <= self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is asked, and how a trial is made.

    Args:
        name: Of the campaign.
        seed: Of all trials.
        cells: Their names differ.
        prepare: Makes the warm state of a cell from its settings, in each process that needs it, one cell at a time: what a
            trial starts from, such as a model at the epoch of the restart (:class:`holdfast_lab.studies.warm.Held`), the data,
            the outcome of the undisturbed run. Importable, and must give the same bits in every process. What cells
            have in common it may keep, as with :func:`functools.cache`.
        trial: Makes a trial from a warm state and a seed, which it must leave as good as new for the next. Importable. What
            it returns has an ``outcome``, and whatever else JSON can hold, under other names than those of the table's
            columns and of the cell's settings. If it raises, the outcome is TF, and the row has the ``error``; but an
            InternalError ends the campaign.
        stop: When a cell has enough.
        limit_s: A trial that takes longer is one that killed its process; None: it may take as long as it likes.
    """

    name: str
    seed: int
    cells: Sequence[Cell]
    prepare: Callable[[Mapping[str, Any]], Any]
    trial: Callable[[Any, int], Mapping[str, Any]]
    stop: Stop
    limit_s: float | None = None

    def settings(self) -> dict[str, Any]:
        """Return what decides about every row, beside the settings of its cell."""
        stop = {name: getattr(self.stop, name) for name in ("width", "batch", "least", "most")}
        return {"campaign": self.name, "seed": self.seed, **stop, "limit_s": self.limit_s}

    def checked_cells(self) -> list[Cell]:
        """Return the cells, with their settings as they come back from a file.

        Raises:
            ConfigError: if a name is there twice.
        """
        twice = [name for name, count in Counter(cell.name for cell in self.cells).items() if count > 1]
        if twice:
            raise ConfigError(f"cells of a campaign must have different names, got twice: {', '.join(twice)}")
        return [Cell(cell.name, json.loads(json.dumps(dict(cell.settings), allow_nan=False))) for cell in self.cells]


def seed_of(seed: int, cell: str, number: int) -> int:
    """Return the seed of a trial: 63 bits that depend on all three, the same on every machine."""
    text = json.dumps([seed, cell, number]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def found_by(trial: Callable[[Any, int], Mapping[str, Any]], warm: Any, seed: int) -> dict[str, Any]:
    """Return what a trial found; one that raises has found that training fails."""
    try:
        return dict(trial(warm, seed))
    except InternalError:  # the mistake is ours, and nothing is known of the training
        raise
    except (Exception, SystemExit) as error:
        return {"outcome": TF, "error": f"{type(error).__name__}: {error}"}


def check_alone(campaign: Campaign, cell: Cell, trials: int = 3) -> None:
    """Check that a trial finds the same from a new warm state as after others, in two orders.

    Args:
        campaign: Any.
        cell: One of its.
        trials: How many of the cell's are made, three times each.

    Raises:
        InternalError: if one does not: the trial does not put back what it alters, or draws from more than its seed.
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
