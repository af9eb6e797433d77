"""Outages of machines, which never depend on the job.

Every unit (a worker, a node or a rack) fails and is repaired independently. So a history is drawn once, as a list of
outages, and every strategy is simulated on it. A worker is down while any unit that contains it is down.
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

_POOL = 4096
"""Lifetimes at least that those of units in use are chosen from."""


@dataclass(frozen=True, slots=True)
class Outages:
    """A history of one cluster, in time order. All arrays have the shape ``(outages,)``.

    Args:
        start: Begin of the outage, nanoseconds.
        end: End of the repair, not before ``start``.
        first: The first worker that is down.
        width: Number of workers that are down.
    """

    start: Ticks
    end: Ticks
    first: Ticks
    width: Ticks

    @classmethod
    def of(cls, start: Ticks, end: Ticks, first: Ticks, width: Ticks) -> Outages:
        """Return the outages in time order; at equal times the lower worker is first."""
        order = np.lexsort((width, first, start))
        return cls(start[order], end[order], first[order], width[order])

    def __len__(self) -> int:
        return len(self.start)

    def ready(self, spawn: int) -> Ticks:
        """Return when a new worker is ready after each outage, ``spawn`` nanoseconds after its end.

        No two times are equal: where they would be, the later ones are a nanosecond later.
        """
        return self.ready_in_order(spawn)[0]

    def ready_in_order(self, spawn: int) -> tuple[Ticks, Ticks]:
        """Return :meth:`ready`, and the outages in the order of these times."""
        at = self.end + spawn
        order = np.argsort(at, kind="stable")
        steps = np.arange(len(at))
        apart = np.maximum.accumulate(at[order] - steps) + steps
        result = np.empty_like(at)
        result[order] = apart
        return result, order


class Down(Protocol):
    """A source of outages."""

    def draw(self, cluster: Cluster, horizon_s: float, seed: tuple[int, int]) -> Outages:
        """Return the outages that begin before ``horizon_s``.

        Args:
            cluster: The cluster that fails.
            horizon_s: Seconds.
            seed: Seed of the study and number of the repetition: same numbers, same outages.
        """
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """One cause of failures of a unit, and the time to repair it.

    Args:
        level: ``"worker"``, ``"node"`` or ``"rack"``: the unit that fails as a whole.
        lifetime: Time from a unit's repair to its next failure.
        repair: Time that it is down; by default 0, as when the process dies but the machine is fine.
        age_s: Age of the units at the beginning, ``>= 0``.
        stationary: The units have been in use for long, and have failed and been repaired as often as that takes:
            failures come at the same rate from the beginning on, whatever the lifetime. ``age_s`` must be 0.

    Raises:
        ConfigError: if the level is unknown, or units would fail infinitely often at one moment.
    """

    level: str
    lifetime: Distribution
    repair: Distribution = field(default_factory=lambda: Constant(0.0))
    age_s: float = 0.0
    stationary: bool = False

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)
        if self.stationary and self.age_s:
            raise ConfigError(f"units have an age_s or are stationary, not both; got age_s {self.age_s:g}")
        check_range("age_s", self.age_s, 0, most=LONGEST_S)
        if not self.lifetime.mean_s > 0:
            raise ConfigError(f"the mean lifetime of a {self.level} must be more than 0, got {self.lifetime.mean_s:g}")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures drawn from independent sources.

    Args:
        sources: Any number; without sources nothing fails.
    """

    sources: tuple[Source, ...] = ()

    @classmethod
    def of_count(
        cls, number: int, *, span_s: float, units: int, level: str = "node", repair: Distribution | None = None
    ) -> Failures:
        """Return memoryless failures at a counted rate.

        Args:
            number: Number of failures, ``>= 1``.
            span_s: The seconds in which they were counted.
            units: The number of workers, nodes or racks observed.
            level: Which of these.
            repair: Time that a unit is down; by default 0.

        Raises:
            ConfigError: if a number is out of range.
        """
        check_range("number of failures", number, 1)
        check_range("span_s", span_s, 0, above=True)
        check_range("units", units, 1)
        return cls((Source(level, Exponential(span_s * units / number), repair or Constant(0.0)),))

    def draw(self, cluster: Cluster, horizon_s: float, seed: tuple[int, int]) -> Outages:
        """Return the outages that begin before ``horizon_s``; each source has its own random numbers."""
        drawn = [
            _draw(source, cluster, horizon_s, np.random.default_rng((*seed, number)))
            for number, source in enumerate(self.sources)
        ]
        columns = [np.concatenate([d[i] for d in drawn] or [np.empty(0, np.int64)]) for i in range(4)]
        return Outages.of(*columns)

    def mtbf_s(self, cluster: Cluster) -> float:
        """Return the mean time between any two failures, seconds: that of a unit divided by the number of units."""
        rates = [cluster.units(s.level) / (s.lifetime.mean_s + s.repair.mean_s) for s in self.sources]
        return 1 / sum(rates) if rates else float("inf")


def _draw(
    source: Source, cluster: Cluster, horizon_s: float, rng: np.random.Generator
) -> tuple[Ticks, Ticks, Ticks, Ticks]:
    """Return start, end, first worker and width of one source's outages."""
    units, width = cluster.units(source.level), cluster.width(source.level)
    horizon = round(horizon_s * NS)
    starts, ends, whose = [], [], []
    unit = np.arange(units)
    at = _ticks(_first_lifetimes(source, rng, units))
    while (hit := at < horizon).any():
        unit, start = unit[hit], at[hit]
        end = start + _ticks(source.repair.draw(rng, len(unit)))
        starts.append(start)
        ends.append(end)
        whose.append(unit)
        # At least a nanosecond lies between two failures of a unit.
        at = end + np.maximum(_ticks(source.lifetime.draw(rng, len(unit))), 1)
    if not starts:
        none = np.empty(0, np.int64)
        return none, none, none, none
    first = np.concatenate(whose) * width
    return np.concatenate(starts), np.concatenate(ends), first, np.minimum(width, cluster.total - first)


def _first_lifetimes(source: Source, rng: np.random.Generator, units: int) -> npt.NDArray[np.float64]:
    """Return the remaining lifetimes of the units at the beginning.

    In a process that has run for long, the lifetime that covers a given moment is drawn in proportion to its length, and
    the moment is anywhere in it (Cox, Renewal Theory, 1962).
    """
    if not source.stationary:
        return source.lifetime.draw(rng, units, source.age_s)
    pool = source.lifetime.draw(rng, max(_POOL, 4 * units))
    chosen: npt.NDArray[np.float64] = rng.choice(pool, units, p=pool / pool.sum()) * rng.random(units)
    return chosen


def _ticks(seconds: npt.NDArray[np.float64]) -> Ticks:
    counted: Ticks = np.rint(np.minimum(seconds, LONGEST_S) * NS).astype(np.int64)
    return counted
