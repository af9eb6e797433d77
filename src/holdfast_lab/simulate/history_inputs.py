"""What a history is computed from: what is the same in all histories, and its own outages.

The functions of :mod:`~holdfast_lab.simulate.history` run on these either way: as plain tuples, or as arrays of records
with the same fields. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, NamedTuple, cast, get_type_hints

import numpy as np

from holdfast_lab.simulate.checks import ticks
from holdfast_lab.simulate.decision_table import SimulatedDecision, admission_ns, decision_table
from holdfast_lab.simulate.failures import Outages
from holdfast_lab.simulate.price_table import price_table
from holdfast_lab.simulate.scenario import Scenario

NO_END = -1
"""In place of the work of a job that has no end."""
_NEVER = 1 << 62
"""Later than every event."""


class Price(NamedTuple):
    """Durations with some number of members: a row of :class:`~holdfast_lab.simulate.price_table.PriceTable`."""

    compute: int
    sums: int
    exposed: int
    regroup: int
    weight: int


class Outage(NamedTuple):
    """An outage.

    Workers that always go down and come up together are a cell.

    Args:
        start: When it begins.
        ready: When a new worker is ready after it.
        cell: The first cell that is down.
        cells: Number of cells that are down.
        by_ready: The outage that is in the order of ``ready`` where this one is in that of ``start``.
    """

    start: int
    ready: int
    cell: int
    cells: int
    by_ready: int


class Parameters(NamedTuple):
    """What is the same in all histories of a scenario.

    Args:
        horizon: When the simulation ends.
        detect, save, save_background, restart, load, admission: Durations that do not depend on the number of members.
        workers: Active workers.
        min_workers: With fewer members the job saves and stops.
        quorum: Available workers needed to start the job.
        every: Steps between two checkpoints, 0 for none.
        buckets: All-reduces of a step besides the commit vote.
        target: Total weight of the steps of the job, or :data:`NO_END`.
        stale: Weight of the steps that a failure costs where a part is restored as it was some steps ago.
        relaunches: The launcher restarts the job after every failure.
        split: The model is split or mirrored: a failure is detected while computing.
        eager: The optimizer is overlapped with the all-reduces.
        prices: By number of members.
        decisions: Of :func:`~holdfast_lab.simulate.decision_table.decision_table`.
    """

    horizon: int
    detect: int
    save: int
    save_background: int
    restart: int
    load: int
    admission: int
    workers: int
    min_workers: int
    quorum: int
    every: int
    buckets: int
    target: int
    stale: int
    relaunches: bool
    split: bool
    eager: bool
    prices: Sequence[Price]
    decisions: Sequence[SimulatedDecision]


class Calendar(NamedTuple):
    """The outages of one history, in time order; the last one never comes.

    Args:
        outages: The outages.
        size: Workers of a cell; the last one may have fewer.
        total: Workers of all cells.
        ready_at: When a new worker is or was ready, by cell.
    """

    outages: Sequence[Outage]
    size: int
    total: int
    ready_at: MutableSequence[int]


_KINDS = {int: np.int64, float: np.float64, bool: np.bool_}


def record(kind: type) -> np.dtype[np.void]:
    """Return the type of an array whose entries have the fields of ``kind``."""
    return np.dtype([(name, _KINDS[of]) for name, of in get_type_hints(kind).items()], align=True)


def parameters(scenario: Scenario) -> Parameters:
    """Return what is the same in all histories, with arrays of records."""
    cluster, job, costs = scenario.cluster, scenario.job, scenario.costs
    return Parameters(
        horizon=ticks(scenario.horizon_s),
        detect=ticks(costs.detect_s),
        save=ticks(costs.save_s),
        save_background=ticks(costs.save_background_s),
        restart=ticks(costs.restart_s),
        load=ticks(costs.load_s),
        admission=admission_ns(scenario),
        workers=cluster.workers,
        min_workers=job.min_workers,
        quorum=scenario.quorum,
        every=job.save_every,
        buckets=job.buckets,
        target=NO_END if job.steps is None else job.steps * cluster.workers,
        stale=round(scenario.stale_iterations * cluster.workers),
        relaunches=job.strategy == "relaunch",
        split=job.model != "replicated",
        eager=job.overlap_optimizer,
        prices=_prices(scenario),
        decisions=cast("Any", np.array(decision_table(scenario), record(SimulatedDecision))),
    )


def _prices(scenario: Scenario) -> Any:
    table = price_table(scenario.cluster, scenario.job, scenario.costs)
    columns = [getattr(table, name).tolist() for name in Price._fields]
    return np.array(list(zip(*columns, strict=True)), record(Price))


def calendar(outages: Outages, spawn: int, total: int) -> Calendar:
    """Return the outages of a history as an array of records.

    Args:
        outages: The outages.
        spawn: From the end of an outage until a new worker is ready.
        total: Workers and spares together.
    """
    end = outages.first + outages.width
    size = int(np.gcd.reduce(np.concatenate((outages.first, end[end < total])))) or total
    ready, order = outages.ready_in_order(spawn)
    number = len(outages)
    listed = np.zeros(number + 1, record(Outage))
    for name, column, never in (
        ("start", outages.start, _NEVER),
        ("ready", ready, _NEVER),
        ("cell", outages.first // size, 0),
        ("cells", -(-outages.width // size), 0),
        ("by_ready", order, number),
    ):
        listed[name][:number], listed[name][number] = column, never
    return Calendar(cast("Any", listed), size, total, cast("Any", np.zeros(-(-total // size), np.int64)))
