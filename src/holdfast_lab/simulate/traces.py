"""Failures from recorded traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, NS, check_choice, check_range
from holdfast_lab.simulate.cluster import LEVELS, Cluster
from holdfast_lab.simulate.failures import Outages
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.logs.reading import FailureLog, read_log
from holdfast_lab.simulate.reading import READERS, OutageSpan

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FailureTrace:
    """The recorded outages of real machines.

    The units of the trace become the workers, nodes or racks of the cluster. If the cluster has more of them, the trace
    is used several times side by side. If the simulation is longer, the trace starts over: a unit that is up at its end
    stays up until its next failure, even if the trace begins with that unit down.

    Args:
        spells: Unit, begin and end of each outage, seconds from the begin of the trace; a unit may have several at
            once. An outage may end after the trace: it then lasts until that time in the repeated trace.
        units: Number of units, including those that never failed, 1 to 10,000,000.
        span_s: Length of the observation, ``> 0``.
        level: The level of a unit: ``"worker"``, ``"node"`` or ``"rack"``.
        replayed: Every repetition uses the trace from its begin, unit by unit. Otherwise each repetition begins at a
            random time in it, and at another one for each copy side by side; units that fail together still do.
        name: Where it comes from.

    Raises:
        ConfigError: if a number is out of range.
    """

    spells: tuple[OutageSpan, ...]
    units: int
    span_s: float
    level: str = "node"
    replayed: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)
        check_range("units", self.units, 1, most=10_000_000)
        check_range("span_s", self.span_s, 0, above=True, most=LONGEST_S)
        for unit, start_s, end_s in self.spells:
            if not 0 <= unit < self.units or not 0 <= start_s <= end_s:
                raise ConfigError(
                    f"an outage must be of one of {self.units} units and end after it begins, "
                    f"got unit {unit} from {start_s:g} s to {end_s:g} s"
                )

    def draw(self, cluster: Cluster, horizon_s: float, seed: tuple[int, int]) -> Outages:
        """Return the outages that begin before ``horizon_s``; units that are down at the begin are down from 0 on."""
        rng = np.random.default_rng(seed)
        units, width = cluster.units(self.level), cluster.width(self.level)
        spells = np.array(self.spells, dtype=np.float64).reshape(-1, 3)
        again = self._met_again(spells)
        found: list[Seconds] = []
        for base in range(0, units, self.units):
            begin_s, turn = 0.0, 0
            if not self.replayed:
                begin_s, turn = rng.random() * self.span_s, int(rng.integers(self.units))
            laid = spells.copy()
            laid[:, 0] = base + (laid[:, 0] + turn) % self.units
            there = laid[:, 0] < units
            found += self._over_and_over(laid[there], again[there], begin_s, horizon_s)
        every = np.concatenate(found) if found else np.empty((0, 3))
        first = every[:, 0].astype(np.int64) * width
        start, end = (np.rint(np.clip(every[:, i], 0, LONGEST_S) * NS).astype(np.int64) for i in (1, 2))
        return Outages.of(start, end, first, np.minimum(width, cluster.total - first))

    def _met_again(self, spells: Seconds) -> npt.NDArray[np.bool_]:
        """Return which outages occur in repetitions of the trace.

        An outage at the start of the trace occurs only if it continues one at the end: a unit that is up at the end
        stays up, and one that is down beyond the end is already down.
        """
        failed, whose = np.unique(spells[:, 0], return_inverse=True)
        last_s = np.zeros(len(failed))
        np.maximum.at(last_s, whose, spells[:, 2])
        beyond_s = last_s[whose] - self.span_s
        return np.asarray((spells[:, 1] > 0) | ((beyond_s >= 0) & (beyond_s < spells[:, 2])))

    def _over_and_over(
        self, laid: Seconds, again: npt.NDArray[np.bool_], begin_s: float, horizon_s: float
    ) -> list[Seconds]:
        """Return the outages of the trace from ``begin_s`` on, starting over as often as necessary."""
        found = []
        for time in range(-1, int((begin_s + horizon_s) // self.span_s) + 1):
            shifted = laid[again] if time > 0 else laid.copy()
            shifted[:, 1:] += time * self.span_s - begin_s
            found.append(shifted[(shifted[:, 2] > 0) & (shifted[:, 1] < horizon_s)])
        return found if not self.replayed else found[1:]

    def mtbf_s(self, cluster: Cluster) -> float:
        """Return the mean time between any two failures on this cluster, seconds."""
        seen = sum(spell.start_s > 0 for spell in self.spells)  # a unit that is down from the begin interrupts no job
        rate = seen / self.span_s * cluster.units(self.level) / self.units
        return 1 / rate if rate else float("inf")


def read_trace(
    path: str | Path, kind: str, *, level: str = "node", replayed: bool = False, **choices: float | int | str
) -> FailureTrace:
    """Read a failure trace.

    ===============  =========================================================================================
    ``infinitehbd``  JSON of fault starts and ends (InfiniteHBD-Trace, SIGCOMM 2025); ``units`` servers were observed,
    400 ``lanl``         CSV of all outages of LANL's systems (LA-UR-05-7318), of one ``system`` by number ``spot``
    CSV ``milliseconds,add|remove,name`` (Bamboo, NSDI 2023): down until added; needs ``span_s`` ``sizes``        CSV
    ``date, time, machines`` (the same): the oldest machine leaves first ``ssd``          CSV of drives that failed with
    node and rack (Alibaba, FAST 2021), of one ``room``; ``repair_s`` and
                     ``nodes_per_rack`` are not in it. Nodes of one rack are numbered consecutively
    ``table``        CSV with a header ``unit,start_s,end_s``; needs ``span_s``
    ===============  =========================================================================================

    The file says how long the machines were observed. ``spot`` and ``table`` files do not, and need ``span_s``: seconds
    from the begin of the trace, not less than its last event. Include a quiet period at the end; without it the failure
    rate is too high. Files that end in ``.gz``, ``.xz`` or ``.zip`` are decompressed.

    Args:
        path: The file.
        kind: One of those above.
        level: The level of a unit.
        replayed: As for :class:`FailureTrace`.
        **choices: Further options of the kind.

    Raises:
        ConfigError: if the file is missing, the kind is unknown, or the file has another format.
    """
    check_choice("kind of trace", kind, tuple(READERS))
    reader, takes = READERS[kind]
    _check_choices(kind, list(choices), takes)
    read = reader(Path(path), **choices)
    if not read.spells:
        raise ConfigError(f"{path} contains no outage" + (f" where {choices}" if choices else ""))
    return FailureTrace(read.spells, read.units, read.span_s, level, replayed, f"{kind} {Path(path).name}")


def read_log_trace(
    path: str | Path, options: LogOptions, *, level: str = "node", replayed: bool = False
) -> tuple[FailureTrace, FailureLog]:
    """Read a log of any form that has a time axis as a trace (:mod:`holdfast_lab.simulate.logs`).

    Raises:
        ConfigError: if it cannot be read, or has no time axis or no outage.
    """
    log = read_log(path, options)
    if log.trace is None or not log.trace.spells:
        raise ConfigError(
            f"{path} ({log.form}) does not say when machines failed, so that it cannot be replayed; draw from its "
            "lifetimes with log = in [[failures]]"
        )
    read = log.trace
    return FailureTrace(read.spells, read.units, read.span_s, level, replayed, f"log {Path(path).name}"), log


def _check_choices(kind: str, given: Sequence[str], takes: Sequence[str]) -> None:
    if odd := sorted(set(given) - set(takes)):
        allowed = f"takes {', '.join(takes)}" if takes else "takes no options"
        raise ConfigError(f"a trace of kind {kind} {allowed}, got {', '.join(odd)}")
