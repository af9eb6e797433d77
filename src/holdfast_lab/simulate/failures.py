"""Who is down, and when: it never depends on the job.

Every unit, a worker, a node or a rack, lives, fails and is repaired by itself. So a history is drawn once, as a list of
outages, and every strategy meets the same one. A worker is down as long as anything that it is part of is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, NS, check_choice, check_range
from holdfast_lab.simulate.cluster import LEVELS, Cluster
from holdfast_lab.simulate.distributions import Constant, Distribution, Exponential

Ticks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outages:
    """A history of one cluster, in the order of time. All arrays have the shape ``(outages,)``.

    Args:
        start: When it goes down, nanoseconds.
        end: When it is repaired, not before ``start``.
        first: The first worker that is down.
        width: How many are.
    """

    start: Ticks
    end: Ticks
    first: Ticks
    width: Ticks

    @classmethod
    def of(cls, start: Ticks, end: Ticks, first: Ticks, width: Ticks) -> Outages:
        """Return them in the order of time; of those at the same time, the lower worker is first."""
        order = np.lexsort((width, first, start))
        return cls(start[order], end[order], first[order], width[order])

    def __len__(self) -> int:
        return len(self.start)

    def ready(self, spawn: int) -> Ticks:
        """Return when a new worker waits where each outage was, ``spawn`` nanoseconds after its end.

        No two are at the same time: where they would be, the later ones wait a nanosecond.
        """
        at = self.end + spawn
        order = np.argsort(at, kind="stable")
        steps = np.arange(len(at))
        apart = np.maximum.accumulate(at[order] - steps) + steps
        result = np.empty_like(at)
        result[order] = apart
        return result


class Down(Protocol):
    """Says who is down and when."""

    def draw(self, cluster: Cluster, horizon_s: float, seed: tuple[int, int]) -> Outages:
        """Return the outages that begin before ``horizon_s``.

        Args:
            cluster: Whose.
            horizon_s: Seconds.
            seed: Of the study, and the number of the repetition: same numbers, same outages.
        """
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """One reason for which units fail, and how long they are down for it.

    Args:
        level: ``"worker"``, ``"node"`` or ``"rack"``: what fails as a whole.
        lifetime: Of one unit, from its repair to its next failure.
        repair: How long it is down; by default no time: the process is gone, the machine is not.
        age_s: How old the units are at the beginning, ``>= 0``.

    Raises:
        ConfigError: if there is no such level, or units would fail without end at one moment.
    """

    level: str
    lifetime: Distribution
    repair: Distribution = field(default_factory=lambda: Constant(0.0))
    age_s: float = 0.0

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)
        check_range("age_s", self.age_s, 0, most=LONGEST_S)
        if not self.lifetime.mean_s > 0:
            raise ConfigError(f"the mean lifetime of a {self.level} must be more than 0, got {self.lifetime.mean_s:g}")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures from distributions; the sources do not know of each other.

    Args:
        sources: Any number; none means that nothing fails.
    """

    sources: tuple[Source, ...] = ()

    @classmethod
    def of_count(
        cls, number: int, *, span_s: float, units: int, level: str = "node", repair: Distribution | None = None
    ) -> Failures:
        """Return failures without memory that come as often as they were counted.

        Args:
            number: Of failures, ``>= 1``.
            span_s: In so many seconds.
            units: Of so many workers, nodes or racks.
            level: Which of these.
            repair: How long one is down; by default no time.

        Raises:
            ConfigError: if a number is out of range.
        """
        check_range("number of failures", number, 1)
        check_range("span_s", span_s, 0, above=True)
        check_range("units", units, 1)
        return cls((Source(level, Exponential(span_s * units / number), repair or Constant(0.0)),))

    def draw(self, cluster: Cluster, horizon_s: float, seed: tuple[int, int]) -> Outages:
        """Return the outages that begin before ``horizon_s``: each source has random numbers of its own."""
        drawn = [
            _draw(source, cluster, horizon_s, np.random.default_rng((*seed, number)))
            for number, source in enumerate(self.sources)
        ]
        columns = [np.concatenate([d[i] for d in drawn] or [np.empty(0, np.int64)]) for i in range(4)]
        return Outages.of(*columns)

    def mtbf_s(self, cluster: Cluster) -> float:
        """Return the mean time between two failures of anything, seconds; that of a unit is divided by their number."""
        rates = [cluster.units(s.level) / (s.lifetime.mean_s + s.repair.mean_s) for s in self.sources]
        return 1 / sum(rates) if rates else float("inf")


def _draw(
    source: Source, cluster: Cluster, horizon_s: float, rng: np.random.Generator
) -> tuple[Ticks, Ticks, Ticks, Ticks]:
    """Return start, end, first worker and width of the outages from one source."""
    units, width = cluster.units(source.level), cluster.width(source.level)
    horizon = round(horizon_s * NS)
    starts, ends, whose = [], [], []
    unit = np.arange(units)
    at = _ticks(source.lifetime.draw(rng, units, source.age_s))
    while (hit := at < horizon).any():
        unit, start = unit[hit], at[hit]
        end = start + _ticks(source.repair.draw(rng, len(unit)))
        starts.append(start)
        ends.append(end)
        whose.append(unit)
        # Two failures of one unit never fall on the same nanosecond: time goes on between them.
        at = end + np.maximum(_ticks(source.lifetime.draw(rng, len(unit))), 1)
    if not starts:
        none = np.empty(0, np.int64)
        return none, none, none, none
    first = np.concatenate(whose) * width
    return np.concatenate(starts), np.concatenate(ends), first, np.minimum(width, cluster.total - first)


def _ticks(seconds: npt.NDArray[np.float64]) -> Ticks:
    counted: Ticks = np.rint(np.minimum(seconds, LONGEST_S) * NS).astype(np.int64)
    return counted
